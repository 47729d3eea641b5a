"""The table of all settings. Flags, variables, TOML keys, help and the reference page are generated from it."""

from dataclasses import dataclass
from enum import Enum
from typing import Any, get_args

from quire.config.kinds import (
    FILE_PATH,
    SIZE,
    SWITCH,
    Kind,
    Value,
    choice,
    fraction,
    lines,
    power_of_two,
    seconds,
    several,
    text,
    whole_number,
)
from quire.config.model_settings import InstructionSet, ModelSettings
from quire.config.parked_models import MAX_IDLE_S
from quire.config.scheduling import ServingSettings
from quire.config.server_settings import NAME, ServerSettings

PREFIX = "QUIRE_"
HOST_NAME = r"\*|[a-z0-9._-]{1,253}|[0-9a-f:.]{2,45}"
ORIGIN = r"\*|[a-z][a-z0-9+.-]{0,30}://[a-z0-9._~%:\[\]-]{1,260}"
ALIAS = r"[^\s=,]{1,128}=[^\s=,]{1,256}"
EFFORT = r"[a-z]{1,16}=[1-9][0-9]{0,5}"
ENDPOINT = r"(tcp|ipc)://[\x21-\x7e]{1,200}"
MAX_HEAD_START_S = 86_400.0
MAX_STUCK_STEP_S = 3_600.0
MAX_FIRST_BYTE_S = 3_600.0
RENAMED = {"min_stay_s": "turn_s"}
"""Old names of settings that were renamed with a new meaning. They are rejected with a hint at the new name."""
_MODEL, _SERVING, _SERVER = ModelSettings(), ServingSettings(), ServerSettings()


