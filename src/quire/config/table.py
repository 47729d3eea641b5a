"""Every setting, once. Flags, variables, TOML keys, help and the reference page all come from this table."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from quire.config.kinds import (
    FILE_PATH,
    SIZE,
    SWITCH,
    Kind,
    Value,
    choice,
    lines,
    power_of_two,
    seconds,
    several,
    text,
    whole_number,
)
from quire.config.model_settings import ModelSettings
from quire.config.parked_models import MAX_IDLE_S
from quire.config.scheduling import ServingSettings
from quire.config.server_settings import NAME, ServerSettings

PREFIX = "QUIRE_"
HOST_NAME = r"\*|[a-z0-9._-]{1,253}|[0-9a-f:.]{2,45}"
ORIGIN = r"\*|[a-z][a-z0-9+.-]{0,30}://[a-z0-9._~%:\[\]-]{1,260}"
ALIAS = r"[^\s=,]{1,128}=[^\s=,]{1,256}"
ENDPOINT = r"(tcp|ipc)://[\x21-\x7e]{1,200}"
MAX_HEAD_START_S = 86_400.0
MAX_STUCK_STEP_S = 3_600.0
RENAMED = {"min_stay_s": "turn_s"}
"""Settings of earlier versions that have another name and another meaning now: refused, with the new name."""
_MODEL, _SERVING, _SERVER = ModelSettings(), ServingSettings(), ServerSettings()


class Group(Enum):
    """What a setting is about: its heading in help and reference, and the class of settings it goes into."""

    MODEL = "Model"
    SCHEDULING = "Scheduling"
    KV_EVENTS = "KV cache and events"
    SERVER = "Server"

    @property
    def feeds(self) -> type[Any]:
        """The dataclass whose fields its settings are. Only a server reads those of the last group."""
        return {Group.MODEL: ModelSettings, Group.SERVER: ServerSettings}.get(self, ServingSettings)


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing a person may set: its name here is its key in TOML."""

    group: Group
    name: str
    kind: Kind
    default: Value
    help: str
    example: str
    """A value as it is written on a command line."""
    unset: str = ""
    """What happens without a value; only where the default is None."""
    field: str = ""
    """The field it sets, where that has another name."""
    is_common: bool = False
    """Shown first in help."""

    @property
    def field_name(self) -> str:
        """The field of `group.feeds` that it sets."""
        return self.field or self.name

    @property
    def flag(self) -> str:
        """How it is written on a command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """How it is called in the environment."""
        return PREFIX + self.name.upper()

    def show(self, value: Value) -> str:
        """A value for people."""
        return self.unset if value is None else self.kind.show(value)

    @property
    def default_text(self) -> str:
        """The default for people."""
        return self.show(self.default)


SETTINGS: tuple[Setting, ...] = (
    Setting(
        Group.MODEL, "memory", SIZE, _MODEL.memory_bytes,
        "Memory the whole process may hold: libraries, weights, steps and the KV pool. A share such as 50% is what the "
        "process holds at start and that share of what is free then. Several models share it: each gets what its "
        "weights take on disk, and an equal part of the rest.",
        "4GiB", "half of what is free at start", field="memory_bytes", is_common=True,
    ),
    Setting(
        Group.MODEL, "block_size", power_of_two(1024), _MODEL.block_size,
        "Tokens in one block of KV memory. Smaller blocks share more of a prompt, larger ones cost less to keep.",
        "16",
    ),
    Setting(
        Group.MODEL, "max_model_len", whole_number(2, 1 << 30), _MODEL.max_sequence_tokens,
        "Tokens in the longest sequence, prompt and answer together.",
        "8192", "what the model was made for, or what the KV pool holds if that is less",
        field="max_sequence_tokens", is_common=True,
    ),
    Setting(
        Group.MODEL, "max_step_tokens", whole_number(2, 1 << 20), _MODEL.max_step_tokens,
        "Tokens computed in one step, at least max_running + block_size. More makes long prompts quicker and every "
        "other answer less smooth.",
        "512",
    ),
    Setting(
        Group.MODEL, "step_ms", whole_number(0, 3_600_000), _MODEL.step_ms,
        "Milliseconds a step may last: it feeds as many prompt tokens, up to max_step_tokens, as fit by the time that "
        "steps took before, a block at least. Less makes other answers smoother and long prompts slower. 0: always "
        "max_step_tokens.",
        "250",
    ),
    Setting(
        Group.MODEL, "max_running", whole_number(1, 1 << 16), _MODEL.max_running,
        "Sequences that run at once.", "32", is_common=True,
    ),
    Setting(
        Group.MODEL, "dtype", choice("auto", "float32", "bfloat16", "float16"), _MODEL.dtype,
        "How weights are held. auto: as the file has them, in as many bits; the torch backend holds float32. float32 "
        "and bfloat16: all of them so, whatever the file has; where the processor has tile registers, bfloat16 takes "
        "much less time. On the CPU backend an answer is the same bit for bit, alone or in company, in each.",
        "bfloat16", is_common=True,
    ),
    Setting(
        Group.MODEL, "arithmetic", choice("auto", "float", "int8"), _MODEL.arithmetic,
        "How rows meet weights of 4 to 8 bits. int8: a row's inputs are rounded to 8 bits by groups of 32, sums of a "
        "group are exact; refused where no weight has 4 to 8 bits. float: weights are widened to float32, nothing is "
        "rounded. auto: int8. All other weights are multiplied in float.",
        "float",
    ),
    Setting(
        Group.MODEL, "kv_dtype", choice("auto", "float32", "bfloat16", "float16", "int8"), _MODEL.kv_dtype,
        "How keys and values are held. bfloat16 halves what a token takes and what a step reads, int8 (CPU backend) "
        "takes a little more than half of that: a scale for each token and head. auto: as dtype where that says "
        "one; else bfloat16, or float32 for a model in float32.",
        "float32",
    ),
    Setting(
        Group.MODEL, "wired_memory", SWITCH, _MODEL.wired_memory,
        "On Apple silicon through MLX: keep the model in memory, so that the system does not page it out between two "
        "requests. macOS was reported to panic with it (ml-explore/mlx#3186).",
        "true",
    ),
    Setting(
        Group.MODEL, "speculation", choice("auto", "off"), _MODEL.speculation,
        "Whether tokens are guessed from what was said before and checked beside the next one. An answer is the same "
        "with and without, token for token. auto: on the CPU backend, as far as it saves time. off: never.",
        "off",
    ),
    Setting(
        Group.MODEL, "tool_format", choice("auto", "hermes"), _MODEL.tool_format,
        "How calls of tools are written. auto: as the model's chat template shows; models whose template knows no "
        "tools refuse them. hermes: such models are told of tools in the system text, and write calls as JSON between "
        "<tool_call> tags.",
        "hermes",
    ),
    Setting(
        Group.MODEL, "backend", choice("auto", "cpu", "mlx", "torch"), _MODEL.backend,
        "Who computes. cpu: quire's own kernels, for families it knows (the guide on models lists them). mlx: models "
        "of mlx-lm on Apple silicon, experimental; it needs quire[mlx]. torch: any other full-attention decoder of "
        "transformers; it needs quire[torch]. auto: mlx on Apple silicon if it is installed and can run the model, "
        "then cpu, then torch.",
        "torch",
    ),
    Setting(
        Group.MODEL, "device",
        text("cpu, cuda, mps, or one of several such as cuda:1", r"(cpu|mps|cuda)(:[0-9]{1,3})?"),
        _MODEL.device,
        "Where the model runs. cpu is tested; cuda and mps are torch's and are not.",
        "cpu",
    ),
    Setting(
        Group.MODEL, "threads", whole_number(1, 4096), _MODEL.num_threads,
        "Threads that compute.", "4", "one per physical core, at most the CPU quota", field="num_threads",
        is_common=True,
    ),
    Setting(
        Group.SCHEDULING, "head_start_high_s", seconds(MAX_HEAD_START_S), _SERVING.head_start_high_s,
        "Seconds by which a HIGH request counts as having come earlier than it did.",
        "120",
    ),
    Setting(
        Group.SCHEDULING, "head_start_normal_s", seconds(MAX_HEAD_START_S), _SERVING.head_start_normal_s,
        "Seconds by which a NORMAL request counts as having come earlier than it did; no more than for HIGH.", "30",
    ),
    Setting(
        Group.SCHEDULING, "head_start_low_s", seconds(MAX_HEAD_START_S), _SERVING.head_start_low_s,
        "Seconds by which a LOW request counts as having come earlier than it did; no more than for NORMAL.", "0",
    ),
    Setting(
        Group.SCHEDULING, "queue", whole_number(1, 1_000_000), _SERVING.queue,
        "Requests that may wait; keys share them, and one more is turned away and told to come back.", "2048",
    ),
    Setting(
        Group.SCHEDULING, "stuck_step_s", seconds(MAX_STUCK_STEP_S), _SERVING.stuck_step_s,
        "Seconds without progress, no step and no layer of one done, after which a worker is replaced; what ran goes "
        "on in the new one.", "60",
    ),
    Setting(
        Group.KV_EVENTS, "kv_key_file", FILE_PATH, _SERVING.kv_key_file,
        "A file of 32 secret bytes, readable by its owner alone, that names blocks. Replicas with the same file agree "
        "on names, and names outlive a restart. A relative path starts where quire is started.",
        "~/.config/quire/kv.key", "a new secret at every start",
    ),
    Setting(
        Group.KV_EVENTS, "kv_events", text("an address such as tcp://127.0.0.1:5557", ENDPOINT, "ADDRESS"),
        _SERVING.kv_events,
        "ZMQ endpoint that publishes KV-cache events in vLLM's format. A second model takes the next port.",
        "tcp://127.0.0.1:5557", "nowhere",
    ),
    Setting(
        Group.KV_EVENTS, "kv_events_replay", text("an address such as tcp://127.0.0.1:5558", ENDPOINT, "ADDRESS"),
        _SERVING.kv_events_replay,
        "ZMQ endpoint where routers ask for events they missed.",
        "tcp://127.0.0.1:5558", "nowhere",
    ),
    Setting(
        Group.KV_EVENTS, "kv_events_topic", text("1 to 200 plain characters", r"[\x20-\x7e]{1,200}"),
        _SERVING.kv_events_topic,
        "The first frame of every event; some routers want it to name the sender.", "kv@pod-1@model", "empty",
    ),
    Setting(
        Group.KV_EVENTS, "kv_events_encoding", choice("map", "array"), _SERVING.kv_events_encoding,
        "How events are written; array suits readers of before mid-2026.", "array",
    ),
    Setting(
        Group.SERVER, "host", text("a host name or an address", r"[A-Za-z0-9._:-]{1,253}", "HOST"), _SERVER.host,
        "Address to listen on. Beyond this machine only with keys.", "0.0.0.0", is_common=True,  # noqa: S104
    ),
    Setting(
        Group.SERVER, "port", whole_number(0, 65535), _SERVER.port, "Port to listen on; 0 takes a free one.",
        "8080", is_common=True,
    ),
    Setting(
        Group.SERVER, "allow_host",
        several("NAMES", "names or addresses without ports, with commas between, or * for any", HOST_NAME),
        _SERVER.allow_host,
        "Names in the Host header by which a server without keys is known, beside localhost and the address it listens "
        "on. Any other is refused, because a web page may have made its own name point here. With keys every Host is "
        "taken.",
        "box.local,192.168.1.5", "none",
    ),
    Setting(
        Group.SERVER, "allow_origin",
        several("ORIGINS", "origins such as https://chat.example.com, with commas between, or * for any", ORIGIN),
        _SERVER.allow_origin,
        "Origins whose web pages may use the server: they get CORS headers. Without keys requests from all others are "
        "refused, unless the page came from this server.",
        "http://localhost:3000", "none",
    ),
    Setting(
        Group.SERVER, "keys_file", FILE_PATH, _SERVER.keys_file,
        "The file that quire keys writes. Once it is there, every route but /health and /ready needs a key.",
        "~/.config/quire/keys.json", "keys.json in the configuration folder, if it is there", is_common=True,
    ),
    Setting(
        Group.SERVER, "cache_group",
        text("up to 64 letters, digits, dots, dashes and underscores, a letter or digit first", NAME),
        _SERVER.cache_group,
        "The cache group of every key that was made without --cache-group, and of a server without keys. Keys of one "
        "group share cached blocks, so each can notice what the others have sent; see the guide on keys before.",
        "team-a", "each key shares with itself alone",
    ),
    Setting(
        Group.SERVER, "admin_socket", FILE_PATH, _SERVER.admin_socket,
        "Unix socket for the operator: statistics, requests, draining. Its folder must be its owner's alone.",
        "/run/quire/admin.sock", "admin-PORT.sock in quire's runtime folder",
    ),
    Setting(
        Group.SERVER, "drain_s", seconds(86_400.0), _SERVER.drain_s,
        "Seconds that requests may take to finish once the server is asked to end.", "60",
    ),
    Setting(
        Group.SERVER, "max_open_requests", whole_number(1, 1_000_000), _SERVER.max_open_requests,
        "Requests that may be open at once, from their first byte to their last; keys share them, and one more is "
        "turned away unread.",
        "4096",
    ),
    Setting(
        Group.SERVER, "alias",
        several("NAME=MODEL", "pairs such as gpt-5=coder or claude-*=coder, with commas between", ALIAS, str),
        _SERVER.alias,
        "Other names of models, for clients that ask for names of their own. A * stands for any characters; the first "
        "pair that fits is taken, and a model's own name comes before all of them.",
        "claude-*=coder", "none",
    ),
    Setting(
        Group.SERVER, "store", FILE_PATH, _SERVER.store,
        "A file for conversations that clients go on with by an id: previous_response_id of /v1/responses, threads of "
        "/v1/messages. Each can be found with the key it was kept for alone. It is made readable by its owner alone; "
        "what is in it is not encrypted.",
        "~/.local/state/quire/conversations.db", "none is kept",
    ),
    Setting(
        Group.SERVER, "store_size", SIZE, _SERVER.store_size_bytes,
        "How much the store may hold; then whoever takes most of it loses the oldest.",
        "1GiB", field="store_size_bytes",
    ),
    Setting(
        Group.SERVER, "stable_prefix",
        lines("PATTERNS", "dates, times, ids and billing-header with commas between, or a regular expression of up to "
              "200 printable characters", "dates|times|ids|billing-header", r"[\x20-\x7e]{1,200}"),
        _SERVER.stable_prefix,
        "Lines to take out of system texts before a template sees them, so that prompts begin alike: short lines about "
        "a date, a time or an id; a client's billing header; whole lines that match a regular expression. Say it again "
        "for each expression. What users and assistants say and tools are never touched, and an answer's header tells "
        "what was taken out.",
        "dates,times", "nothing is taken out",
    ),
    Setting(
        Group.SERVER, "drop_images", SWITCH, _SERVER.drop_images,
        "Put the text [image left out] where a conversation has a picture: models here read text. Otherwise a request "
        "with one is refused.",
        "true",
    ),
    Setting(
        Group.SERVER, "no_page", SWITCH, _SERVER.no_page,
        "Serve no page at /, where people can talk to the models in a browser.",
        "true",
    ),
    Setting(
        Group.SERVER, "models_folder", FILE_PATH, _SERVER.models_folder,
        "A folder of models: each .gguf file and each directory with a config.json in it can be asked for by its name, "
        "and is loaded when it is.",
        "~/models", "none",
    ),
    Setting(
        Group.SERVER, "idle_s", seconds(MAX_IDLE_S), _SERVER.idle_s,
        "Seconds without a request after which a model that was loaded on demand is unloaded.",
        "600", "when another model needs its memory",
    ),
    Setting(
        Group.SERVER, "turn_s", seconds(MAX_HEAD_START_S), _SERVER.turn_s,
        "Seconds of a turn: how long a model which was loaded on demand serves everybody from when it is ready, though "
        "another tenant waits for its memory. Then the next tenant's model has its turn.",
        "30",
    ),
    Setting(
        Group.SERVER, "trace", FILE_PATH, _SERVER.trace,
        "A new file for a trace: what the worker was told, planned and got, which quire replay runs again. It has no "
        "text, and token ids under a secret permutation; equal tokens are still equal, so do not publish it. Only its "
        "owner can read it. A second model has a file of its own, FILE-2 and so on.",
        "trace.jsonl", "none",
    ),
    Setting(
        Group.SERVER, "trace_max_bytes", SIZE, _SERVER.trace_max_bytes,
        "How large a trace may become; then it ends, and the server goes on.", "4GiB",
    ),
    Setting(
        Group.SERVER, "trace_tokens", SWITCH, _SERVER.trace_tokens,
        "Write token ids into the trace as they are: who has the model can read what was said.", "true",
    ),
    Setting(
        Group.SERVER, "otel", text("a URL such as http://localhost:4318", r"https?://[\x21-\x7e]{1,200}", "URL"),
        _SERVER.otel,
        "Where OpenTelemetry spans go, one for each request, over HTTP. Needs quire[otel].",
        "http://localhost:4318", "where OTEL_EXPORTER_OTLP_ENDPOINT says, or nowhere",
    ),
    Setting(
        Group.SERVER, "log_format", choice("plain", "json"), _SERVER.log_format,
        "How log lines are written: for people or for machines.", "json",
    ),
    Setting(
        Group.SERVER, "metrics_prefix", text("a word of letters and digits", r"[a-z][a-z0-9_]{0,31}"),
        _SERVER.metrics_prefix,
        "What names of metrics begin with. Dashboards made for vLLM expect vllm.", "quire",
    ),
)  # fmt: skip

BY_NAME = {setting.name: setting for setting in SETTINGS}
