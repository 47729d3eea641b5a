"""Two findings at a real server with keys: unknown parameters, and which keys share a cached prefix."""

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
PASSED_ON = frozenset({"messages", "input"})
"""Objects inside these are passed on to a chat template: only misspelt names inside them are refused."""
SDK_FIELDS = """
import json, sys
from anthropic.types import message_count_tokens_params as count, message_create_params as messages
from anthropic.types.beta import message_count_tokens_params as beta_count, message_create_params as beta
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses
def names_of(*shapes):
    return sorted({name for shape in shapes for name in shape.__annotations__})
json.dump({
    "/v1/chat/completions": names_of(chat.CompletionCreateParamsBase),
    "/v1/completions": names_of(completions.CompletionCreateParamsBase),
    "/v1/responses": names_of(responses.ResponseCreateParamsBase),
    "/v1/messages": names_of(messages.MessageCreateParamsBase, beta.MessageCreateParamsBase),
    "/v1/messages/count_tokens": names_of(count.MessageCountTokensParams, beta_count.MessageCountTokensParams),
}, sys.stdout)
"""


@dataclass
class Client:
    """One connection that stays open, with a key."""

    port: int
    key: str

    def __post_init__(self) -> None:
        self._wire = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)

    def send(self, method: str, path: str, body: Any = None) -> "Answer":
        headers = {"content-type": "application/json", "x-api-key": self.key}
        self._wire.request(method, path, None if body is None else json.dumps(body), headers)
        response = self._wire.getresponse()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())


