"""The engine measured in this process, with an oracle for a model."""

from collections.abc import Callable
from pathlib import Path

import pytest

from quire.backends.cpu.measured_roof import CpuRoof, RoofPoint, interleaved_calls
from quire.backends.kernels import extension
from quire.bench.engine import EngineBench, EngineLoad
from quire.config import ModelSettings
from quire.engine.step_profile import StepLoad
from quire.errors import ConfigError
from tests.support.errors import raises_code
from tests.support.models.tiny_models import Tiny, converted_tiny
from tests.support.servers.talkers import talker

LOAD = EngineLoad((1, 2, 4), prompt_tokens=12, output_tokens=5, prefix_tokens=40, num_rounds=2, has_roof=False)


class PretendedRoof(CpuRoof):
    """Runs the step and says what a machine would."""

    def measure(self, step: Callable[[], object], num_rows: int, kv_bytes: float, num_steps: int) -> RoofPoint:
        for _ in range(num_steps):
            step()
        assert kv_bytes > 0
        return RoofPoint(0.02, 0.01, 0.015, 1e9)


def test_each_batch_is_measured_and_compared_with_one() -> None:
    with EngineBench(talker(), LOAD, None, "oracle") as bench:
        result = bench.run(lambda _: None)
    assert [one.batch for one in result.batches] == [1, 2, 4]
    assert result.batches[0].speedup == 1.0
    assert all(one.output_tokens_per_s > 0 and one.decode_tokens_per_s > 0 for one in result.batches)
    assert result.prefill_tokens_per_s > 0
    assert result.record()["batches"][2]["batch"] == 4
    assert len(result.batch_rows()) == 3


def test_a_prefix_that_was_seen_is_found_again() -> None:
    opened = talker()
    with EngineBench(opened, LOAD, None, "oracle") as bench:
        result = bench.run(lambda _: None)
        hit_tokens = opened.engine.memory.stats().hit_tokens
    assert hit_tokens == LOAD.num_rounds * LOAD.prefix_tokens
    assert result.prefix_ttft_ratio is not None
    assert "cached" in result.rows()[2][0]


def test_the_roof_stands_beside_a_step_in_which_all_decode_and_nothing_is_left() -> None:
    opened = talker()
    with EngineBench(opened, LOAD, PretendedRoof(None), "oracle") as bench:
        result = bench.run(lambda _: None)
        assert not opened.engine.has_work
    assert [one.roof_share for one in result.batches] == [0.75] * 3
    assert result.batches[2].roof_tokens_per_s == pytest.approx(4 / 0.015)


def test_a_model_without_a_roof_says_why() -> None:
    load = EngineLoad((1,), 12, 5, 0, 1, has_roof=True)
    with EngineBench(talker(), load, CpuRoof(None, "it is strange"), "oracle") as bench:
        result = bench.run(lambda _: None)
    assert result.notes == ("no roofline: it is strange",)
    assert result.prefix_ttft_ratio is None


def test_what_does_not_fit_a_sequence_is_refused_before_anything_runs() -> None:
    with raises_code(ConfigError, "sequence_too_long"):
        EngineBench(talker(), EngineLoad((1,), 600, 5, 0, 1, has_roof=False), None, "oracle")


def test_a_roof_is_measured_turn_about_with_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = converted_tiny(tmp_path, Tiny(hidden=256)).config
    reason = CpuRoof.of(config, ModelSettings()).reason
    if not extension.availability().is_available:
        assert reason == extension.availability().reason
        return
    assert reason == ""
    monkeypatch.setattr("quire.backends.cpu.measured_roof.READ_BYTES", 1 << 20)
    steps: list[int] = []
    point = CpuRoof.of(config, ModelSettings()).measure(lambda: steps.append(1), 3, kv_bytes=1e9, num_steps=4)
    assert len(steps) == 5
    assert 0 < point.bare_s < point.roof_s
    assert point.roof_s == pytest.approx(point.bare_s + 1e9 / point.bytes_per_s)


def test_what_has_no_roof_says_why(tmp_path: Path) -> None:
    config = converted_tiny(tmp_path, Tiny()).config
    assert "bfloat16 on cpu" in CpuRoof.of(config, ModelSettings(dtype="bfloat16")).reason
    assert "transformers" in CpuRoof.of({"model_type": "gpt2"}, ModelSettings()).reason


def test_more_at_once_than_may_run_is_refused() -> None:
    with raises_code(ConfigError, "too_many_sequences"):
        EngineBench(talker(), EngineLoad((17,), 8, 5, 0, 1, has_roof=False), None, "oracle")


def test_a_pool_too_small_for_the_batch_is_told_and_not_waited_for() -> None:
    load = EngineLoad((16,), 60, 2, 0, 1, has_roof=True)
    bench = EngineBench(talker(num_blocks=160), load, PretendedRoof(None), "oracle")
    with bench, raises_code(ConfigError, "batch_ended_early"):
        bench.run(lambda _: None)


def test_calls_are_timed_turn_about() -> None:
    order: list[str] = []
    taken = interleaved_calls({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2)
    assert order == ["a", "b"] * 3
    assert set(taken) == {"a", "b"}


def test_a_profile_is_of_steps_of_all_kinds_and_leaves_the_engine_empty() -> None:
    opened = talker()
    with EngineBench(opened, LOAD, None, "oracle") as bench:
        profile = bench.profile("oracle")
        assert not opened.engine.has_work
    assert profile.row_points[-1][0] >= 16
    assert profile.duration_s(StepLoad(1, 0, 8)) > 0.0
    assert not profile.is_by_hand
