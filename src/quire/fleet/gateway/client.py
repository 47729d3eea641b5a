"""A model that many machines compute, asked like one in this process: tokenizer and ledgers here, steps there.

async with FleetModel("name", source, keys) as model:
    async for piece in model.stream("Once upon a time"):
        print(piece.text, end="")
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import Sequence
from secrets import token_hex
from time import monotonic
from types import TracebackType

import zmq.asyncio

from quire.client.engines.client import EngineClient, EngineStats, FleetMemberStats, FleetStats
from quire.client.request.text_model import MAX_BYTES_PER_TOKEN, TextModel
from quire.engine.engine import ModelInfo
from quire.errors import ConfigError, EngineDeadError
from quire.fleet.gateway.discovery import MemberSource
from quire.fleet.gateway.member_link import MemberLink
from quire.fleet.gateway.port import TICK_S, FleetPort
from quire.fleet.kv_events.reader import EventReader
from quire.fleet.kv_events.relay import as_seen_from
from quire.fleet.kv_events.subscriber import EventLink, EventPlaces
from quire.fleet.openai.address import check_stranger, is_stranger, parse_stranger
from quire.fleet.openai.link import StrangerLink
from quire.fleet.openai.model_card import ModelClaim
from quire.fleet.openai.tokenizer_source import StrangerRules, tokenizer_of
from quire.fleet.protocol.keys import GatewayKeys, check_clear
from quire.fleet.protocol.link import LinkListener, LinkToMember
from quire.fleet.protocol.messages import AskWords, MemberCard, ModelWords, ToGateway, Welcome
from quire.fleet.protocol.work import MemberWork
from quire.fleet.routing.membership import SUSPECT_AFTER_S, MemberState
from quire.text.chat.rendering.template import ChatTemplate
from quire.text.grammars.checker import GrammarChecker
from quire.text.grammars.wire import LoadVocabulary

log = logging.getLogger("quire.fleet")

LOOK_S = 1.0
"""Between two looks at who is meant to be a member."""
WORDS_S = 10.0
"""How long a member may take to send the model's words, before another one is asked."""
NO_STRANGERS = StrangerRules()


