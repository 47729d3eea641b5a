"""What `quire models`, `quire info` and `quire config` show a person and a machine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quire import cli
from quire.checkpoints import resolve
from quire.cli.models.commands import LocalModel, hub_folder
from quire.cli.models.info import facts_of
from quire.cli.shared.columns import columns, plain
from quire.errors import CheckpointError, ConfigError
from tests.support.errors import raises_code
from tests.support.models import architectures
from tests.support.models.tiny_models import Tiny, make_directory, write_gguf


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home and an empty current folder."""
    for name in list(os.environ):
        if name.startswith(("QUIRE_", "HF_", "HUGGINGFACE_", "XDG_")):
            monkeypatch.delenv(name)
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(folder)
    return folder


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, list(words), catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def run_json(*words: str) -> Any:
    code, out, err = run(*words, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def put_in_hub(home: Path, name: str, *files: str) -> Path:
    """A repository as the hub's library keeps it: blobs, and snapshots of links to them."""
    folder = home / ".cache" / "huggingface" / "hub" / f"models--{name.replace('/', '--')}"
    (folder / "blobs").mkdir(parents=True)
    snapshot = folder / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    for number, file in enumerate(files):
        (folder / "blobs" / f"blob{number}").write_bytes(bytes(1000))
        (snapshot / file).symlink_to(folder / "blobs" / f"blob{number}")
    return folder


def test_where_there_are_no_models_a_sentence_says_so_and_how_to_get_one(home: Path) -> None:
    code, out, err = run("models")
    assert code == 0
    assert out == f"There are no models in {home}/.cache/quire and none in {home}/.cache/huggingface/hub.\n"
    assert "hint: quire pull org/name fetches a model" in err
    assert run_json("models") == []


def test_models_lists_conversions_files_and_the_hub_with_their_sizes(home: Path) -> None:
    cache = home / ".cache" / "quire"
    (cache / "files").mkdir(parents=True)
    file = write_gguf(cache / "files" / "tiny.gguf")
    made = resolve(str(file))
    hub = put_in_hub(home, "org/some-model", "config.json", "model.safetensors")
    found = {(row["name"], row["kind"]): row for row in run_json("models")}
    assert list(found) == [("tiny.gguf", "converted GGUF"), ("tiny.gguf", "GGUF file"), ("org/some-model", "hub")]
    converted, source, fetched = found.values()
    assert converted["size_bytes"] == sum(path.stat().st_size for path in made.directory.iterdir())
    assert converted["path"] == str(made.directory)
    assert source["size_bytes"] == file.stat().st_size
    assert (fetched["size_bytes"], fetched["path"]) == (2000, str(hub))


def test_models_prints_a_table_whose_lines_stay_whole(home: Path) -> None:
    hub = put_in_hub(home, "org/" + "long-" * 18 + "name", "model.safetensors")
    code, out, err = run("models")
    assert (code, err) == (0, "")
    header, row = out.splitlines()
    assert header.split() == ["name", "kind", "size", "last", "used", "path"]
    assert row.endswith(str(hub))


def test_what_is_unfinished_or_unreadable_is_listed_as_such(home: Path) -> None:
    (put_in_hub(home, "a/half") / "blobs" / "b.incomplete").write_bytes(bytes(10))
    put_in_hub(home, "a/pickled", "pytorch_model.bin")
    put_in_hub(home, "gpt2", "model.safetensors")
    for name in (".unfinished-x", "nameless-0123"):
        (home / ".cache" / "quire" / "converted" / name).mkdir(parents=True)
    (home / ".cache" / "quire" / "converted" / "stray").write_text("")
    assert [(row["name"], row["kind"]) for row in run_json("models")] == [
        (".unfinished-x", "unfinished conversion"),
        ("nameless-0123", "converted GGUF"),
        ("a/half", "hub, incomplete"),
        ("a/pickled", "hub, no weights"),
        ("gpt2", "hub"),
    ]


def test_a_model_was_last_used_when_its_files_were_last_read(home: Path) -> None:
    blobs = put_in_hub(home, "org/name", "config.json", "model-Q4_0.gguf") / "blobs"
    os.utime(blobs / "blob0", (1_000_000, 5))
    os.utime(blobs / "blob1", (2_000_000, 5))
    (row,) = run_json("models")
    assert (row["last_used_s"], row["kind"]) == (2_000_000, "hub, GGUF")


def test_a_file_that_is_gone_meanwhile_was_never_read(tmp_path: Path) -> None:
    assert LocalModel("x", "hub", 0, tmp_path / "gone").last_used_s is None


def test_a_model_that_is_removed_is_gone(home: Path) -> None:
    folder = put_in_hub(home, "org/name", "model.safetensors")
    other = put_in_hub(home, "org/other", "model.safetensors")
    code, out, err = run("rm", "org/name", "--yes")
    assert (code, out) == (0, "")
    assert err.splitlines() == [str(folder), "removed org/name, 0.00 GB"]
    assert (folder.exists(), other.exists()) == (False, True)


def test_a_file_of_the_cache_can_be_removed(home: Path) -> None:
    files = home / ".cache" / "quire" / "files"
    files.mkdir(parents=True)
    file = write_gguf(files / "tiny.gguf")
    assert run("rm", "tiny.gguf", "--yes")[0] == 0
    assert not file.exists()


def test_who_is_asked_and_says_no_keeps_the_model(home: Path) -> None:
    folder = put_in_hub(home, "org/name", "model.safetensors")
    result = CliRunner().invoke(cli.app, ["rm", "org/name"], input="n\n")
    assert result.exit_code == 1
    assert folder.exists()


def test_what_is_not_there_cannot_be_removed(home: Path) -> None:
    with raises_code(CheckpointError, "model_not_found"):
        run("rm", "org/name")


def test_the_hub_is_looked_for_where_its_library_keeps_it(home: Path) -> None:
    assert hub_folder({}) == home / ".cache" / "huggingface" / "hub"
    assert hub_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/huggingface/hub")
    assert hub_folder({"HF_HOME": "/h", "XDG_CACHE_HOME": "/x"}) == Path("/h/hub")
    assert hub_folder({"HF_HUB_CACHE": "/c", "HF_HOME": "/h"}) == Path("/c")


def test_info_tells_what_the_headers_say(tmp_path: Path) -> None:
    tiny = Tiny(num_layers=3, num_heads=4, num_kv_heads=2, hidden=32, tied=False)
    folder = make_directory(tmp_path / "model", tiny=tiny)
    facts = run_json("info", str(folder))
    vocabulary = facts["vocabulary"]
    layer = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 32 + 2 * 32
    assert facts["parameters"] == 2 * vocabulary * 32 + 32 + 3 * layer
    assert facts["weight_bytes"] == 4 * facts["parameters"]
    assert facts["weight_types"] == ["F32"]
    assert (facts["layers"], facts["heads"], facts["kv_heads"], facts["head_size"]) == (3, 4, 2, 8)
    assert facts["kv_bytes_per_token"] == {"float32": 2 * 3 * 2 * 8 * 4, "bfloat16": 2 * 3 * 2 * 8 * 2}
    assert (facts["family"], facts["context_tokens"], facts["has_chat_template"]) == ("llama", 128, True)
    assert facts["end_tokens"] == {"2": "<|im_end|>"}


@pytest.mark.parametrize("is_tied", [True, False])
def test_info_estimates_speed_from_the_bytes_a_token_reads(tmp_path: Path, is_tied: bool) -> None:
    tiny = Tiny(num_layers=3, num_heads=4, num_kv_heads=2, hidden=32, tied=is_tied)
    facts = run_json("info", str(make_directory(tmp_path / "model", tiny=tiny)))
    layer = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 32
    assert facts["read_bytes_per_token"] == 4 * (3 * layer + facts["vocabulary"] * 32)
    if facts["memory_bytes_per_s"] is None:  # no kernels here
        assert facts["tokens_per_s"] is None
    else:
        assert facts["tokens_per_s"] == pytest.approx(
            0.75 * facts["memory_bytes_per_s"] / facts["read_bytes_per_token"]
        )


def test_info_estimates_what_fits_in_whole_blocks(tmp_path: Path) -> None:
    facts = facts_of(resolve(str(make_directory(tmp_path / "model", tiny=Tiny()))))
    assert facts.fits is not None
    assert facts.kv_bytes_per_token is not None
    assert [fit.memory_gib for fit in facts.fits] == [2, 4, 8, 16, 32]
    for fit in facts.fits:
        # Every weight is held once, as the file has it.
        left_bytes = (fit.memory_gib << 30) - (1 << 29) - facts.weight_bytes
        assert fit.kv_tokens == left_bytes // facts.kv_bytes_per_token["float32"] // 32 * 32


def test_info_prints_tables_a_person_can_read(tmp_path: Path) -> None:
    code, out, err = run("info", str(make_directory(tmp_path / "model")))
    assert (code, err) == (0, "")
    for words in (
        "KV heads        2\n",
        "chat template   yes",
        "2 <|im_end|>",
        "bytes per token",
        "tokens/s: a token reads",
        "an estimate",
        "32 GiB",
    ):
        assert words in out


def test_info_says_of_a_model_too_large_that_it_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["quire.cli.models.info"], "OVERHEAD_BYTES", 5 << 30)
    out = run("info", str(make_directory(tmp_path / "model")))[1]
    assert out.count("does not fit") == 2


