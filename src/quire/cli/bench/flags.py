"""Flags of `quire bench`: connection to a server, and options of the measurement."""

import json
from dataclasses import dataclass
from typing import Any

from quire.bench.measures import Objective
from quire.bench.runs import BenchOptions
from quire.cli.shared.flags import flag
from quire.errors import ConfigError
from quire.http_client import ServerAddress

KEY_VARIABLES = ("OPENAI_API_KEY",)
PAIR = "NAME=VALUE"
EXTRA_HELP = "Merged into every request body; null removes a field."
GOODPUT_HELP = "Latency limit: ttft:500, tpot:50, e2el:9000; repeatable."
EOS_HELP = "Request all output tokens, even after the model's end token."


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFlags:
    """Flags for the connection to a server and for the measurement."""

    model: str | None = flag(None, "Model to request; default: the first the server lists.")
    api_key: str | None = flag(
        None, "Key for the server.", "--api-key", "--key", envvar=list(KEY_VARIABLES), show_envvar=True
    )
    header: list[str] | None = flag(None, "Header to send; repeatable.", metavar=PAIR)  # noqa: RUF009 - a dataclass field
    timeout: float = flag(600.0, "Timeout of one request, in seconds.")
    ready_timeout: float = flag(30.0, "Seconds to wait until the server responds.")
    warmups: int = flag(1, "Warm-up requests.", "--warmups", "--num-warmups", min=0)
    ignore_eos: bool = flag(True, EOS_HELP, "--ignore-eos/--no-ignore-eos")
    send_priority: bool = flag(False, "Send each class as a priority.")
    extra_body: str | None = flag(None, EXTRA_HELP, metavar="JSON")
    goodput: list[str] | None = flag(None, GOODPUT_HELP, metavar="NAME:MS")  # noqa: RUF009 - a dataclass field
    label: str | None = flag(None, "A name for the result.")
    metadata: list[str] | None = flag(None, "Metadata for the result; repeatable.", metavar=PAIR)  # noqa: RUF009 - a dataclass field

    def server(self, url: str) -> ServerAddress:
        """Return the server at this URL, with the key and headers of these flags."""
        return ServerAddress.parse(url, self.api_key, tuple(_parse_pairs(self.header, "--header").items()))

    def options(self) -> BenchOptions:
        """Convert these flags to options of the measurement. Raises ConfigError for an invalid flag."""
        return BenchOptions(
            model=self.model,
            ready_s=self.ready_timeout,
            timeout_s=self.timeout,
            num_warmups=self.warmups,
            ignores_eos=self.ignore_eos,
            sends_priority=self.send_priority,
            extra=_parse_object(self.extra_body),
            label=self.label,
            objective=Objective.parse([word for text in self.goodput or () for word in text.split()]),
            metadata=_parse_pairs(self.metadata, "--metadata"),
        )


def _parse_pairs(texts: list[str] | None, flag: str) -> dict[str, str]:
    pairs = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"expected name=value for {flag}, got {text!r}", (flag,))
        pairs[name.strip()] = value.strip()
    return pairs


def _parse_object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        extra = json.loads(text)
    except ValueError:
        extra = None
    if not isinstance(extra, dict):
        raise ConfigError(f"expected a JSON object for --extra-body, got {text!r}", ("--extra-body",))
    return extra
