"""What becomes of parameters that no dialect knows, and whom a prefix is shared with: a real server, sockets, keys."""

import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import zmq

from benchmarks.record import say
from proofs.api.sdk_environments import python_command
from proofs.framework.proof import Proof, section
from quire.api.access.keys import add_key
from quire.api.dialects.anthropic.schemas import COUNT_NAMES, MESSAGES_NAMES
from quire.api.dialects.field_names import FieldNames
from quire.api.dialects.foreign_fields import FOREIGN_FIELDS
from quire.api.dialects.openai.fields import (
    CHAT_NAMES,
    COMPLETION_NAMES,
    DETOKENIZE_NAMES,
    RESPONSE_NAMES,
    TOKENIZE_NAMES,
)
from tests.support.machine.patience import PATIENCE_S
from tests.support.models.tiny_models import make_directory
from tests.support.servers.live_server import SIZES, TINY, Server, oracle, running

LETTERS = "abcdefghijklmnopqrstuvwxyz_"
MESSAGES = [{"role": "user", "content": "hello"}]
BODIES: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/completions": {"prompt": "hello", "max_tokens": 1},
    "/v1/responses": {"input": "hello", "max_output_tokens": 1},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/cache/explain": {"prompt": "hello"},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [40]},
}
NAMES: Mapping[str, FieldNames] = {
    "/v1/chat/completions": CHAT_NAMES,
    "/v1/completions": COMPLETION_NAMES,
    "/v1/responses": RESPONSE_NAMES,
    "/v1/messages": MESSAGES_NAMES,
    "/v1/messages/count_tokens": COUNT_NAMES,
    "/v1/cache/explain": COMPLETION_NAMES,
    "/tokenize": TOKENIZE_NAMES,
    "/detokenize": DETOKENIZE_NAMES,
}
OPEN = frozenset({"messages", "input"})
"""Other names inside these go on to a template: only a misspelt one is refused."""
SDK_FIELDS = """
import json, sys
from anthropic.types import message_count_tokens_params as count, message_create_params as messages
from anthropic.types.beta import message_count_tokens_params as beta_count, message_create_params as beta
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses
def of(*shapes):
    return sorted({name for shape in shapes for name in shape.__annotations__})
json.dump({
    "/v1/chat/completions": of(chat.CompletionCreateParamsBase),
    "/v1/completions": of(completions.CompletionCreateParamsBase),
    "/v1/responses": of(responses.ResponseCreateParamsBase),
    "/v1/messages": of(messages.MessageCreateParamsBase, beta.MessageCreateParamsBase),
    "/v1/messages/count_tokens": of(count.MessageCountTokensParams, beta_count.MessageCountTokensParams),
}, sys.stdout)
"""


@dataclass
class Client:
    """One kept connection, with a key."""

    port: int
    key: str

    def __post_init__(self) -> None:
        self._wire = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)

    def send(self, method: str, path: str, body: Any = None) -> "Heard":
        headers = {"content-type": "application/json", "x-api-key": self.key}
        self._wire.request(method, path, None if body is None else json.dumps(body), headers)
        response = self._wire.getresponse()
        return Heard(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())