def test_info_says_what_a_model_is_made_of_and_what_runs_it() -> None:
    facts = facts_of(resolve(str(architectures.directory("gpt-oss"))))
    assert facts.not_supported is None
    assert facts.parts == (
        "3 layers with 6 experts of width 64, 2 used per token",
        "2 layers with a sliding window of 24 tokens",
        "yarn RoPE scaling",
        "attention sinks",
    )
    facts = facts_of(resolve(str(architectures.directory("gemma4"))))
    assert "head sizes 32 and 64" in facts.parts
    assert "3 layers share keys and values of an earlier layer" in facts.parts
    assert "per-layer embeddings of 24" in facts.parts


def test_info_names_what_is_not_supported() -> None:
    path = architectures.directory("gemma2")
    assert "got 'gemma2'" in (facts_of(resolve(str(path))).not_supported or "")
    _, out, _ = run("info", str(path))
    assert "through transformers, if at all (quire[torch]): expected a supported model_type, got 'gemma2'" in out


def test_info_reads_a_gguf_file(tmp_path: Path) -> None:
    code, out, err = run("info", str(write_gguf(tmp_path / "tiny.gguf", Tiny(arch="qwen3"))))
    assert code == 0
    assert "qwen3" in out
    assert "reading tiny.gguf" in err


