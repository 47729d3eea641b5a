"""Models that a settings file names: what may be said of them, and what each of them takes of the memory."""

from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.checkpoints import directory, quiet
from quire.client.engines import park_plan
from quire.client.engines.park_plan import MIN_KV_BYTES, PROCESS_BYTES, divide_memory, models_in, plan_park, settings_of
from quire.config import ModelSettings, OnDemandModel, load_settings
from quire.config.parked_models import SAMPLING_LIMITS, all_models, parked_models
from quire.errors import CheckpointError, ConfigError
from tests.support.errors import raises_code

GIB = 1 << 30


def test_a_settings_file_may_name_models(tmp_path: Path) -> None:
    (tmp_path / "quire.toml").write_text(
        'max_running = 4\n[models.coder]\nmodel = "org/name:Q4_K_M"\naliases = ["claude-*", "gpt-5"]\n'
        'max_model_len = 8192\nmemory = "6GiB"\nsampling = { temperature = 0.2, top_k = 40 }\nkeep = true\n'
        '[models."small one"]\nmodel = "x"\n'
    )
    with pytest.raises(ConfigError) as refused:
        load_settings({}, environ={}, file=tmp_path / "quire.toml")
    assert refused.value.settings == ("the model name",)
    text = (tmp_path / "quire.toml").read_text().replace('"small one"', "small").replace('"x"', '"x.gguf"\nidle_s = 60')
    (tmp_path / "quire.toml").write_text(text)
    settings = load_settings({}, environ={}, file=tmp_path / "quire.toml")
    coder, small = settings.parked
    assert settings.model.max_running == 4
    assert (coder.name, coder.model, coder.aliases) == ("coder", "org/name:Q4_K_M", ("claude-*", "gpt-5"))
    assert (coder.max_sequence_tokens, coder.memory_bytes, coder.is_kept) == (8192, 6 * GIB, True)
    assert dict(coder.sampling) == {"temperature": 0.2, "top_k": 40}
    assert small == OnDemandModel("small", "x.gguf", idle_s=60.0)


