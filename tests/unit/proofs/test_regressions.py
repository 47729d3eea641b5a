"""Speed beside the commit before is judged by medians of runs that took turns."""

from proofs.regressions import speed_ratios


def run(**figures: float) -> dict[str, float | int | bool]:
    return {key: value for key, figure in figures.items() for key, value in ((key, figure), (f"{key}_spread", 0.1))}


def test_one_slow_run_of_three_does_not_count() -> None:
    pairs = [(run(roof_1=0.8), run(roof_1=here)) for here in (0.8, 0.1, 0.8)]
    assert speed_ratios(pairs) == {"roof_1": 1.0}


def test_a_slower_row_is_below_one_even_where_less_is_better() -> None:
    there, here = run(roof_1=0.8, host_share=0.05), run(roof_1=0.4, host_share=0.1)
    assert speed_ratios([(there, here)]) == {"roof_1": 0.5, "host_share": 0.5}


def test_rows_without_a_spread_or_missing_in_a_run_are_left_out() -> None:
    there, here = run(roof_1=0.8, roof_4=0.8), {**run(roof_1=0.8), "step_ms": 3.0}
    assert list(speed_ratios([(there | {"step_ms": 3.0}, here)])) == ["roof_1"]