@dataclass(frozen=True)
class Answer:
    """Status, headers and body of an answer."""

    status: int
    headers: Mapping[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def refusal(self) -> str:
        """The error message if a parameter's name was refused, in the shape of any of the APIs; else empty."""
        message = str(self.json["error"]["message"]) if self.status == 400 else ""
        return message if message.startswith("expected a known parameter, got ") else ""


# -- parameters --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unknown:
    """A body with one name that its dialect does not read."""

    path: str
    body: Mapping[str, Any]
    name: str
    """Dotted, if it is the name of a field inside an object."""
    is_misspelt: bool
    """Whether one typing mistake makes it from a name that the dialect reads."""


def misspell(random: Random, word: str) -> str:
    """Insert, delete or replace one letter, or swap two neighbours."""
    i, letter = random.randrange(len(word)), random.choice(LETTERS)
    misspellings = (
        word[:i] + letter + word[i:],
        word[:i] + word[i + 1 :],
        word[:i] + letter + word[i + 1 :],
        word[:i] + word[i + 1 : i + 2] + word[i] + word[i + 2 :],
    )
    return random.choice(misspellings)


def is_near(name: str, word: str) -> bool:
    """Whether one mistake makes `name` from `word`: the server's rule, computed in another way, from all mistakes."""
    cuts = [(word[:i], word[i:]) for i in range(len(word) + 1)]
    if any(head + tail[1:] == name for head, tail in cuts if tail):
        return True
    if any(head + tail[1] + tail[0] + tail[2:] == name for head, tail in cuts if len(tail) > 1):
        return True
    shapes = [(head, tail) for head, tail in cuts] + [(head, tail[1:]) for head, tail in cuts if tail]
    return any(len(name) == len(head) + 1 + len(tail) and name[: len(head)] == head and name[len(head) + 1 :] == tail
               for head, tail in shapes)  # fmt: skip


def random_unknown(random: Random) -> Unknown:
    """A body with a misspelt or an invented name, at its top or inside one of its objects."""
    while True:
        path = random.choice(list(BODIES))
        names, parents = NAMES[path], list[str]()
        while names.nested and random.random() < 0.3:
            parent = random.choice(sorted(names.nested))
            names, parents = names.nested[parent], [*parents, parent]
        word = random.choice(sorted(names.read))
        invented = "".join(random.choices(LETTERS, k=random.randint(1, 24)))
        name = misspell(random, word) if random.random() < 0.6 else invented
        is_foreign = any(name in fields for fields in FOREIGN_FIELDS.values())
        is_misspelt = len(name) >= 5 and not is_foreign and any(is_near(name, word) for word in names.read)
        if name and name not in names.read and (is_misspelt or not PASSED_ON.intersection(parents)):
            break
    return Unknown(path, add_name(BODIES[path], parents, name), ".".join([*parents, name]), is_misspelt)


def add_name(body: Mapping[str, Any], parents: Sequence[str], name: str) -> dict[str, Any]:
    """A copy of the body with this name inside these parents, from the outermost to the innermost."""
    if not parents:
        return {**body, name: 1}
    first, *rest = parents
    if first in ("messages", "input"):
        return {**body, first: [add_name(MESSAGES[0], rest, name)]}
    if first == "tools":
        return {**body, first: [add_name({"type": "function", "name": "f"} if "input" in body else {}, rest, name)]}
    value = {"type": "function", "function": {"name": "f"}} if first == "tool_choice" else {}
    return {**body, first: add_name(value, rest, name)}


def is_swallowed(sent: Unknown, answer: Answer) -> bool:
    """Whether the answer names the parameter neither in its error message nor in its header of ignored ones."""
    if answer.refusal:
        return sent.name not in answer.refusal
    return sent.name not in answer.headers.get("x-quire-ignored", "").split(", ")


def sdk_fields(folder: Path) -> Mapping[str, Sequence[str]]:
    """All fields that the official SDKs can send to each path."""
    command = [python_command(folder)[0], "-c", SDK_FIELDS]
    process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    fields: Mapping[str, Sequence[str]] = json.loads(process.stdout)
    return fields


def known_names(folder: Path) -> Iterator[tuple[str, str]]:
    """(path, name) for every field that an SDK or another project's server knows, and every path it may be sent to."""
    for path, names in sdk_fields(folder).items():
        yield from ((path, name) for name in names)
    for path in BODIES:
        # `messages` is not a foreign field of `explain`: it makes the request one about a conversation, without prompt.
        own = {"messages"} if path == EXPLAIN else set()
        yield from ((path, name) for fields in FOREIGN_FIELDS.values() for name in sorted(fields - own))


@section("unknown parameters")
def parameters(proof: Proof) -> None:
    """Send misspelt and invented names in all dialects, then every name that an SDK or `FOREIGN_FIELDS` has."""
    keys = proof.folder / "keys.json"
    secret, kinds = add_key(keys, "alice"), Counter[str]()
    with oracle(proof.folder, keys=keys) as server:
        client = Client(server.port, secret)
        num_swallowed = num_let_in = 0
        for _ in range(proof.sized(quick=600, full=3000)):
            sent = random_unknown(proof.random)
            answer = client.send("POST", sent.path, {"model": "oracle", **sent.body})
            kinds["refused" if answer.status == 400 else "named"] += 1
            if is_swallowed(sent, answer):
                num_swallowed += 1
                say(f"  swallowed: {sent}: {answer.status} {answer.data[:200]!r}")
            num_let_in += sent.is_misspelt and not answer.refusal
        probes = sorted({*known_names(proof.folder)})
        probes = proof.random.sample(probes, proof.sized(quick=min(600, len(probes)), full=len(probes)))
        refused = [(path, name) for path, name in probes if is_refused(client, path, name)]
    for path, name in refused[:20]:
        say(f"  refused: {name} at {path}")
    proof.equals("parameters_swallowed", num_swallowed, 0, "neither named nor refused")
    proof.equals("parameters_let_in", num_let_in, 0, "one mistake away and not refused")
    proof.equals("parameters_refused_known", len(refused), 0, "fields of the official SDKs and of FOREIGN_FIELDS")
    proof.report("parameters_refused", kinds["refused"])
    proof.report("parameters_named", kinds["named"])
    proof.report("parameters_known", len(probes))


def is_refused(client: Client, path: str, name: str) -> bool:
    """Whether a known name is refused: with the value null at all, with an object because of its name."""
    if name in BODIES[path]:
        return False
    body = {"model": "oracle", **BODIES[path]}
    with_null, with_object = (client.send("POST", path, {**body, name: value}) for value in (None, {"x": 1}))
    return with_null.status != 200 or bool(with_object.refusal)


# -- cache groups ------------------------------------------------------------------------------------------------------

GROUPS = {"dev": "team-a", "ci": "team-a", "other": "team-b", "team-a": "", "alone": ""}
"""Keys, and the cache group of each. One key has the name of a group."""
OUTSIDE = ("other", "team-a", "alone")
BLOCK = 32
COMPLETE, EXPLAIN = "/v1/completions", "/v1/cache/explain"
CHANGING = re.compile(
    rb"(chatcmpl|cmpl|resp|msg|req)[-_][0-9a-f]{8,}|\"(created|seconds_ago)\":[0-9.]+|\"text\":\"[^\"\\]*(\\.[^\"\\]*)*\""
)
CHANGING_HEADERS = frozenset({"date", "x-request-id", "content-length"})


@contextmanager
def grouped(folder: Path) -> Iterator[tuple[Server, dict[str, Client], str]]:
    """A server, a client for each key, and the address where the server publishes KV events."""
    keys, events = folder / "keys.json", f"ipc://{folder}/events"
    secrets = {name: add_key(keys, name, cache_group=group) for name, group in GROUPS.items()}
    model = make_directory(folder / "one", tiny=TINY)
    with running(folder, "quire", "serve", str(model), *SIZES, "--kv-events", events, keys=keys) as server:
        yield server, {name: Client(server.port, secret) for name, secret in secrets.items()}, events


def prompt(random: Random, num_blocks: int = 3) -> list[int]:
    """Tokens that were never sent before."""
    return [random.randrange(10, 250) for _ in range(num_blocks * BLOCK + 1)]


def complete(client: Client, tokens: Sequence[int], **more: Any) -> Answer:
    answer = client.send("POST", COMPLETE, {"prompt": [*tokens], "max_tokens": 1, "temperature": 0, **more})
    if answer.status != 200:
        raise RuntimeError(f"expected status 200, got {answer.status}: {answer.data[:300]!r}")
    return answer


def num_cached(answer: Answer) -> int:
    return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])