@dataclass(frozen=True)
class Heard:
    """An answer."""

    status: int
    headers: Mapping[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def misspelt(self) -> str:
        """Why a parameter was refused, in any API's shape; empty if none was for its name."""
        message = str(self.json["error"]["message"]) if self.status == 400 else ""
        return message if message.startswith("expected a known parameter, got ") else ""


# -- parameters --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unknown:
    """A body with one name that its dialect does not read."""

    path: str
    body: Mapping[str, Any]
    name: str
    """With dots where it stands inside."""
    is_misspelt: bool
    """One mistake away from a name that is read."""


def mistake(random: Random, word: str) -> str:
    """One letter more, less or another, or two that changed places."""
    at, letter = random.randrange(len(word)), random.choice(LETTERS)
    made = (
        word[:at] + letter + word[at:],
        word[:at] + word[at + 1 :],
        word[:at] + letter + word[at + 1 :],
        word[:at] + word[at + 1 : at + 2] + word[at] + word[at + 2 :],
    )
    return random.choice(made)


def is_near(name: str, word: str) -> bool:
    """The same rule, found in another way than the server's: over all that one mistake makes."""
    cuts = [(word[:at], word[at:]) for at in range(len(word) + 1)]
    if any(head + tail[1:] == name for head, tail in cuts if tail):
        return True
    if any(head + tail[1] + tail[0] + tail[2:] == name for head, tail in cuts if len(tail) > 1):
        return True
    shapes = [(head, tail) for head, tail in cuts] + [(head, tail[1:]) for head, tail in cuts if tail]
    return any(len(name) == len(head) + 1 + len(tail) and name[: len(head)] == head and name[len(head) + 1 :] == tail
               for head, tail in shapes)  # fmt: skip


def unknown(random: Random) -> Unknown:
    """A misspelt or an unknown name, at the top of a body or inside one of its objects."""
    while True:
        path = random.choice(list(BODIES))
        names, where = NAMES[path], list[str]()
        while names.nested and random.random() < 0.3:
            inner = random.choice(sorted(names.nested))
            names, where = names.nested[inner], [*where, inner]
        word = random.choice(sorted(names.read))
        invented = "".join(random.choices(LETTERS, k=random.randint(1, 24)))
        name = mistake(random, word) if random.random() < 0.6 else invented
        foreign = any(name in one for one in FOREIGN_FIELDS.values())
        is_misspelt = len(name) >= 5 and not foreign and any(is_near(name, one) for one in names.read)
        if name and name not in names.read and (is_misspelt or not OPEN.intersection(where)):
            break
    return Unknown(path, filled(BODIES[path], where, name), ".".join([*where, name]), is_misspelt)


def filled(body: Mapping[str, Any], where: Sequence[str], name: str) -> dict[str, Any]:
    """The body with this name at this place."""
    if not where:
        return {**body, name: 1}
    first, *rest = where
    if first in ("messages", "input"):
        return {**body, first: [filled(MESSAGES[0], rest, name)]}
    if first == "tools":
        return {**body, first: [filled({"type": "function", "name": "f"} if "input" in body else {}, rest, name)]}
    kept = {"type": "function", "function": {"name": "f"}} if first == "tool_choice" else {}
    return {**body, first: filled(kept, rest, name)}


def is_swallowed(sent: Unknown, heard: Heard) -> bool:
    """Neither refused by its name nor named."""
    if heard.misspelt:
        return sent.name not in heard.misspelt
    return sent.name not in heard.headers.get("x-quire-ignored", "").split(", ")


def sdk_fields(folder: Path) -> Mapping[str, Sequence[str]]:
    """By path, all that the official SDKs send."""
    python = python_command(folder)[0]
    told = subprocess.run([python, "-c", SDK_FIELDS], capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    found: Mapping[str, Sequence[str]] = json.loads(told.stdout)
    return found


def known(folder: Path) -> Iterator[tuple[str, str]]:
    """Every name that some server or SDK knows, with every path it may be sent to."""
    for path, found in sdk_fields(folder).items():
        yield from ((path, name) for name in found)
    for path in BODIES:
        # With messages what is explained is a conversation, which has no prompt.
        taken = {"messages"} if path == EXPLAIN else set()
        yield from ((path, name) for table in FOREIGN_FIELDS.values() for name in sorted(table - taken))


@section("unknown parameters")
def parameters(proof: Proof) -> None:
    """Misspelt and invented names over all dialects, then every name that SDKs and the table have."""
    keys = proof.folder / "keys.json"
    secret, kinds = add_key(keys, "alice"), Counter[str]()
    with oracle(proof.folder, keys=keys) as server:
        client = Client(server.port, secret)
        num_swallowed = num_let_in = 0
        for _ in range(proof.sized(quick=600, full=3000)):
            sent = unknown(proof.random)
            heard = client.send("POST", sent.path, {"model": "oracle", **sent.body})
            kinds["refused" if heard.status == 400 else "named"] += 1
            if is_swallowed(sent, heard):
                num_swallowed += 1
                say(f"  swallowed: {sent}: {heard.status} {heard.data[:200]!r}")
            num_let_in += sent.is_misspelt and not heard.misspelt
        probes = sorted({*known(proof.folder)})
        probes = proof.random.sample(probes, proof.sized(quick=min(600, len(probes)), full=len(probes)))
        refused = [one for one in probes if is_refused(client, *one)]
    for path, name in refused[:20]:
        say(f"  refused: {name} at {path}")
    proof.equals("parameters_swallowed", num_swallowed, 0, "neither named nor refused")
    proof.equals("parameters_let_in", num_let_in, 0, "one mistake away and not refused")
    proof.equals("parameters_refused_known", len(refused), 0, "fields of the official SDKs and of the table")
    proof.report("parameters_refused", kinds["refused"])
    proof.report("parameters_named", kinds["named"])
    proof.report("parameters_known", len(probes))


def is_refused(client: Client, path: str, name: str) -> bool:
    """Whether a name that another knows is refused: when it says nothing at all, and as misspelt when it does."""
    if name in BODIES[path]:
        return False
    body = {"model": "oracle", **BODIES[path]}
    silent, filled_in = (client.send("POST", path, {**body, name: value}) for value in (None, {"x": 1}))
    return silent.status != 200 or bool(filled_in.misspelt)


# -- cache groups ------------------------------------------------------------------------------------------------------

GROUPS = {"dev": "team-a", "ci": "team-a", "other": "team-b", "team-a": "", "alone": ""}
"""Keys, and the cache group of each. One is called as a group is."""
OUTSIDE = ("other", "team-a", "alone")
BLOCK = 32
COMPLETE, EXPLAIN = "/v1/completions", "/v1/cache/explain"
CHANGING = re.compile(
    rb"(chatcmpl|cmpl|resp|msg|req)[-_][0-9a-f]{8,}|\"(created|seconds_ago)\":[0-9.]+|\"text\":\"[^\"\\]*(\\.[^\"\\]*)*\""
)
CHANGING_HEADERS = frozenset({"date", "x-request-id", "content-length"})


@contextmanager
def grouped(folder: Path) -> Iterator[tuple[Server, dict[str, Client], str]]:
    """A server, a client for each key, and where its KV events are published."""
    keys, events = folder / "keys.json", f"ipc://{folder}/events"
    secrets = {name: add_key(keys, name, cache_group=group) for name, group in GROUPS.items()}
    model = make_directory(folder / "one", tiny=TINY)
    with running(folder, "quire", "serve", str(model), *SIZES, "--kv-events", events, keys=keys) as server:
        yield server, {name: Client(server.port, secret) for name, secret in secrets.items()}, events


def prompt(random: Random, num_blocks: int = 3) -> list[int]:
    """Tokens that were never sent before."""
    return [random.randrange(10, 250) for _ in range(num_blocks * BLOCK + 1)]


def completed(client: Client, tokens: Sequence[int], **more: Any) -> Heard:
    heard = client.send("POST", COMPLETE, {"prompt": [*tokens], "max_tokens": 1, "temperature": 0, **more})
    if heard.status != 200:
        raise RuntimeError(f"expected an answer, got {heard.status}: {heard.data[:300]!r}")
    return heard


def cached(heard: Heard) -> int:
    return int(heard.json["usage"]["prompt_tokens_details"]["cached_tokens"])


@dataclass(frozen=True)
class Sent:
    """A prompt and what a request with it was called."""

    tokens: Sequence[int]
    request_id: str


def call(random_kind: int, client: Client, about: Sent, salt: str | None, rest: Sequence[int]) -> tuple[Any, ...]:
    """One call that may tell something of a prompt: what came, without names and dates that are always new."""
    more = {} if salt is None else {"cache_salt": salt}
    tokens = [*about.tokens[: len(about.tokens) - len(rest)], *rest]
    match random_kind:
        case 0 | 1 | 2:
            heard = client.send("POST", EXPLAIN, {"prompt": tokens, **more})
        case 3:
            # Under a salt of its own: what a caller has cached itself may begin like a prompt by chance.
            heard = completed(client, tokens, cache_explain=True, cache_salt=f"of {about.request_id}")
        case 4:
            heard = client.send("GET", f"/v1/requests/{about.request_id}/cache")
        case 5:
            heard = client.send("GET", f"/v1/admin/blocks/{about.tokens[0]}")
        case 6:
            heard = client.send("GET", "/v1/admin/watch")
        case _:
            heard = client.send("GET", "/v1/cache/warnings")
    headers = sorted((name, value) for name, value in heard.headers.items() if name not in CHANGING_HEADERS)
    return heard.status, headers, CHANGING.sub(b"", heard.data.replace(about.request_id.encode(), b""))


def num_distinguished(random: Random, clients: Mapping[str, Client], callers: Sequence[str], count: int) -> int:
    """Calls that answer otherwise of a prompt that `dev` has sent than of one that was never sent."""
    num_found = 0
    for _ in range(count):
        seen, never = prompt(random), prompt(random)
        sent = Sent(seen, completed(clients["dev"], seen).headers["x-request-id"])
        unsent = Sent(never, f"req-{random.getrandbits(128):032x}")
        kind, client = random.randrange(8), clients[random.choice(callers)]
        salt = random.choice((None, None, "group:team-a", "team-a", "/salt:", "*"))
        rest = prompt(random)[: random.choice((0, 1, BLOCK, 2 * BLOCK + 5))]
        heard = [call(kind, client, one, salt, rest) for one in (sent, unsent)]
        if heard[0] != heard[1]:
            num_found += 1
    return num_found


def stored(events: "zmq.Socket[bytes]") -> Iterator[tuple[str, int]]:
    """The cache group and the name of every block that was published."""
    while events.poll(2000):
        batch = msgspec.msgpack.decode(events.recv_multipart()[-1])
        for event in batch[1]:
            if event["type"] == "BlockStored":
                yield from ((event["cache_salt"], name) for name in event["block_hashes"])


def num_events_shared(clients: Mapping[str, Client], random: Random, address: str, count: int) -> tuple[int, int]:
    """Names of blocks that KV events give to two groups, and blocks that outsiders' calls of known prompts lacked."""
    context = zmq.Context()
    with context, context.socket(zmq.SUB) as events:
        events.setsockopt(zmq.RCVHWM, 0)
        events.subscribe(b"")
        events.connect(address)
        events.poll(500)
        num_missing = 0
        for _ in range(count):
            tokens, outsider = prompt(random), random.choice(OUTSIDE)
            completed(clients["dev"], tokens)
            completed(clients[outsider], tokens)
            found = [*_of_two(events)]
            groups = Counter(group for group, _ in found)
            own = f"group:{GROUPS[outsider]}" if GROUPS[outsider] else f"tenant:{outsider}"
            num_missing += groups[own] != groups["group:team-a"]
            num_missing += len({name for _, name in found}) != len(found)
        return num_missing, count


def _of_two(events: "zmq.Socket[bytes]") -> Iterator[tuple[str, int]]:
    """What two prompts of three blocks publish."""
    found = stored(events)
    for _, one in zip(range(6), found, strict=False):
        yield one


@section("cache groups")
def groups(proof: Proof) -> None:
    """A second key of a group against the first, and keys outside against prompts that were never sent."""
    count = proof.sized(quick=200, full=1000)
    with grouped(proof.folder) as (_server, clients, address):
        random, num_alike, num_hits = proof.random, 0, 0
        num_leaks = num_distinguished(random, clients, OUTSIDE, count)
        num_within = num_distinguished(random, clients, ("ci",), 80)
        for _ in range(count // 5):
            tokens = prompt(random, random.randint(1, 6))
            first, again, second = (completed(clients[name], tokens) for name in ("dev", "dev", "ci"))
            num_alike += (cached(first), cached(again)) == (0, cached(second)) and cached(second) == len(tokens) - 1
            num_hits += sum(cached(completed(clients[name], tokens)) for name in OUTSIDE)
        num_events, num_tried = num_events_shared(clients, random, address, 20)
    proof.holds("group_hits", num_alike == count // 5, "a second key of a group hits as the first one does")
    proof.equals("group_leaks", num_hits + num_leaks + num_events, 0, "hits and calls of keys outside")
    proof.report("group_calls", 2 * count + 2 * num_tried + 3 * (count // 5))
    proof.at_least("group_leaks_noticed", num_within, 1, "of 80 calls of a key of the group: the check can fail")
