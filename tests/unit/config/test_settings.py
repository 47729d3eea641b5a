"""Settings: who wins, who is named as the winner, and what is refused."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config import (
    MEMORY_SHARE,
    SETTINGS,
    ModelSettings,
    ServingSettings,
    Setting,
    Settings,
    kinds,
    load_settings,
    machine,
)
from quire.config import files as config_files
from quire.config.kinds import Value, show_size
from quire.config.table import BY_NAME
from quire.errors import ConfigError
from tests.support.errors import raises_code
from tests.support.settings_page import settings_page

ROOT = Path(__file__).parents[3]
GIB = 1 << 30

CHOICES: dict[str, tuple[tuple[str | int | float, Value], ...]] = {
    "memory": (("4GiB", 4 * GIB), (900_000_000, 900_000_000), ("1.5 GiB", 3 * GIB // 2)),
    "block_size": ((8, 8), ("16", 16), (32, 32)),
    "max_model_len": ((100, 100), ("8192", 8192), (2, 2)),
    "max_step_tokens": ((128, 128), ("512", 512), (256, 256)),
    "step_ms": ((0, 0), ("250", 250), (1000, 1000)),
    "max_running": ((1, 1), ("32", 32), (64, 64)),
    "dtype": (("auto", "auto"), ("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16")),
    "arithmetic": (("auto", "auto"), ("float", "float"), ("auto", "auto")),
    "kv_dtype": (("auto", "auto"), ("bfloat16", "bfloat16"), ("int8", "int8")),
    "wired_memory": (("true", True), ("false", False), ("TRUE", True)),
    "speculation": (("auto", "auto"), ("off", "off"), ("auto", "auto")),
    "pin_share": ((0, 0.0), ("0.1", 0.1), (1, 1.0)),
    "tool_format": (("auto", "auto"), ("hermes", "hermes"), ("auto", "auto")),
    "backend": (("auto", "auto"), ("cpu", "cpu"), ("torch", "torch")),
    "device": (("cpu", "cpu"), ("cuda:1", "cuda:1"), ("mps", "mps")),
    "threads": ((1, 1), ("2", 2), (64, 64)),
    "instruction_set": (("auto", "auto"), ("avx2", "avx2"), ("portable", "portable")),
    "head_start_high_s": ((60, 60.0), ("90.5", 90.5), (120.25, 120.25)),
    "head_start_normal_s": ((20, 20.0), ("30", 30.0), (12.5, 12.5)),
    "head_start_low_s": ((0, 0.0), ("1", 1.0), (2.5, 2.5)),
    "queue": ((1, 1), ("2048", 2048), (512, 512)),
    "stuck_step_s": (("60", 60.0), (0.5, 0.5), (30, 30.0)),
    "kv_key_file": (("/a", Path("/a")), ("~/b", Path("~/b")), ("c d", Path("c d"))),
    "kv_events": (("tcp://*:5557", "tcp://*:5557"), ("ipc:///a", "ipc:///a"), ("tcp://h:1", "tcp://h:1")),
    "kv_events_replay": (("tcp://*:5558", "tcp://*:5558"), ("ipc:///b", "ipc:///b"), ("tcp://h:2", "tcp://h:2")),
    "kv_events_topic": (("kv", "kv"), ("kv@pod@model", "kv@pod@model"), ("a b", "a b")),
    "kv_events_encoding": (("map", "map"), ("array", "array"), ("map", "map")),
    "host": (("127.0.0.1", "127.0.0.1"), ("localhost", "localhost"), ("::1", "::1")),
    "port": ((8000, 8000), ("0", 0), (65535, 65535)),
    "allow_host": (("box.local", "box.local"), ("A.example, 10.0.0.1", "a.example,10.0.0.1"), ("*", "*")),
    "allow_origin": (
        ("http://localhost:3000", "http://localhost:3000"),
        ("https://A.example,app://x", "https://a.example,app://x"),
        ("*", "*"),
    ),
    "keys_file": (("/a", Path("/a")), ("~/b", Path("~/b")), ("c d", Path("c d"))),
    "cache_group": (("team-a", "team-a"), ("A.1_b", "A.1_b"), ("0", "0")),
    "admin_socket": (("/a", Path("/a")), ("~/b", Path("~/b")), ("c d", Path("c d"))),
    "drain_s": ((30, 30.0), ("0", 0.0), (2.5, 2.5)),
    "max_open_requests": ((1, 1), ("4096", 4096), (64, 64)),
    "first_byte_s": ((5, 5.0), ("0", 0.0), (2.5, 2.5)),
    "alias": (("gpt-5=coder", "gpt-5=coder"), ("Claude-*=A, b=A", "Claude-*=A,b=A"), ("*=m", "*=m")),
    "store": (("/a/b.db", Path("/a/b.db")), ("~/c", Path("~/c")), ("d e", Path("d e"))),
    "store_size": (("4GiB", 4 * GIB), (900_000_000, 900_000_000), ("1.5 GiB", 3 * GIB // 2)),
    "stable_prefix": (
        ("dates, times", "dates\ntimes"),
        ("ids\na{1,2}, b", "ids\na{1,2}, b"),
        ("Run [a-z]+", "Run [a-z]+"),
    ),
    "drop_images": (("true", True), ("false", False), ("TRUE", True)),
    "stop_loops": (("true", True), ("false", False)),
    "effort_budgets": (("low=10,high=20", "low=10,high=20"), ("none=1", "none=1"), ("Max=9", "max=9")),
    "no_page": (("true", True), ("false", False)),
    "models_folder": (("/a", Path("/a")), ("~/b", Path("~/b")), ("c d", Path("c d"))),
    "idle_s": ((0, 0.0), ("600", 600.0), (1.5, 1.5)),
    "turn_s": ((0, 0.0), ("30", 30.0), (1.5, 1.5)),
    "trace": (("/a/b.jsonl", Path("/a/b.jsonl")), ("~/c", Path("~/c")), ("d e", Path("d e"))),
    "trace_max_bytes": (("4GiB", 4 * GIB), (900_000_000, 900_000_000), ("1.5 GiB", 3 * GIB // 2)),
    "trace_tokens": (("true", True), ("false", False)),
    "otel": (("http://localhost:4318", "http://localhost:4318"), ("https://a.b/c", "https://a.b/c")),
    "log_format": (("plain", "plain"), ("json", "json")),
    "metrics_prefix": (("vllm", "vllm"), ("quire", "quire")),
}
"""For every setting values as they may be given, with what they mean; any combination keeps the rules between them."""

Said = dict[str, dict[str, tuple[str | int | float, Value]]]
"""By setting and source: what was said and what it means."""


def said_by_sources() -> st.SearchStrategy[Said]:
    sources = st.sampled_from(("flag", "environment", "file"))
    return st.fixed_dictionaries(
        {name: st.dictionaries(sources, st.sampled_from(choices)) for name, choices in CHOICES.items()}
    )


def load(
    folder: Path, *, flags: dict[str, str | int | float | None] | None = None, toml: str | None = None, **environ: str
) -> Settings:
    """Settings from these sources and no others."""
    if toml is not None:
        (folder / "quire.toml").write_text(toml)
        environ["QUIRE_CONFIG"] = str(folder / "quire.toml")
    return load_settings(flags or {}, environ={"HOME": str(folder / "home"), **environ})


def refusal(folder: Path, **sources: object) -> str:
    with pytest.raises(ConfigError) as error_info:
        load(folder, **sources)  # type: ignore[arg-type]
    return str(error_info.value)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@given(said_by_sources())
def test_of_all_sources_of_a_setting_the_highest_wins_and_is_named(
    tmp_path_factory: pytest.TempPathFactory, said: Said
) -> None:
    folder = tmp_path_factory.getbasetemp()
    by_source = {
        source: {name: given[source][0] for name, given in said.items() if source in given}
        for source in ("flag", "environment", "file")
    }
    settings = load(
        folder,
        flags=dict(by_source["flag"]),
        toml="".join(f"{name} = {json.dumps(raw)}\n" for name, raw in by_source["file"].items()),
        **{BY_NAME[name].variable: str(raw) for name, raw in by_source["environment"].items()},
    )
    for setting in SETTINGS:
        resolved, given_values = settings.values[setting.name], said[setting.name]
        winner = next((source for source in ("flag", "environment", "file") if source in given_values), "default")
        assert resolved.value == (given_values[winner][1] if winner in given_values else setting.default)
        assert (
            resolved.source
            == {
                "flag": f"flag {setting.flag}",
                "environment": f"environment {setting.variable}",
                "file": f"file {folder / 'quire.toml'}",
                "default": "default",
            }[winner]
        )


def test_every_setting_is_tried_above() -> None:
    assert list(CHOICES) == [setting.name for setting in SETTINGS]


def test_with_nothing_said_the_settings_are_the_defaults_of_their_shapes(tmp_path: Path) -> None:
    settings = load(tmp_path)
    assert (settings.model, settings.serving, settings.file) == (ModelSettings(), ServingSettings(), None)
    assert {resolved.source for resolved in settings.values.values()} == {"default"}


def test_a_list_is_a_list_in_toml_and_each_of_its_words_is_checked(tmp_path: Path) -> None:
    server = load(
        tmp_path, toml='allow_host = ["box.local", "10.0.0.1"]\nallow_origin = "http://a,https://b:1"\n'
    ).server
    assert server.allowed_hosts == {"box.local", "10.0.0.1"}
    assert server.allowed_origins == {"http://a", "https://b:1"}
    for name, wrong in (
        ("allow_host", "a,b/c"),
        ("allow_host", "a,,b"),
        ("allow_origin", "null"),
        ("allow_origin", "a.b"),
    ):
        with pytest.raises(ConfigError) as refused:
            load(tmp_path, flags={name: wrong})
        assert refused.value.settings == (name,)


def test_settings_reach_the_shapes_that_are_handed_down(tmp_path: Path) -> None:
    settings = load(tmp_path, flags={"memory": "4GiB", "max_model_len": 100, "threads": "2", "queue": 7})
    assert settings.model == ModelSettings(memory_bytes=4 * GIB, max_sequence_tokens=100, num_threads=2)
    assert settings.serving == ServingSettings(queue=7)


def test_a_flag_that_was_not_given_is_none_and_says_nothing(tmp_path: Path) -> None:
    assert load(tmp_path, flags={"queue": None}, QUIRE_QUEUE="9").serving.queue == 9


def test_an_empty_variable_counts_as_not_set(tmp_path: Path) -> None:
    assert load(tmp_path, QUIRE_QUEUE=" ").values["queue"].source == "default"


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1048576", 1 << 20),
        ("1MiB", 1 << 20),
        ("4GiB", 4 << 30),
        ("4 gib", 4 << 30),
        ("900MB", 900_000_000),
        ("0.5GiB", 1 << 29),
        ("1.5TB", 1_500_000_000_000),
        ("2048KiB", 2 << 20),
        ("1024TiB", 1 << 50),
    ],
)
def test_sizes_are_read_to_the_byte(tmp_path: Path, text: str, num_bytes: int) -> None:
    assert load(tmp_path, flags={"memory": text}).model.memory_bytes == num_bytes


@pytest.mark.parametrize(
    "text",
    ["4", "4G", "GiB", "-4GiB", "4GiB!", "4,5GiB", "1e9", "nan", "0%", "101%", "%", "1025TiB", "1" * 30, "٤GiB", ""],
)
def test_a_size_that_breaks_the_rule_is_refused_with_rule_value_source_and_example(tmp_path: Path, text: str) -> None:
    message = refusal(tmp_path, flags={"memory": text})
    assert message.startswith("expected memory to be a size from 1MiB to 1024TiB with its unit, such as 4GiB")
    assert f"got {text!r} from flag --memory; for example: 4GiB" in message


def test_a_share_of_memory_is_the_rule_of_the_default_with_another_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "free_memory_bytes", lambda: 8 * GIB)
    monkeypatch.setattr(machine, "_resident_bytes", lambda: GIB)
    monkeypatch.setattr(machine, "memory_limit_bytes", lambda: 64 * GIB)
    assert load(tmp_path, flags={"memory": "25%"}).model.memory_bytes == 3 * GIB
    assert load(tmp_path, flags={"memory": "50%"}).model.memory_bytes == GIB + int(8 * GIB * MEMORY_SHARE)
    assert load(tmp_path, flags={"memory": "100 %"}).model.memory_bytes == 9 * GIB


def test_the_machine_tells_how_much_memory_is_free() -> None:
    assert 0 < machine.memory_budget_bytes(0.0) <= machine.memory_budget_bytes(1.0) < kinds.MAX_SIZE_BYTES


@pytest.mark.parametrize(
    ("num_bytes", "shown"), [(4 * GIB, "4 GiB"), (900_000_000, "858.31 MiB"), (GIB + 1, "1.00 GiB")]
)
def test_sizes_are_shown_as_a_person_says_them(num_bytes: int, shown: str) -> None:
    assert show_size(num_bytes) == shown


@pytest.mark.parametrize(
    ("name", "toml_value"),
    [
        ("max_running", "true"), ("max_running", "0"), ("max_running", "32.0"), ("max_running", '"many"'),
        ("max_running", "[32]"), ("max_running", "{}"), ("block_size", "24"), ("block_size", "2048"),
        ("dtype", '"float64"'), ("device", '"tpu"'), ("head_start_low_s", "nan"), ("head_start_low_s", "-1"),
        ("head_start_low_s", "true"), ("head_start_low_s", '"1.2.3"'), ("head_start_low_s", "1e400"),
        ("queue", "1979-05-27"), ("kv_key_file", "7"), ("kv_key_file", '"a\\u0000b"'), ("memory", "4.5"),
    ],
)  # fmt: skip
def test_a_value_in_a_file_that_breaks_its_rule_is_refused_with_the_file(
    tmp_path: Path, name: str, toml_value: str
) -> None:
    message = refusal(tmp_path, toml=f"{name} = {toml_value}")
    assert message.startswith(f"expected {name} to be {BY_NAME[name].kind.rule}, got ")
    assert f"from file {tmp_path / 'quire.toml'}; for example: {BY_NAME[name].example}" in message


def test_a_long_value_is_cut_short_in_the_error(tmp_path: Path) -> None:
    assert len(refusal(tmp_path, QUIRE_QUEUE="9" * 10_000)) < 300


def test_a_rule_between_settings_names_where_each_came_from(tmp_path: Path) -> None:
    message = refusal(tmp_path, flags={"max_running": 300}, QUIRE_BLOCK_SIZE="16")
    assert "max_step_tokens of at least max_running + block_size = 316, got 256" in message
    assert "block_size from environment QUIRE_BLOCK_SIZE" in message
    assert "max_step_tokens from default, max_running from flag --max-running" in message


def test_an_error_carries_the_settings_that_its_rule_is_about(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as between:
        load(tmp_path, flags={"max_running": 300})
    assert between.value.settings == ("block_size", "max_step_tokens", "max_running")
    with pytest.raises(ConfigError) as alone:
        load(tmp_path, flags={"queue": "none"})
    assert alone.value.settings == ("queue",)
    with pytest.raises(ConfigError) as unknown:
        load(tmp_path, flags={"memroy": "4GiB"})
    assert unknown.value.settings == ()


def test_a_setting_whose_field_has_another_name_is_named_as_people_know_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: ModelSettings) -> None:
        raise ConfigError("no memory is enough", ("memory_bytes",))

    monkeypatch.setattr(ModelSettings, "__post_init__", refuse)
    assert refusal(tmp_path, QUIRE_MEMORY="4GiB").endswith("(memory from environment QUIRE_MEMORY)")


def test_head_starts_must_fall_with_their_classes(tmp_path: Path) -> None:
    message = refusal(tmp_path, flags={"head_start_normal_s": 61})
    assert "head_start_high_s >= head_start_normal_s" in message
    assert "got 60, 61 and 0" in message
    assert load(tmp_path, flags={"head_start_normal_s": 60, "head_start_low_s": 60}).serving.head_start_low_s == 60


def test_an_unknown_name_is_refused_wherever_it_stands_with_the_closest_known_one(tmp_path: Path) -> None:
    assert "unknown setting 'memroy' in the command line; did you mean memory?" in refusal(
        tmp_path, flags={"memroy": "4GiB"}
    )
    assert "unknown setting 'QUIRE_MAX_RUNING' in the environment; did you mean QUIRE_MAX_RUNNING?" in refusal(
        tmp_path, QUIRE_MAX_RUNING="3"
    )
    message = refusal(tmp_path, toml="max-running = 3")
    assert f"unknown setting 'max-running' in file {tmp_path / 'quire.toml'}; did you mean max_running?" in message


def test_a_setting_of_an_earlier_version_is_refused_with_its_new_name(tmp_path: Path) -> None:
    assert refusal(tmp_path, flags={"min_stay_s": "10"}).endswith("use turn_s instead")
    assert refusal(tmp_path, QUIRE_MIN_STAY_S="10").endswith("use QUIRE_TURN_S instead")
    assert refusal(tmp_path, toml="min_stay_s = 10").endswith("use turn_s instead")


def test_a_name_that_resembles_none_is_answered_with_all(tmp_path: Path) -> None:
    assert "the settings are memory, block_size, max_model_len" in refusal(tmp_path, toml="[xyz]\n")


def test_variables_that_are_not_ours_to_judge_are_left_alone(tmp_path: Path) -> None:
    load(
        tmp_path,
        QUIRE_CACHE="/somewhere",
        QUIRE_FAULTS="[]",
        QUIRE_TESTING="1",
        QUIRE_CONFIG="",
        QUIRE_SERVICE_HOST="10.0.0.1",
        QUIRE_SERVICE_PORT="8000",
        QUIRE_SERVICE_PORT_HTTP="8000",
        QUIRE_PORT="tcp://10.0.0.1:8000",
        QUIRE_PORT_8000_TCP="tcp://10.0.0.1:8000",
        QUIRE_PORT_8000_TCP_ADDR="10.0.0.1",
        QUIRE_CHAT_PORT_53_UDP_PROTO="udp",
        OTHER_MEMORY="lots",
    )
    assert load(tmp_path, QUIRE_PORT="9000").server.port == 9000
    assert "QUIRE_CHAT_PORT" in refusal(tmp_path, QUIRE_CHAT_PORT="8000")


def test_the_named_file_is_read_before_that_of_the_folder_and_that_before_that_of_the_home(tmp_path: Path) -> None:
    home = tmp_path / "home" / ".config" / "quire" / "config.toml"
    home.parent.mkdir(parents=True)
    home.write_text("queue = 1")
    assert load(tmp_path).serving.queue == 1
    Path("quire.toml").write_text("queue = 2")
    assert load(tmp_path).serving.queue == 2
    assert load(tmp_path, toml="queue = 3").serving.queue == 3
    flagged = tmp_path / "flagged.toml"
    flagged.write_text("queue = 4")
    assert load_settings({}, environ={"QUIRE_CONFIG": str(tmp_path / "quire.toml")}, file=flagged).serving.queue == 4


def test_the_folder_of_settings_is_that_of_xdg_where_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "quire").mkdir()
    (tmp_path / "quire" / "config.toml").write_text("queue = 5")
    assert load(tmp_path, XDG_CONFIG_HOME=str(tmp_path)).file == tmp_path / "quire" / "config.toml"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"queue = \n", "expected TOML in UTF-8"),
        (b"queue = 1\nqueue = 2\n", "expected TOML in UTF-8"),
        (b"\xff\xfe", "expected TOML in UTF-8"),
        (b"x = " + b"[" * 100_000, "expected TOML in UTF-8"),
        (b"#" * (config_files.MAX_FILE_BYTES + 1), "at most 1,048,576 bytes"),
    ],
)
def test_a_damaged_file_is_refused_with_its_path(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "damaged.toml"
    file.write_bytes(content)
    message = refusal(tmp_path, QUIRE_CONFIG=str(file))
    assert words in message
    assert str(file) in message


def test_a_named_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert ": No such file" in refusal(tmp_path, QUIRE_CONFIG=str(tmp_path / "none.toml"))
    assert ": Is a directory" in refusal(tmp_path, QUIRE_CONFIG=str(tmp_path))


def test_the_key_is_read_from_a_file_of_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "kv.key"
    path.write_bytes(bytes(range(32)))
    path.chmod(0o600)
    assert ServingSettings(kv_key_file=path).read_kv_key() == bytes(range(32))
    assert ServingSettings().read_kv_key() is None


@pytest.mark.parametrize(
    ("key", "mode", "code"),
    [
        (bytes(32), 0o640, "key_not_private"),
        (bytes(31), 0o600, "wrong_key_length"),
        (bytes(33), 0o600, "wrong_key_length"),
    ],
)
def test_a_key_that_others_may_read_or_of_another_length_is_refused(
    tmp_path: Path, key: bytes, mode: int, code: str
) -> None:
    path = tmp_path / "kv.key"
    path.write_bytes(key)
    path.chmod(mode)
    with raises_code(ConfigError, code):
        ServingSettings(kv_key_file=path).read_kv_key()


def test_a_key_file_that_is_not_there_is_refused_with_how_to_make_one(tmp_path: Path) -> None:
    with raises_code(ConfigError, "key_not_readable") as refused:
        ServingSettings(kv_key_file=tmp_path / "none").read_kv_key()
    assert "make one with: (umask 077; head -c 32 /dev/urandom >" in str(refused.value)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_example_and_every_default_keeps_its_own_rule(tmp_path: Path, setting: Setting) -> None:
    load(tmp_path, flags={setting.name: setting.example})
    if setting.default is None:
        assert setting.unset
    else:
        assert setting.kind.parse(setting.default) == setting.default


def test_the_reference_page_is_what_the_table_says() -> None:
    page = (ROOT / "docs" / "reference" / "settings.md").read_text()
    assert page == settings_page(), "run: python -m tests.support.settings_page > docs/reference/settings.md"