@dataclass(frozen=True)
class Sent:
    """A prompt, and the id of a request with it."""

    tokens: Sequence[int]
    request_id: str


def call(kind: int, client: Client, about: Sent, salt: str | None, end: Sequence[int]) -> tuple[Any, ...]:
    """Make a call that may reveal a prompt, with `end` as its last tokens; returns the answer without ids and dates."""
    more = {} if salt is None else {"cache_salt": salt}
    tokens = [*about.tokens[: len(about.tokens) - len(end)], *end]
    match kind:
        case 0 | 1 | 2:
            answer = client.send("POST", EXPLAIN, {"prompt": tokens, **more})
        case 3:
            # With a new salt, because a prompt that the caller itself has cached may begin in the same way by chance.
            answer = complete(client, tokens, cache_explain=True, cache_salt=f"of {about.request_id}")
        case 4:
            answer = client.send("GET", f"/v1/requests/{about.request_id}/cache")
        case 5:
            answer = client.send("GET", f"/v1/admin/blocks/{about.tokens[0]}")
        case 6:
            answer = client.send("GET", "/v1/admin/watch")
        case _:
            answer = client.send("GET", "/v1/cache/warnings")
    headers = sorted((name, value) for name, value in answer.headers.items() if name not in CHANGING_HEADERS)
    return answer.status, headers, CHANGING.sub(b"", answer.data.replace(about.request_id.encode(), b""))