class Group(Enum):
    """A group of settings: its heading in help and reference, and the dataclass that has these settings as fields."""

    MODEL = "Model"
    SCHEDULING = "Scheduling"
    KV_EVENTS = "KV cache and events"
    SERVER = "Server"

    @property
    def settings_class(self) -> type[Any]:
        """The dataclass with the settings of this group as fields."""
        return {Group.MODEL: ModelSettings, Group.SERVER: ServerSettings}.get(self, ServingSettings)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting; its name is its TOML key."""

    group: Group
    name: str
    kind: Kind
    default: Value
    help: str
    example: str
    """An example value, as on the command line."""
    unset: str = ""
    """Description of the default if that is None."""
    field: str = ""
    """The dataclass field, if its name differs."""
    is_common: bool = False
    """Listed first in help."""

    @property
    def field_name(self) -> str:
        return self.field or self.name

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    def show(self, value: Value) -> str:
        """Format a value as text; None becomes the text of `unset`."""
        return self.unset if value is None else self.kind.show(value)

    @property
    def default_text(self) -> str:
        return self.show(self.default)


SETTINGS: tuple[Setting, ...] = (
    Setting(
        Group.MODEL, "memory", SIZE, _MODEL.memory_bytes,
        "Memory limit of the whole process: libraries, weights, steps and the KV pool. A share such as 50% is what "
        "the process holds at start plus that share of the memory that is free then. Several models share the limit: "
        "each gets the size of its weights on disk, and an equal part of the rest.",
        "4GiB", "half of the free memory at start", field="memory_bytes", is_common=True,
    ),
    Setting(
        Group.MODEL, "block_size", power_of_two(1024), _MODEL.block_size,
        "Tokens per block of KV memory. Smaller blocks share more of a prompt, larger ones have less overhead.",
        "16",
    ),
    Setting(
        Group.MODEL, "max_model_len", whole_number(2, 1 << 30), _MODEL.max_sequence_tokens,
        "Maximum length of a sequence in tokens, prompt and output together.",
        "8192", "the context length of the model, or what the KV pool holds if that is less",
        field="max_sequence_tokens", is_common=True,
    ),
    Setting(
        Group.MODEL, "max_step_tokens", whole_number(2, 1 << 20), _MODEL.max_step_tokens,
        "Maximum tokens computed in one step, at least max_running + block_size. More makes long prompts faster and "
        "every other response less smooth.",
        "512",
    ),
    Setting(
        Group.MODEL, "step_ms", whole_number(0, 3_600_000), _MODEL.step_ms,
        "Time limit of a step in milliseconds: a step takes as many prompt tokens, up to max_step_tokens, as fit by "
        "the duration of earlier steps, but at least one block. Less makes other responses smoother and long prompts "
        "slower. 0: always max_step_tokens.",
        "250",
    ),
    Setting(
        Group.MODEL, "max_running", whole_number(1, 1 << 16), _MODEL.max_running,
        "Maximum number of sequences that run at once.", "32", is_common=True,
    ),
    Setting(
        Group.MODEL, "dtype", choice("auto", "float32", "bfloat16", "float16"), _MODEL.dtype,
        "Type of the weights in memory. auto: as in the file, with the same number of bits; the torch backend uses "
        "float32. float32 and bfloat16: all weights, whatever the file has; on processors with tile registers, "
        "bfloat16 takes much less time. On the CPU backend, with each type, a request alone and in a batch has the "
        "same output bit for bit.",
        "bfloat16", is_common=True,
    ),
    Setting(
        Group.MODEL, "arithmetic", choice("auto", "float", "int8"), _MODEL.arithmetic,
        "How inputs are multiplied with weights of 4 to 8 bits. int8: inputs are rounded to 8 bits in groups of 32, "
        "sums of a group are exact; rejected if no weight has 4 to 8 bits. float: weights are widened to float32, "
        "nothing is rounded. auto: int8. All other weights are multiplied in float.",
        "float",
    ),
    Setting(
        Group.MODEL, "kv_dtype", choice("auto", "float32", "bfloat16", "float16", "int8"), _MODEL.kv_dtype,
        "Type of keys and values in memory. bfloat16 halves the memory per token and the reads per step, int8 (CPU "
        "backend) takes a little more than half of that: a scale for each token and head. auto: as dtype if that is "
        "set; else bfloat16, or float32 for a model in float32.",
        "float32",
    ),
    Setting(
        Group.MODEL, "wired_memory", SWITCH, _MODEL.wired_memory,
        "On Apple silicon with MLX: keep the model in memory, so that the system does not page it out between two "
        "requests. There are reports that macOS panics with it (ml-explore/mlx#3186).",
        "true",
    ),
    Setting(
        Group.MODEL, "speculation", choice("auto", "off"), _MODEL.speculation,
        "Whether tokens are guessed from the text so far and verified together with the next one. Output is the same "
        "with and without, token for token. auto: on the CPU backend, as far as it saves time. off: never.",
        "off",
    ),
    Setting(
        Group.MODEL, "pin_share", fraction(), _MODEL.pin_share,
        "Largest fraction of the KV pool that prefixes may use which clients keep cached for a time. It is divided "
        "among keys by weight, and refuses no request. 0: nothing is kept.",
        "0.1",
    ),
    Setting(
        Group.MODEL, "tool_format", choice("auto", "hermes"), _MODEL.tool_format,
        "Format of tool calls. auto: as in the model's chat template; models whose template has no tools reject "
        "requests with tools. hermes: for such models, tools are described in the system text, and calls are JSON "
        "between <tool_call> tags.",
        "hermes",
    ),
    Setting(
        Group.MODEL, "backend", choice("auto", "cpu", "mlx", "torch"), _MODEL.backend,
        "Which backend runs the model. cpu: quire's own kernels, for the families they support (the guide on models "
        "lists them). mlx: models of mlx-lm on Apple silicon, experimental; needs quire[mlx]. torch: any other "
        "full-attention decoder of transformers; needs quire[torch]. auto: mlx on Apple silicon if it is installed "
        "and can run the model, then cpu, then torch.",
        "torch",
    ),
    Setting(
        Group.MODEL, "device",
        text("cpu, cuda, mps, or one of several such as cuda:1", r"(cpu|mps|cuda)(:[0-9]{1,3})?"),
        _MODEL.device,
        "Device that runs the model. cpu is tested; cuda and mps are for the torch backend and are not.",
        "cpu",
    ),
    Setting(
        Group.MODEL, "threads", whole_number(1, 4096), _MODEL.num_threads,
        "Number of compute threads.", "4", "one per physical core, at most the CPU quota", field="num_threads",
        is_common=True,
    ),
    Setting(
        Group.MODEL, "instruction_set", choice(*get_args(InstructionSet)), _MODEL.instruction_set,
        "Instruction set of the CPU kernels. auto: the best that this processor has, tile registers included. A "
        "lesser one is for comparisons: output of int8 arithmetic is the same with each, bit for bit.",
        "avx2",
    ),
    Setting(
        Group.SCHEDULING, "head_start_high_s", seconds(MAX_HEAD_START_S), _SERVING.head_start_high_s,
        "Head start of a HIGH request in seconds: it is scheduled as if it had arrived that much earlier.",
        "120",
    ),
    Setting(
        Group.SCHEDULING, "head_start_normal_s", seconds(MAX_HEAD_START_S), _SERVING.head_start_normal_s,
        "Head start of a NORMAL request in seconds: it is scheduled as if it had arrived that much earlier; no more "
        "than for HIGH.", "30",
    ),
    Setting(
        Group.SCHEDULING, "head_start_low_s", seconds(MAX_HEAD_START_S), _SERVING.head_start_low_s,
        "Head start of a LOW request in seconds: it is scheduled as if it had arrived that much earlier; no more than "
        "for NORMAL.", "0",
    ),
    Setting(
        Group.SCHEDULING, "queue", whole_number(1, 1_000_000), _SERVING.queue,
        "Maximum number of waiting requests, shared by all keys; further requests are rejected and may be retried "
        "later.", "2048",
    ),
    Setting(
        Group.SCHEDULING, "stuck_step_s", seconds(MAX_STUCK_STEP_S), _SERVING.stuck_step_s,
        "Seconds without progress (no step and no layer of a step completed) after which a worker is replaced; its "
        "requests continue in the new one.", "60",
    ),
    Setting(
        Group.KV_EVENTS, "kv_key_file", FILE_PATH, _SERVING.kv_key_file,
        "File of 32 secret bytes, readable only by its owner, from which block names are derived. Replicas with the "
        "same file use the same names, and names survive a restart. A relative path is relative to the folder where "
        "quire is started.",
        "~/.config/quire/kv.key", "a new secret at every start",
    ),
    Setting(
        Group.KV_EVENTS, "kv_events", text("an address such as tcp://127.0.0.1:5557", ENDPOINT, "ADDRESS"),
        _SERVING.kv_events,
        "ZMQ endpoint that publishes KV-cache events in vLLM's format. A second model uses the next port.",
        "tcp://127.0.0.1:5557", "none",
    ),
    Setting(
        Group.KV_EVENTS, "kv_events_replay", text("an address such as tcp://127.0.0.1:5558", ENDPOINT, "ADDRESS"),
        _SERVING.kv_events_replay,
        "ZMQ endpoint where routers request events they missed.",
        "tcp://127.0.0.1:5558", "none",
    ),
    Setting(
        Group.KV_EVENTS, "kv_events_topic", text("1 to 200 plain characters", r"[\x20-\x7e]{1,200}"),
        _SERVING.kv_events_topic,
        "First frame of every event; some routers require it to name the sender.", "kv@pod-1@model", "empty",
    ),
    Setting(
        Group.KV_EVENTS, "kv_events_encoding", choice("map", "array"), _SERVING.kv_events_encoding,
        "Encoding of events; array suits consumers from before mid-2026.", "array",
    ),
    Setting(
        Group.SERVER, "host", text("a host name or an address", r"[A-Za-z0-9._:-]{1,253}", "HOST"), _SERVER.host,
        "Address to listen on. An address that other machines can reach requires keys.",
        "0.0.0.0", is_common=True,  # noqa: S104
    ),
    Setting(
        Group.SERVER, "port", whole_number(0, 65535), _SERVER.port, "Port to listen on; 0: a free one.",
        "8080", is_common=True,
    ),
    Setting(
        Group.SERVER, "allow_host",
        several("NAMES", "names or addresses without ports, comma-separated, or * for any", HOST_NAME),
        _SERVER.allow_host,
        "Names that a server without keys accepts in the Host header, besides localhost and the address it listens "
        "on. Requests with any other name are rejected, because a web page may have pointed its own name to this "
        "machine. With keys every Host is accepted.",
        "box.local,192.168.1.5", "none",
    ),
    Setting(
        Group.SERVER, "allow_origin",
        several("ORIGINS", "origins such as https://chat.example.com, comma-separated, or * for any", ORIGIN),
        _SERVER.allow_origin,
        "Origins whose web pages may use the server: they get CORS headers. Without keys, requests from all others "
        "are rejected, unless the page came from this server.",
        "http://localhost:3000", "none",
    ),
    Setting(
        Group.SERVER, "keys_file", FILE_PATH, _SERVER.keys_file,
        "File that quire keys writes. If it exists, every route but /health and /ready needs a key.",
        "~/.config/quire/keys.json", "keys.json in the configuration folder, if it exists", is_common=True,
    ),
    Setting(
        Group.SERVER, "cache_group",
        text("up to 64 letters, digits, dots, dashes and underscores, starting with a letter or digit", NAME),
        _SERVER.cache_group,
        "Cache group of every key that was created without --cache-group, and of a server without keys. Keys of one "
        "group share cached blocks, so each can detect what the others have sent; read the guide on keys first.",
        "team-a", "each key shares only with itself",
    ),
    Setting(
        Group.SERVER, "admin_socket", FILE_PATH, _SERVER.admin_socket,
        "Unix socket for the operator: statistics, requests, draining. Only its owner may have access to its folder.",
        "/run/quire/admin.sock", "admin-PORT.sock in quire's runtime folder",
    ),
    Setting(
        Group.SERVER, "drain_s", seconds(86_400.0), _SERVER.drain_s,
        "Seconds that requests may take to finish during a shutdown.", "60",
    ),
    Setting(
        Group.SERVER, "max_open_requests", whole_number(1, 1_000_000), _SERVER.max_open_requests,
        "Maximum number of open requests, from their first byte to their last, shared by all keys; further requests "
        "are rejected unread.",
        "4096",
    ),
    Setting(
        Group.SERVER, "first_byte_s", seconds(MAX_FIRST_BYTE_S), _SERVER.first_byte_s,
        "Maximum seconds from the arrival of a streamed request to its first byte: a stream that still waits then, for "
        "the model, in the queue or for its prompt, is opened, and an event follows at least every 10 seconds. Later "
        "errors are events in the stream. 0: the first token opens the stream, so that every earlier error has an HTTP "
        "status.",
        "5",
    ),
    Setting(
        Group.SERVER, "alias",
        several("NAME=MODEL", "pairs such as gpt-5=coder or claude-*=coder, comma-separated", ALIAS, str),
        _SERVER.alias,
        "Other names of models, for clients that request fixed names. A * stands for any characters; the first pair "
        "that matches is used, and a model's own name takes precedence over all of them.",
        "claude-*=coder", "none",
    ),
    Setting(
        Group.SERVER, "store", FILE_PATH, _SERVER.store,
        "File for conversations that clients continue by an id: previous_response_id of /v1/responses, threads of "
        "/v1/messages. Each is available only with the key it was stored for. The file is readable only by its owner; "
        "its content is not encrypted.",
        "~/.local/state/quire/conversations.db", "no conversation is stored",
    ),
    Setting(
        Group.SERVER, "store_size", SIZE, _SERVER.store_size_bytes,
        "Maximum size of the store; beyond it, the tenant that uses most of it loses its oldest conversations.",
        "1GiB", field="store_size_bytes",
    ),
    Setting(
        Group.SERVER, "stable_prefix",
        lines("PATTERNS", "dates, times, ids and billing-header, comma-separated, or a glob of up to 200 printable "
              "characters", "dates|times|ids|billing-header", r"[\x20-\x7e]{1,200}"),
        _SERVER.stable_prefix,
        "Lines to remove from system texts before the chat template is applied, so that prompts share a prefix: short "
        "lines about a date, a time or an id; the billing header of a client; whole lines that match a glob, with * "
        "for any text and ? for any character. Repeat the flag for each glob. Messages of users and assistants and "
        "tools are never changed, and a response header lists what was removed.",
        "dates,times", "nothing is removed",
    ),
    Setting(
        Group.SERVER, "drop_images", SWITCH, _SERVER.drop_images,
        "Put the text [image left out] in place of an image in a conversation: models here read text. Otherwise a "
        "request with an image is rejected.",
        "true",
    ),
    Setting(
        Group.SERVER, "stop_loops", SWITCH, _SERVER.stop_loops,
        "End an answer that repeats itself: its last tokens, at least 256 and 8 times the period, have a period of 1 "
        "to 128 tokens; tokens that a grammar forces do not count. A request can set stop_loops itself.",
        "true",
    ),
    Setting(
        Group.SERVER, "effort_budgets",
        several("EFFORT=TOKENS", "pairs such as low=1024,high=8192, comma-separated, at most 999999 tokens", EFFORT),
        _SERVER.effort_budgets,
        "Maximum reasoning tokens by effort: reasoning_effort of chats, reasoning.effort of responses, "
        "output_config.effort of messages. A budget in the request takes precedence. An effort that is not listed has "
        "no limit.",
        "low=1024,medium=4096,high=16384", "no effort has a limit",
    ),
    Setting(
        Group.SERVER, "no_page", SWITCH, _SERVER.no_page,
        "Serve no page at /, where users can chat with the models in a browser.",
        "true",
    ),
    Setting(
        Group.SERVER, "models_folder", FILE_PATH, _SERVER.models_folder,
        "Folder of models: each .gguf file and each directory with a config.json in it can be requested by its name, "
        "and is loaded on the first request.",
        "~/models", "none",
    ),
    Setting(
        Group.SERVER, "idle_s", seconds(MAX_IDLE_S), _SERVER.idle_s,
        "Seconds without a request after which a model that was loaded on demand is unloaded.",
        "600", "when another model needs its memory",
    ),
    Setting(
        Group.SERVER, "turn_s", seconds(MAX_HEAD_START_S), _SERVER.turn_s,
        "Length of a turn in seconds: how long a model that was loaded on demand serves all tenants once it is ready, "
        "even if another tenant waits for its memory. Then the model of the next tenant has its turn.",
        "30",
    ),
    Setting(
        Group.SERVER, "trace", FILE_PATH, _SERVER.trace,
        "New file for a trace: the inputs, plans and results of the worker, which quire replay runs again. It has no "
        "text, and token ids under a secret permutation; equal tokens are still equal, so do not publish it. Only its "
        "owner can read it. A second model has its own file, FILE-2 and so on.",
        "trace.jsonl", "none",
    ),
    Setting(
        Group.SERVER, "trace_max_bytes", SIZE, _SERVER.trace_max_bytes,
        "Maximum size of a trace; beyond it the trace ends, and the server continues.", "4GiB",
    ),
    Setting(
        Group.SERVER, "trace_tokens", SWITCH, _SERVER.trace_tokens,
        "Write token ids into the trace as they are: with the model, the text can be read from them.", "true",
    ),
    Setting(
        Group.SERVER, "otel", text("a URL such as http://localhost:4318", r"https?://[\x21-\x7e]{1,200}", "URL"),
        _SERVER.otel,
        "URL that OpenTelemetry spans are sent to over HTTP, one for each request. Needs quire[otel].",
        "http://localhost:4318", "the value of OTEL_EXPORTER_OTLP_ENDPOINT, or none",
    ),
    Setting(
        Group.SERVER, "log_format", choice("plain", "json"), _SERVER.log_format,
        "Format of log lines: plain for people, json for machines.", "json",
    ),
    Setting(
        Group.SERVER, "metrics_prefix", text("a word of letters and digits", r"[a-z][a-z0-9_]{0,31}"),
        _SERVER.metrics_prefix,
        "Prefix of metric names. Dashboards made for vLLM expect vllm.", "quire",
    ),
)  # fmt: skip

BY_NAME = {setting.name: setting for setting in SETTINGS}
