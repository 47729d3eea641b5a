"""Layers that keep a state: what they compute is what plain float64 computes, and no bit of it depends on company.

Small models of all three kinds, with sizes that no SIMD width divides. See tests/support/models/plain_hybrids.py.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from quire.backends.cpu import load as cpu_load
from quire.backends.cpu.decoder import Decoder
from quire.backends.cpu.state_store import StateStore
from quire.backends.kernels import extension
from quire.backends.kernels.threads import num_threads, use_threads
from tests.support.models.hybrid_prints import LENGTHS, TOLERANCE, texts_of, worst_of
from tests.support.models.plain_hybrids import CONFIGS, SETTINGS, FedSequences, open_decoder, write_hybrid

pytestmark = pytest.mark.skipif(not extension.availability().is_available, reason=extension.availability().reason)

ALL = dict(enumerate(LENGTHS))


@pytest.fixture(params=CONFIGS)
def decoder(request: pytest.FixtureRequest, tmp_path: Path) -> Decoder:
    write_hybrid(tmp_path, CONFIGS[request.param])
    return open_decoder(tmp_path)


@pytest.fixture
def others() -> Iterator[None]:
    """Threads beside this one."""
    before = num_threads()
    use_threads(3)
    yield
    use_threads(before)


def fed_whole(decoder: Decoder, texts: list[list[int]]) -> FedSequences:
    """All texts side by side in one step."""
    sequences = FedSequences(decoder, texts)
    sequences.feed(ALL)
    return sequences


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_tells_what_plain_float64_tells(name: str, tmp_path: Path) -> None:
    assert worst_of(CONFIGS[name], tmp_path) < TOLERANCE


def test_any_cut_into_steps_gives_the_same_bits(decoder: Decoder, others: None) -> None:
    del others
    texts, dice = texts_of(), Random(3)
    whole = fed_whole(decoder, texts)
    cut, left = FedSequences(decoder, texts), dict(ALL)
    while left:
        chosen = dice.sample(sorted(left), dice.randint(1, len(left)))
        counts = {number: min(left[number], dice.choice((1, 1, 2, 3, 40, 270))) for number in chosen}
        cut.feed(counts)
        left = {number: rest for number, count in left.items() if (rest := count - counts.get(number, 0))}
    for number in ALL:
        assert np.array_equal(cut.logits(number), whole.logits(number))
    assert np.array_equal(cut.states.numbers, whole.states.numbers)


def test_a_sequence_has_the_same_bits_alone_and_in_company(decoder: Decoder) -> None:
    texts = texts_of()
    whole = fed_whole(decoder, texts)
    for number, length in ALL.items():
        alone = FedSequences(decoder, texts)
        alone.feed({number: length})
        assert np.array_equal(alone.logits(number), whole.logits(number))
        assert np.array_equal(alone.states.numbers[number + 1], whole.states.numbers[number + 1])


def test_rows_that_nobody_asks_for_move_the_state_on_all_the_same(decoder: Decoder) -> None:
    texts = texts_of()
    whole = fed_whole(decoder, texts)
    asked = FedSequences(decoder, texts)
    last = asked.feed_last_logits(ALL)
    assert np.array_equal(last, [whole.logits(number)[-1] for number in ALL])
    assert np.array_equal(asked.states.numbers, whole.states.numbers)


def test_only_the_slots_of_a_step_are_written(decoder: Decoder) -> None:
    sequences = FedSequences(decoder, texts_of())
    sequences.feed({2: LENGTHS[2]})
    touched = np.flatnonzero(sequences.states.numbers.any(axis=1))
    assert touched.tolist() == [3]


def test_a_state_copied_to_another_slot_goes_on_there(decoder: Decoder) -> None:
    texts = texts_of()
    texts[1] = texts[0]
    sequences = FedSequences(decoder, texts)
    sequences.feed({0: 21})
    sequences.copy_sequence(0, 1)
    sequences.feed({1: 8, 0: 8})
    assert np.array_equal(sequences.logits(1), sequences.logits(0)[21:])


def test_slots_are_touched_where_a_step_writes_and_nowhere_else(decoder: Decoder) -> None:
    shallow = decoder.shallow()
    sequences = FedSequences(shallow, texts_of())
    sequences.feed({0: 290})
    written = sequences.states.numbers[1] != 0.0
    untouched = StateStore(decoder.slot_size, 2)
    untouched.numbers[:] = 7.0
    shallow.touch(untouched)
    assert (untouched.numbers[0] == 7.0).all()
    assert (untouched.numbers[1:, written] == 0.0).all()
    assert 0 < np.count_nonzero(untouched.numbers[1]) < decoder.slot_size


def test_what_slots_take_is_not_counted_as_a_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hybrid(tmp_path, CONFIGS["delta"])
    decoder = open_decoder(tmp_path)
    monkeypatch.setattr(cpu_load, "measure_peak_bytes", lambda _run, _plans: 5_000)
    few, many = (cpu_load.measure_step(decoder, replace(SETTINGS, max_running=count), 64) for count in (1, 64))
    assert few == many >= 5_000


@pytest.mark.parametrize("isa", ["portable", "avx2", "avxvnni", "avx512", "avx512vnni", "neondot"])
def test_every_instruction_set_computes_these_layers(isa: str) -> None:
    environment = {**os.environ, "QUIRE_INSTRUCTION_SET": isa}
    command = [sys.executable, "-m", "tests.support.models.hybrid_prints"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if "expected an instruction set of this processor" in done.stderr:
        pytest.skip(f"this processor has no {isa}")
    assert done.returncode == 0, done.stderr
    worst = json.loads(done.stdout)
    assert worst.keys() == CONFIGS.keys()
    assert all(wrong < TOLERANCE for wrong in worst.values()), worst
