"""`quire doctor`: every fault is named, a sound machine hears nothing, and what is pasted says nothing of anybody."""

import getpass
import inspect
import json
import platform
import re
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from typer.testing import CliRunner

from quire.cli import app
from quire.cli.doctor import machine_rules
from quire.cli.doctor.machine_facts import MachineFacts, read_facts
from quire.cli.doctor.machine_rules import GIB, advice_for, report_block
from quire.config import load_settings

SOUND = MachineFacts(
    version="0.2.0",
    python="3.12.1",
    system="Linux 6.1.0 x86_64",
    processor="Some Processor @ 2.50GHz",
    abilities=frozenset({"avx2", "avx512f", "avx512_vnni"}),
    num_cpus=8,
    num_usable_cpus=8,
    cpu_quota=None,
    governor="performance",
    load=0.3,
    memory_bytes=32 * GIB,
    free_bytes=24 * GIB,
    container_bytes=None,
    swapped_bytes=0,
    huge_pages="madvise",
    max_open_files=1_048_576,
    cache_free_bytes=100 * GIB,
    is_temp_usable=True,
    port=8000,
    is_port_free=True,
    is_keys_file_private=True,
    isa="avx512vnni",
    num_openmp_runtimes=1,
    has_torch=False,
    has_mlx=False,
    threads_variable=None,
    memory_bytes_per_s=2e10,
)
FAULTS: dict[str, dict[str, Any]] = {
    "no-kernels": {"isa": None},
    "two-openmp-runtimes": {"num_openmp_runtimes": 2},
    "lesser-kernels": {"isa": "avx2"},
    "portable-kernels": {"isa": "portable"},
    "little-memory": {"free_bytes": GIB // 2},
    "container-memory": {"container_bytes": 8 * GIB},
    "container-cpus": {"cpu_quota": 1.5},
    "fewer-cpus": {"num_usable_cpus": 2},
    "few-threads": {"threads_variable": "2"},
    "huge-pages": {"huge_pages": "never"},
    "open-files": {"max_open_files": 256},
    "cache-folder": {"cache_free_bytes": None},
    "little-disk": {"cache_free_bytes": GIB},
    "temporary-folder": {"is_temp_usable": False},
    "port-taken": {"is_port_free": False},
    "keys-readable": {"is_keys_file_private": False},
    "powersave": {"governor": "powersave"},
    "busy": {"load": 30.0},
    "swapping": {"swapped_bytes": GIB},
}


def test_a_sound_machine_hears_nothing() -> None:
    assert advice_for(SOUND) == []
    assert advice_for(replace(SOUND, abilities=frozenset({"avx2"}), isa="avx2", governor=None, huge_pages=None)) == []


def test_the_portable_kernels_are_named_with_what_to_do_on_this_processor() -> None:
    (without_avx2,) = advice_for(replace(SOUND, abilities=frozenset(), isa="portable"))
    (forced,) = advice_for(replace(SOUND, isa="portable"))
    assert without_avx2.name == forced.name == "portable-kernels"
    assert "choose a small model" in without_avx2.hint
    assert "QUIRE_INSTRUCTION_SET" in forced.hint


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_and_only_it(name: str) -> None:
    (said,) = advice_for(replace(SOUND, **FAULTS[name]))
    assert said.name == name
    assert said.what
    assert said.hint


def test_every_rule_is_tried() -> None:
    assert set(re.findall(r'Advice\("([a-z-]+)"', inspect.getsource(machine_rules))) == set(FAULTS)


def test_what_does_not_work_comes_first() -> None:
    everything = replace(SOUND, **{key: value for fault in FAULTS.values() for key, value in fault.items()})
    kinds = [one.is_fault for one in advice_for(everything)]
    assert kinds == sorted(kinds, reverse=True)
    assert len(kinds) > 12


def test_what_is_pasted_says_nothing_of_anybody() -> None:
    random = Random(5)
    secrets = ("alice", "/home/alice", "quire-5ecre7", "box17.example")
    for _ in range(50):
        facts = replace(SOUND, **random.choice([*FAULTS.values()]))
        governor, pages, threads = (random.choice(secrets) for _ in range(3))
        facts = replace(facts, governor=governor, huge_pages=pages, threads_variable=threads)
        block = "\n".join(report_block(facts, advice_for(facts)))
        assert not [secret for secret in secrets if secret in block]


def test_this_machines_block_has_no_name_of_its_user_nor_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "zaphod"))
    monkeypatch.setenv("USER", "zaphod")
    monkeypatch.setattr(platform, "release", lambda: "6.1.0-zaphod-box")
    facts = read_facts(load_settings({}, environ={}))
    block = "\n".join(report_block(facts, advice_for(facts)))
    names = {"zaphod", platform.node(), str(Path.home())} - {"", "localhost"}
    assert not [name for name in names if name in block]
    assert getpass.getuser() == "zaphod"


def test_the_command_says_what_it_found_and_ends_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "quire.cli.doctor.machine_facts.read_facts"
    monkeypatch.setattr(module, lambda _settings: replace(SOUND, huge_pages="never"))
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0
    assert "could be better: huge pages are disabled" in done.stdout
    assert "doctor: huge-pages" in done.stdout
    monkeypatch.setattr(module, lambda _settings: replace(SOUND, is_port_free=False))
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 1
    assert [one["name"] for one in json.loads(done.stdout)["advice"]] == ["port-taken"]
