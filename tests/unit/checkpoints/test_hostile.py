"""Damaged and hostile files end in a sentence: no crash, no hang, no huge allocation."""

import os
from pathlib import Path

import pytest

from quire.checkpoints import Checkpoint
from tests.support.workers import hostile


def test_two_hundred_damaged_models_are_refused_or_harmless() -> None:
    result = hostile.survey(200, seed=20, load="tests.support.workers.hostile:open_all")
    assert result.crashed == []
    assert result.num_files == result.num_refused + result.num_accepted == 200
    assert result.num_refused > 100
    assert result.slowest_s < 5


def test_the_same_seed_makes_the_same_damage(tmp_path: Path) -> None:
    pristine = hostile.make_pristine(tmp_path / "pristine")
    assert list(hostile.mutations(pristine, 1, 50)) == list(hostile.mutations(pristine, 1, 50))
    assert list(hostile.mutations(pristine, 1, 50)) != list(hostile.mutations(pristine, 2, 50))


def die(checkpoint: Checkpoint) -> None:
    os.abort()


def hang(checkpoint: Checkpoint) -> None:
    while True:
        pass


def allocate(checkpoint: Checkpoint) -> None:
    bytearray(64 * 1024**3)


@pytest.mark.parametrize(
    ("load", "verdict"), [("die", "the process died"), ("hang", "no answer"), ("allocate", "MemoryError")]
)
def test_the_survey_notices_a_loader_that_crashes(monkeypatch: pytest.MonkeyPatch, load: str, verdict: str) -> None:
    if load == "hang":
        monkeypatch.setattr(hostile, "SECONDS_PER_FILE", 1.0)
    result = hostile.survey(12, seed=5, load=f"{__name__}:{load}")
    assert result.crashed
    assert all(verdict in story for story in result.crashed)
    assert result.num_files == 12