class FleetModel(EngineClient):
    """A model that any number of tasks on one event loop may ask, on members that may come and go."""

    def __init__(
        self,
        name: str,
        source: MemberSource,
        keys: GatewayKeys | None,
        max_held: int = 1024,
        suspect_after_s: float = SUSPECT_AFTER_S,
        strangers: StrangerRules = NO_STRANGERS,
    ) -> None:
        super().__init__()
        self._name = name
        self._source = source
        self._keys = keys
        self._strangers = strangers
        self._context = zmq.asyncio.Context()
        self.work = MemberWork()
        self._gateway = token_hex(4)
        self.fleet = FleetPort(self._on_events, max_held, salt=self._gateway, suspect_after_s=suspect_after_s)
        self.links: dict[str, MemberLink | StrangerLink] = {}
        self._leaving: set[str] = set()
        """Of these, those that nobody names as members any more."""
        self.event_links: dict[str, EventLink] = {}
        """Of members that are there and tell what they hold."""
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "FleetModel":
        self._loop = asyncio.get_running_loop()
        try:
            await self._follow(await self._first_addresses())
            self._tasks = [
                asyncio.create_task(self._follow_source(), name="quire-members"),
                asyncio.create_task(self._tick(), name="quire-fleet"),
            ]
            words = await self._words()
            if self.fleet.info is None:
                raise EngineDeadError("a member was ready that had not said what it computes")
            self._text = await asyncio.to_thread(text_of, self._name, self.fleet.info, words)
        except BaseException:
            await self._close()
            raise
        self._port = self.fleet
        return self

    async def _first_addresses(self) -> Sequence[str]:
        """A name may come to resolve a moment after its gateway has started."""
        try:
            return await self._source.addresses()
        except ConfigError as error:
            log.warning("there are no members yet: %s", error)
            return ()

    async def _words(self) -> ModelWords:
        """Those that were given, once a member is ready; or of the first member that sends some: whoever is asked may
        go before it has."""
        words: asyncio.Future[ModelWords] = asyncio.get_running_loop().create_future()
        self.fleet.words = words
        changed = asyncio.Event()
        self.fleet.on_change = changed.set
        words.add_done_callback(lambda _words: changed.set())
        given = self._strangers.words
        while not words.done():
            changed.clear()
            ready = [self.fleet.members[one].link for one in self.fleet.router.membership.ready_members]
            first = next((link for link in ready if not link.is_stranger), None)
            if ready and given is not None:
                return given.words
            if first is not None:
                first.send(AskWords())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), WORDS_S)
        return words.result()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._text is not None:
            self._text.close()
        try:
            await self._close()
        finally:
            self._end_all(EngineDeadError("the model was closed while requests were running"))

    async def _close(self) -> None:
        self.fleet.abandon("the gateway is closed")  # before its links are: nothing moves from one to the next
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(link.close() for link in self.event_links.values()))
        await asyncio.gather(*(link.close() for link in self.links.values()))
        self._context.destroy(linger=0)

    @property
    def is_ready(self) -> bool:
        """Some member takes requests."""
        return self._port is not None and self.fleet.num_ready > 0

    def stats(self) -> EngineStats:
        """Of all members together, as they told last."""
        known = list(self.fleet.members.values())
        num_blocks = sum(one.card.info.num_blocks for one in known)
        return EngineStats(
            num_blocks=num_blocks,
            block_size=self.text.info.block_size,
            kv_usage=sum(one.load.num_used_blocks for one in known) / num_blocks if num_blocks else 0.0,
            num_preemptions=sum(one.load.num_preemptions for one in known),
            num_steps=sum(one.load.num_steps for one in known),
            num_computed_tokens=sum(one.load.num_computed_tokens for one in known),
            num_restarts=self.fleet.counts.num_moved,
            num_draft_tokens=sum(one.load.num_draft_tokens for one in known),
            num_accepted_tokens=sum(one.load.num_accepted_tokens for one in known),
            num_forced_tokens=sum(one.load.num_forced_tokens for one in known),
            work=sum((one.load.work for one in known), self.work.budget.spent()),
        )

    @property
    def num_gateways(self) -> int:
        """As the member knows that hears the most."""
        return max((1, *(known.num_gateways for known in self.fleet.members.values())))

    def fleet_stats(self) -> FleetStats:
        """Who is there, and what has moved."""
        fleet, counts = self.fleet, self.fleet.counts
        membership, in_flight = fleet.router.membership, fleet.router.loads.in_flight_tokens
        members = tuple(
            FleetMemberStats(
                address,
                membership.state_of(address).value,
                membership.num_open(address),
                in_flight.get(address, 0),
                known.card.info.num_blocks,
                known.load.num_used_blocks / known.card.info.num_blocks if known.card.info.num_blocks else 0.0,
                known.card.info.exactness,
            )
            for address, known in fleet.members.items()
        )
        moves = counts.num_moved, counts.num_moved_inexact, counts.num_quarantined
        return FleetStats(members, *moves, fleet.num_held, self.num_gateways)

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new and wait until what runs has ended; false if it has not in time."""
        self.fleet.is_draining = True
        until_s = monotonic() + timeout_s
        while self.fleet.num_open and monotonic() < until_s:
            await asyncio.sleep(0.05)
        return not self.fleet.num_open

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.fleet.tick(monotonic())

    async def _follow_source(self) -> None:
        """Whoever is meant to be a member is tried; whoever is not any more is drained, and then left."""
        problem = ""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._follow(await self._source.addresses())
                problem = ""
            except ConfigError as error:
                if str(error) != problem:
                    problem = str(error)
                    log.warning("members stay as they are: %s", problem)

    def _check(self, wanted: Sequence[str]) -> None:
        """Raise ConfigError for members that may not be spoken to, or could not be understood."""
        for address in wanted:
            if is_stranger(address):
                check_stranger(parse_stranger(address), allows_clear=self._strangers.allows_clear)
            else:
                check_clear(address, has_keys=self._keys is not None)
        if wanted and all(map(is_stranger, wanted)) and self._strangers.words is None and self._text is None:
            raise ConfigError(
                f"of {len(wanted)} members none is quire, and others send no tokenizer; give --tokenizer MODEL, a "
                "directory or a .gguf file of the model that they serve"
            )

    async def _follow(self, wanted: Sequence[str]) -> None:
        self._check(wanted)
        membership = self.fleet.router.membership
        for address in wanted:
            if address not in self.links:
                link = self.links[address] = self._link(address)
                link.start()
            elif address in self._leaving and membership.state_of(address) is MemberState.GONE:
                self._leaving.remove(address)
                self.links[address].end("it is a member again, and has to say so")
        for address in [one for one in self.links if one not in wanted]:
            self._leaving.add(address)
            self.fleet.drain(address)
            if not membership.num_open(address):
                self._leaving.remove(address)
                await self.links.pop(address).close()

    def _link(self, address: str) -> MemberLink | StrangerLink:
        listener = LinkListener(self._hear, self._lost)
        if is_stranger(address):
            return StrangerLink(parse_stranger(address), self._claim, listener, self.work)
        return MemberLink(self._context, address, self._keys, self._gateway, listener)

    def _claim(self) -> ModelClaim | None:
        """What strangers are believed to compute; None as long as nobody has said what that is."""
        given = self._strangers.words
        info = self.fleet.info or (None if given is None else given.info)
        tokenizer = given.tokenizer if given is not None else None if self._text is None else self._text.tokenizer
        if info is None or tokenizer is None:
            return None
        return ModelClaim(info, lambda text: tokenizer.encode(text, add_special_tokens=False))

    def _hear(self, link: LinkToMember, message: ToGateway) -> None:
        self.fleet.hear(link, message)
        if isinstance(message, Welcome) and message.card.events:
            self._follow_events(link, message.card)

    def _lost(self, link: LinkToMember, why: str) -> None:
        """What was said in one meeting is not believed in the next."""
        events = self.event_links.pop(link.address, None)
        if events is not None:
            events.stop()
        self.fleet.lost(link, why)

    def _follow_events(self, link: LinkToMember, card: MemberCard) -> None:
        """Without them a request goes where earlier ones went: worse, and never wrong. Strangers have neither keys nor
        snapshots, and whether they may be heard in clear was asked when they were listed."""
        member, info = link.address, self.fleet.info or card.info
        events, replay = as_seen_from(card.events, member), as_seen_from(card.replay, member)
        try:
            for address in filter(None, () if link.is_stranger else (events, replay)):
                check_clear(address, has_keys=self._keys is not None)
        except ConfigError as error:
            log.warning("what %s holds is not followed: %s", member, error)
            return
        has_snapshots = bool(card.replay) and not link.is_stranger
        reader = EventReader(
            self.fleet.router.index,
            member,
            info.identity.fingerprint,
            card.info.block_size,
            card.info.num_blocks if card.has_size else None,
            has_snapshots=has_snapshots,
        )
        places = EventPlaces(events, replay, None if link.is_stranger else self._keys)
        following = EventLink(self._context, places, reader, self.work, self.links[member].distrust)
        self.event_links[member] = following
        following.start()


def text_of(name: str, info: ModelInfo, words: ModelWords) -> TextModel:
    """A model's words as a member sent them. Reads a tokenizer: not for an event loop."""
    tokenizer = tokenizer_of(words)
    named = {tokenizer.library.token_to_id(text) for text in words.eos_texts}
    ends = frozenset(words.eos_token_ids) | {token for token in named if token is not None}
    tokenizer_json = words.tokenizer_json.decode()
    return TextModel(
        name=name,
        info=info,
        tokenizer=tokenizer.limited(MAX_BYTES_PER_TOKEN * info.max_sequence_tokens, info.max_sequence_tokens),
        template=None if words.chat_template is None else ChatTemplate(words.chat_template, words.special_tokens),
        eos_token_ids=ends,
        defaults=words.generation_defaults,
        grammars=GrammarChecker(lambda: LoadVocabulary(tokenizer_json, info.vocabulary_size, _grammar_ends(words))),
        writes_tools=words.writes_tools,
    )


def _grammar_ends(words: ModelWords) -> tuple[int, ...]:
    added = {one["content"]: one["id"] for one in json.loads(words.tokenizer_json).get("added_tokens") or ()}
    named = {added[text] for text in words.eos_texts if text in added}
    return tuple(sorted(named | set(words.eos_token_ids)))