def test_info_of_another_family_tells_what_its_config_says_and_no_more(tmp_path: Path) -> None:
    folder = make_directory(tmp_path / "model", num_shards=1)
    config = {"model_type": "odd", "num_hidden_layers": 7, "vocab_size": "many"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").unlink()
    facts = run_json("info", str(folder))
    assert (facts["family"], facts["layers"]) == ("odd", 7)
    assert facts["parameters"] > 0
    unknown = ("heads", "kv_heads", "head_size", "vocabulary", "kv_bytes_per_token", "fits", "architecture")
    assert all(facts[key] is None for key in unknown)
    assert facts["end_tokens"] == {"2": ""}
    code, out, err = run("info", str(folder))
    assert code == 0
    assert ["layers", "7"] in [line.split() for line in out.splitlines()]
    assert "KV" not in out
    assert "no estimate for the family odd" in err


def test_a_model_that_is_nowhere_is_an_error_and_a_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["quire", "info", "nowhere"])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    assert exit_info.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("error: expected a directory, a .gguf file, or a hub id")
    assert "hint: quire models lists what is on this machine" in err


def test_info_imports_no_tensor_library(tmp_path: Path) -> None:
    folder = make_directory(tmp_path / "model")
    code = (
        "import sys; from quire.cli.models.info import facts_of; from quire.checkpoints import resolve; "
        "facts_of(resolve(sys.argv[1])); print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True)
    assert out.stdout.strip() == "[]", out.stderr


def test_config_show_tells_every_value_and_where_it_came_from(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "quire.toml").write_text('memory = "2GiB"\nqueue = 9\n')
    monkeypatch.setenv("QUIRE_QUEUE", "10")
    code, out, err = run("config", "show", "--threads", "3")
    assert (code, err) == (0, "")
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines()}
    assert rows["memory"] == f"2 GiB file {home / 'quire.toml'}"
    assert rows["queue"] == "10 environment QUIRE_QUEUE"
    assert rows["threads"] == "3 flag --threads"
    assert rows["max_running"] == "64 default"
    assert rows["kv_key_file"] == "a new secret at every start default"


def test_config_show_prints_json_for_machines(home: Path) -> None:
    file = home / "other.toml"
    file.write_text('kv_key_file = "kv.key"')
    shown = run_json("config", "show", "--config", str(file), "--memory", "4GiB")
    assert shown["file"] == str(file)
    assert shown["settings"]["memory"] == {"value": 4 << 30, "source": "flag --memory"}
    assert shown["settings"]["kv_key_file"] == {"value": "kv.key", "source": f"file {file}"}
    assert shown["settings"]["max_model_len"] == {"value": None, "source": "default"}


def test_config_show_refuses_what_a_server_would_refuse() -> None:
    with pytest.raises(ConfigError) as refused:
        run("config", "show", "--queue", "none")
    assert refused.value.settings == ("queue",)


def test_config_path_shows_the_files_in_order_and_which_is_read(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = run("config", "path")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["state", "absent", "absent"]
    assert "no settings file found" in err
    assert f"hint: create {home / 'quire.toml'}" in err
    (home / "quire.toml").write_text("")
    (home / ".config" / "quire").mkdir(parents=True)
    (home / ".config" / "quire" / "config.toml").write_text("")
    assert [row["state"] for row in run_json("config", "path")] == ["read", "not read"]
    monkeypatch.setenv("QUIRE_CONFIG", "gone.toml")
    rows = run_json("config", "path")
    assert [row["state"] for row in rows] == ["missing", "not read", "not read"]
    assert rows[0] == {"path": str(home / "gone.toml"), "state": "missing", "why": "$QUIRE_CONFIG"}


@pytest.mark.parametrize("words", [("models",), ("info",), ("config",), ("config", "show"), ("config", "path")])
def test_the_help_of_every_command_ends_with_examples(words: tuple[str, ...]) -> None:
    code, out, _ = run(*words, "--help")
    assert code == 0
    assert "Examples:\n    quire " in out
    assert out.rstrip().splitlines()[-1].strip().startswith(("quire ", "QUIRE_"))


def test_names_written_by_others_cannot_steer_a_terminal() -> None:
    assert plain("a\x1b[31mb\nc é") == r"a\x1b[31mb\nc é"
    assert columns(("n", "size"), [("a\tb", "1"), ("c", "20")], right=frozenset({1})) == (
        "n     size\na\\tb     1\nc       20"
    )