def num_distinguished(random: Random, clients: Mapping[str, Client], callers: Sequence[str], count: int) -> int:
    """The number of calls that answer differently for a prompt that `dev` has sent and for one that was never sent."""
    num_different = 0
    for _ in range(count):
        sent_tokens, unsent_tokens = prompt(random), prompt(random)
        sent = Sent(sent_tokens, complete(clients["dev"], sent_tokens).headers["x-request-id"])
        unsent = Sent(unsent_tokens, f"req-{random.getrandbits(128):032x}")
        kind, client = random.randrange(8), clients[random.choice(callers)]
        salt = random.choice((None, None, "group:team-a", "team-a", "/salt:", "*"))
        end = prompt(random)[: random.choice((0, 1, BLOCK, 2 * BLOCK + 5))]
        answers = [call(kind, client, about, salt, end) for about in (sent, unsent)]
        if answers[0] != answers[1]:
            num_different += 1
    return num_different


def stored_blocks(events: "zmq.Socket[bytes]") -> Iterator[tuple[str, int]]:
    """The cache group and the hash of every block in KV events, until none come for two seconds."""
    while events.poll(2000):
        batch = msgspec.msgpack.decode(events.recv_multipart()[-1])
        for event in batch[1]:
            if event["type"] == "BlockStored":
                yield from ((event["cache_salt"], block_hash) for block_hash in event["block_hashes"])


def num_events_shared(clients: Mapping[str, Client], random: Random, address: str, count: int) -> tuple[int, int]:
    """How often two groups' blocks of a prompt had equal hashes or unequal numbers in KV events; and the count."""
    context = zmq.Context()
    with context, context.socket(zmq.SUB) as events:
        events.setsockopt(zmq.RCVHWM, 0)
        events.subscribe(b"")
        events.connect(address)
        events.poll(500)
        num_wrong = 0
        for _ in range(count):
            tokens, outsider = prompt(random), random.choice(OUTSIDE)
            complete(clients["dev"], tokens)
            complete(clients[outsider], tokens)
            blocks = [*_blocks_of_two_prompts(events)]
            groups = Counter(group for group, _ in blocks)
            own_group = f"group:{GROUPS[outsider]}" if GROUPS[outsider] else f"tenant:{outsider}"
            num_wrong += groups[own_group] != groups["group:team-a"]
            num_wrong += len({block_hash for _, block_hash in blocks}) != len(blocks)
        return num_wrong, count


def _blocks_of_two_prompts(events: "zmq.Socket[bytes]") -> Iterator[tuple[str, int]]:
    """The next six blocks: two prompts have three each."""
    blocks = stored_blocks(events)
    for _, block in zip(range(6), blocks, strict=False):
        yield block


@section("cache groups")
def groups(proof: Proof) -> None:
    """A second key of a group shares the first one's prefixes; for keys outside, a prompt was never sent."""
    count = proof.sized(quick=200, full=1000)
    with grouped(proof.folder) as (_server, clients, address):
        random, num_equal, num_hits = proof.random, 0, 0
        num_leaks = num_distinguished(random, clients, OUTSIDE, count)
        num_noticed = num_distinguished(random, clients, ("ci",), 80)
        for _ in range(count // 5):
            tokens = prompt(random, random.randint(1, 6))
            first, again, second = (num_cached(complete(clients[name], tokens)) for name in ("dev", "dev", "ci"))
            num_equal += (first, again) == (0, second) and second == len(tokens) - 1
            num_hits += sum(num_cached(complete(clients[name], tokens)) for name in OUTSIDE)
        num_events, num_tried = num_events_shared(clients, random, address, 20)
    proof.holds("group_hits", num_equal == count // 5, "a second key of a group hits as the first one does")
    proof.equals("group_leaks", num_hits + num_leaks + num_events, 0, "hits of keys outside, and revealing answers")
    proof.report("group_calls", 2 * count + 2 * num_tried + 3 * (count // 5))
    proof.at_least("group_leaks_noticed", num_noticed, 1, "of 80 calls of a key of the group: the check can fail")