@pytest.mark.parametrize(
    ("table", "broken"),
    [
        ({}, "model_missing"),
        ({"model": 3}, ("model",)),
        ({"model": "a", "modell": "b"}, "unknown_key"),
        ({"model": "a", "aliases": ["a b"]}, ("aliases",)),
        ({"model": "a", "memory": "1 horse"}, ("memory",)),
        ({"model": "a", "idle_s": -1}, ("idle_s",)),
        ({"model": "a", "keep": "maybe"}, ("keep",)),
        ({"model": "a", "sampling": 3}, ("sampling",)),
        ({"model": "a", "sampling": {"heat": 1}}, "unknown_sampling_default"),
        ({"model": "a", "sampling": {"top_p": 2}}, ("top_p",)),
        ({"model": "a", "sampling": {"top_k": 0.5}}, ("top_k",)),
        ("a", ("models",)),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_place(table: Any, broken: str | tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        parked_models({"coder": table}, "file quire.toml")
    assert (refused.value.settings or refused.value.code) == broken
    assert "[models.coder] in file quire.toml" in str(refused.value)


def test_models_must_be_tables() -> None:
    with pytest.raises(ConfigError) as refused:
        parked_models([1], "file x")
    assert refused.value.settings == ("models",)


def test_two_models_do_not_share_a_name() -> None:
    with raises_code(ConfigError, "duplicate_model_name"):
        all_models([OnDemandModel("a", "x")], [OnDemandModel("b", "x"), OnDemandModel("a", "y")])


def kept(*weights: int) -> list[OnDemandModel]:
    return [OnDemandModel(str(at), "m", is_kept=True) for at, _ in enumerate(weights)]


def test_models_that_are_kept_share_the_memory_by_weights_and_then_evenly() -> None:
    assert divide_memory(1_000, kept(100, 300), [100, 300]) == [400, 600]
    with raises_code(ConfigError, "kept_models_too_large"):
        divide_memory(1_000, kept(500, 500), [500, 500])


def test_models_that_come_and_go_share_it_if_all_fit_and_else_get_what_they_need() -> None:
    three = [OnDemandModel(str(at), "m") for at in range(3)]
    need = GIB + MIN_KV_BYTES + PROCESS_BYTES
    assert divide_memory(30 * GIB, three, [GIB] * 3) == [10 * GIB] * 3
    assert divide_memory(6 * GIB, three, [GIB] * 3) == [need] * 3
    assert divide_memory(2 * GIB, three, [GIB] * 3) == [2 * GIB] * 3
    said = [OnDemandModel("a", "m", memory_bytes=3 * GIB), *three[1:]]
    assert divide_memory(30 * GIB, said, [GIB] * 3)[0] == 3 * GIB
    assert divide_memory(6 * GIB, said, [GIB] * 3)[0] == 3 * GIB


@given(st.lists(st.tuples(st.integers(0, 8 * GIB), st.booleans()), min_size=1, max_size=6), st.integers(GIB, 32 * GIB))
def test_no_model_gets_more_than_there_is_and_those_that_are_kept_fit_together(
    weighed: list[tuple[int, bool]], total: int
) -> None:
    models = [OnDemandModel(str(at), "m", is_kept=is_kept) for at, (_, is_kept) in enumerate(weighed)]
    try:
        needs = divide_memory(total, models, [own for own, _ in weighed])
    except ConfigError:
        assert any(one.is_kept for one in models)
        return
    assert max(needs) <= total
    assert sum(need for one, need in zip(models, needs, strict=True) if one.is_kept) <= total


def test_a_folder_has_the_models_of_its_files_and_directories(tmp_path: Path) -> None:
    for name in ("b.gguf", "a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "mmproj-b.gguf", "notes.txt"):
        (tmp_path / name).touch()
    for name in ("llama", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "llama" / "config.json").touch()
    assert [(one.name, Path(one.model).name) for one in models_in(tmp_path)] == [
        ("a", "a-00001-of-00002.gguf"),
        ("b", "b.gguf"),
        ("llama", "llama"),
    ]
    with pytest.raises(ConfigError) as refused:
        models_in(tmp_path / "none")
    assert refused.value.settings == ("models_folder",)


def test_a_model_that_is_not_here_is_known_with_the_reason_and_never_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody is asked
    (tmp_path / "x.gguf").write_bytes(b"0" * 1000)
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "model.safetensors").write_bytes(b"0" * 10)
    named = {"x": str(tmp_path / "x.gguf"), "dir": str(tmp_path / "dir"), "hub": "org/name", "gone": "/no/where.gguf"}
    plan = plan_park([OnDemandModel(*one) for one in named.items()], ModelSettings(memory_bytes=30 * GIB), quiet)
    assert plan.memory_bytes == 30 * GIB
    assert plan.by_name["x"].path == tmp_path / "x.gguf"
    assert plan.by_name["x"].needed_bytes - plan.by_name["dir"].needed_bytes == 990
    assert plan.by_name["hub"].problem == "the model hub is not on this machine; fetch it with: quire pull org/name"
    assert plan.by_name["gone"].problem.endswith("check its path in the settings")
    (tmp_path / "x-00001-of-99999.gguf").touch()
    strange = [OnDemandModel("strange", str(tmp_path / "x-00001-of-99999.gguf")), OnDemandModel("x", named["x"])]
    plan = plan_park(strange, ModelSettings(memory_bytes=30 * GIB), quiet)
    assert "expected a GGUF model of 1 to 256 files" in plan.by_name["strange"].problem
    assert plan.by_name["x"].problem == ""
    with pytest.raises(CheckpointError):
        plan_park([OnDemandModel("hub", "org/name", is_kept=True)], ModelSettings(memory_bytes=30 * GIB), quiet)


def test_of_a_repository_the_best_file_that_fits_the_memory_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int | None] = []

    def local_path(_name: str, *_more: Any, memory_bytes: int | None) -> Path:
        limits.append(memory_bytes)
        return tmp_path

    monkeypatch.setattr(park_plan, "local_path", local_path)
    models = [
        OnDemandModel("a", "org/a", is_kept=True),
        OnDemandModel("b", "org/b", is_kept=True, memory_bytes=2 * GIB),
    ]
    plan_park(models, ModelSettings(memory_bytes=30 * GIB), quiet)
    assert limits == [30 * GIB, 2 * GIB]


def test_what_sampling_may_be_is_the_same_in_settings_and_in_a_models_files() -> None:
    assert dict(SAMPLING_LIMITS) == directory.SAMPLING_LIMITS


def test_a_model_has_its_own_context_and_memory() -> None:
    settings = ModelSettings(max_sequence_tokens=100)
    assert settings_of(OnDemandModel("a", "m"), settings, 5).max_sequence_tokens == 100
    own = settings_of(OnDemandModel("a", "m", max_sequence_tokens=50), settings, 5)
    assert (own.max_sequence_tokens, own.memory_bytes) == (50, 5)
