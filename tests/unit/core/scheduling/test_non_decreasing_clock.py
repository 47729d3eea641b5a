from quire.core.scheduling.scheduler import NonDecreasingClock


def test_a_clock_that_goes_forward_is_followed() -> None:
    clock = NonDecreasingClock()
    assert [clock.at(now_s) for now_s in (-5.0, 0.0, 0.0, 7.5)] == [-5.0, 0.0, 0.0, 7.5]


def test_while_the_other_goes_back_it_stands_and_then_goes_on() -> None:
    clock = NonDecreasingClock()
    assert [clock.at(now_s) for now_s in (1.0, 3.0, -50.0, -49.0, -60.0, 0.0)] == [1.0, 3.0, 3.0, 4.0, 4.0, 64.0]
