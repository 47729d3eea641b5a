"""A model that members on many machines run, with the interface of a model in this process.

The gateway has the tokenizer and the ledgers (records of what each client has received); members run the model.

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
from quire.fleet.kv_events.relay import with_member_host
from quire.fleet.kv_events.subscriber import EventEndpoints, KVEventSubscriber
from quire.fleet.openai.address import check_openai_request, is_openai, parse_openai_address
from quire.fleet.openai.link import OpenAIMemberLink
from quire.fleet.openai.model_card import ModelClaim
from quire.fleet.openai.tokenizer_source import OpenAIMemberRules, tokenizer_of
from quire.fleet.protocol.keys import GatewayKeys, check_keys
from quire.fleet.protocol.link import LinkListener, LinkToMember
from quire.fleet.protocol.messages import MemberCard, RequestTextAssets, TextAssets, ToGateway, Welcome
from quire.fleet.protocol.work import MemberWork
from quire.fleet.routing.membership import SUSPECT_AFTER_S, MemberState
from quire.text.chat.rendering.template import ChatTemplate
from quire.text.grammars.checker import GrammarChecker
from quire.text.sandboxed.messages import LoadVocabulary

log = logging.getLogger("quire.fleet")

POLL_S = 1.0
"""Interval between two reads of the member list."""
TEXT_ASSETS_S = 10.0
"""Time limit for a member's text assets (tokenizer, chat template); then the gateway requests them again."""
DEFAULT_OPENAI_RULES = OpenAIMemberRules()


class FleetModel(EngineClient):
    """A model run by members that join and leave, for any number of tasks on one event loop."""

    def __init__(
        self,
        name: str,
        source: MemberSource,
        keys: GatewayKeys | None,
        max_held: int = 1024,
        suspect_after_s: float = SUSPECT_AFTER_S,
        openai_rules: OpenAIMemberRules = DEFAULT_OPENAI_RULES,
    ) -> None:
        super().__init__()
        self._name = name
        self.source = source
        self._keys = keys
        self._openai_rules = openai_rules
        self._context = zmq.asyncio.Context()
        self.work = MemberWork()
        self._gateway = token_hex(4)
        self.fleet = FleetPort(self._on_events, max_held, salt=self._gateway, suspect_after_s=suspect_after_s)
        self.links: dict[str, MemberLink | OpenAIMemberLink] = {}
        self._unlisted: set[str] = set()
        """Addresses in `links` that the member source no longer lists."""
        self.subscribers: dict[str, KVEventSubscriber] = {}
        """KV-event subscriptions by member address, for connected members that publish KV events."""
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "FleetModel":
        self._loop = asyncio.get_running_loop()
        try:
            await self._update_links(await self._first_addresses())
            self._tasks = [
                asyncio.create_task(self._poll_source(), name="quire-members"),
                asyncio.create_task(self._tick(), name="quire-fleet"),
            ]
            text_assets = await self._fetch_text_assets()
            if self.fleet.info is None:
                raise EngineDeadError("expected a model card before a member is ready, got none; retry")
            self._text = await asyncio.to_thread(text_of, self._name, self.fleet.info, text_assets)
        except BaseException:
            await self._close()
            raise
        self._port = self.fleet
        return self

    async def _first_addresses(self) -> Sequence[str]:
        """Like `source.addresses`, but empty on ConfigError: DNS may not resolve yet when the gateway starts."""
        try:
            return await self.source.addresses()
        except ConfigError as error:
            log.warning("no members yet: %s", error)
            return ()

    async def _fetch_text_assets(self) -> TextAssets:
        """Return the operator's text assets once a member is ready; without them, request those of a quire member,
        repeatedly, because a member may leave before it responds."""
        text_assets: asyncio.Future[TextAssets] = asyncio.get_running_loop().create_future()
        self.fleet.text_assets = text_assets
        change_event = asyncio.Event()
        self.fleet.on_change = change_event.set
        text_assets.add_done_callback(lambda _done: change_event.set())
        tokenizer_source = self._openai_rules.tokenizer_source
        while not text_assets.done():
            change_event.clear()
            ready_links = [self.fleet.members[address].link for address in self.fleet.router.membership.ready_members]
            quire_link = next((link for link in ready_links if not link.is_openai), None)
            if ready_links and tokenizer_source is not None:
                return tokenizer_source.text_assets
            if quire_link is not None:
                quire_link.send(RequestTextAssets())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(change_event.wait(), TEXT_ASSETS_S)
        return text_assets.result()

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
        self.fleet.abandon("the gateway is closed")  # before the links close: no request may move
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(link.close() for link in self.subscribers.values()))
        await asyncio.gather(*(link.close() for link in self.links.values()))
        self._context.destroy(linger=0)

    @property
    def is_ready(self) -> bool:
        return self._port is not None and self.fleet.num_ready > 0

    def stats(self) -> EngineStats:
        """Return sums over all members, from their latest reports."""
        members = list(self.fleet.members.values())
        num_blocks = sum(member.card.info.num_blocks for member in members)
        return EngineStats(
            num_blocks=num_blocks,
            block_size=self.text.info.block_size,
            kv_usage=sum(member.load.num_used_blocks for member in members) / num_blocks if num_blocks else 0.0,
            num_preemptions=sum(member.load.num_preemptions for member in members),
            num_steps=sum(member.load.num_steps for member in members),
            num_computed_tokens=sum(member.load.num_computed_tokens for member in members),
            num_restarts=self.fleet.counts.num_moved,
            num_draft_tokens=sum(member.load.num_draft_tokens for member in members),
            num_accepted_tokens=sum(member.load.num_accepted_tokens for member in members),
            num_forced_tokens=sum(member.load.num_forced_tokens for member in members),
            num_pins_yielded=sum(member.load.num_pins_yielded for member in members),
            work=sum((member.load.work for member in members), self.work.budget.spent()),
        )

    @property
    def num_gateways(self) -> int:
        """Gateways of this fleet: the largest number that a member reported, at least 1."""
        return max((1, *(member.num_gateways for member in self.fleet.members.values())))

    def fleet_stats(self) -> FleetStats:
        fleet, counts = self.fleet, self.fleet.counts
        membership, in_flight = fleet.router.membership, fleet.router.loads.in_flight_tokens
        members = tuple(
            FleetMemberStats(
                address,
                membership.state_of(address).value,
                membership.num_open(address),
                in_flight.get(address, 0),
                member.card.info.num_blocks,
                member.load.num_used_blocks / member.card.info.num_blocks if member.card.info.num_blocks else 0.0,
                member.card.info.exactness,
            )
            for address, member in fleet.members.items()
        )
        move_counts = counts.num_moved, counts.num_moved_inexact, counts.num_quarantined
        return FleetStats(members, *move_counts, fleet.num_held, self.num_gateways)

    async def drain(self, timeout_s: float) -> bool:
        """Reject new requests and wait until open requests have ended; return false on timeout."""
        self.fleet.is_draining = True
        deadline_s = monotonic() + timeout_s
        while self.fleet.num_open and monotonic() < deadline_s:
            await asyncio.sleep(0.05)
        return not self.fleet.num_open

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.fleet.tick(monotonic())

    async def _poll_source(self) -> None:
        """Poll the source: connect to listed members; drain and then disconnect members that are no longer listed."""
        problem = ""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self._update_links(await self.source.addresses())
                problem = ""
            except ConfigError as error:
                if str(error) != problem:
                    problem = str(error)
                    log.warning("keeping the current members: %s", problem)

    def _check(self, addresses: Sequence[str]) -> None:
        """Raise ConfigError if these members need keys or a tokenizer that the gateway does not have."""
        for address in addresses:
            if is_openai(address):
                check_openai_request(parse_openai_address(address), allows_clear=self._openai_rules.allows_clear)
            else:
                check_keys(address, has_keys=self._keys is not None)
        has_tokenizer = self._openai_rules.tokenizer_source is not None or self._text is not None
        if addresses and all(map(is_openai, addresses)) and not has_tokenizer:
            message = f"expected a quire member or --tokenizer, got {len(addresses)} OpenAI members, which have none"
            hint = "pass --tokenizer MODEL, a directory or a .gguf file of the model that they serve"
            raise ConfigError(f"{message}; {hint}", code="tokenizer_missing")

    async def _update_links(self, addresses: Sequence[str]) -> None:
        self._check(addresses)
        membership = self.fleet.router.membership
        for address in addresses:
            if address not in self.links:
                link = self.links[address] = self._link(address)
                link.start()
            elif address in self._unlisted and membership.state_of(address) is MemberState.GONE:
                self._unlisted.remove(address)
                self.links[address].end("the member source lists it again: reconnecting")
        for address in [address for address in self.links if address not in addresses]:
            self._unlisted.add(address)
            self.fleet.drain(address)
            if not membership.num_open(address):
                self._unlisted.remove(address)
                await self.links.pop(address).close()

    def _link(self, address: str) -> MemberLink | OpenAIMemberLink:
        listener = LinkListener(self._on_message, self._on_lost)
        if is_openai(address):
            return OpenAIMemberLink(parse_openai_address(address), self._claim, listener, self.work)
        return MemberLink(self._context, address, self._keys, self._gateway, listener)

    def _claim(self) -> ModelClaim | None:
        """Return the model that OpenAI members must run; None until the model is known."""
        tokenizer_source = self._openai_rules.tokenizer_source
        info = self.fleet.info or (None if tokenizer_source is None else tokenizer_source.info)
        source = tokenizer_source or self._text
        tokenizer = None if source is None else source.tokenizer
        if info is None or tokenizer is None:
            return None
        return ModelClaim(info, lambda text: tokenizer.encode(text, add_special_tokens=False))

    def _on_message(self, link: LinkToMember, message: ToGateway) -> None:
        self.fleet.receive(link, message)
        if isinstance(message, Welcome) and message.card.events:
            self._subscribe(link, message.card)

    def _on_lost(self, link: LinkToMember, reason: str) -> None:
        """Handle a lost link. Stop its KV-event subscription: events of one session are not valid for the next."""
        subscriber = self.subscribers.pop(link.address, None)
        if subscriber is not None:
            subscriber.stop()
        self.fleet.handle_loss(link, reason)

    def _subscribe(self, link: LinkToMember, card: MemberCard) -> None:
        """Subscribe to a member's KV events. Without them the router only knows where earlier requests ran: responses
        are slower, never wrong. OpenAI members have no keys or snapshots; `_check` allowed their unencrypted events."""
        member, info = link.address, self.fleet.info or card.info
        events, replay = with_member_host(card.events, member), with_member_host(card.replay, member)
        try:
            for address in filter(None, () if link.is_openai else (events, replay)):
                check_keys(address, has_keys=self._keys is not None)
        except ConfigError as error:
            log.warning("not subscribing to KV events of %s: %s", member, error)
            return
        has_snapshots = bool(card.replay) and not link.is_openai
        reader = EventReader(
            self.fleet.router.index,
            member,
            info.identity.fingerprint,
            card.info.block_size,
            card.info.num_blocks if card.has_size else None,
            has_snapshots=has_snapshots,
        )
        endpoints = EventEndpoints(events, replay, None if link.is_openai else self._keys)
        subscriber = KVEventSubscriber(self._context, endpoints, reader, self.work, self.links[member].distrust)
        self.subscribers[member] = subscriber
        subscriber.start()


def text_of(name: str, info: ModelInfo, assets: TextAssets) -> TextModel:
    """Build the text model from assets that a member sent. Blocks while it loads the tokenizer: call it in a thread."""
    tokenizer = tokenizer_of(assets)
    named_ids = {tokenizer.library.token_to_id(text) for text in assets.eos_texts}
    eos_ids = frozenset(assets.eos_token_ids) | {token for token in named_ids if token is not None}
    tokenizer_json = assets.tokenizer_json.decode()
    return TextModel(
        name=name,
        info=info,
        tokenizer=tokenizer.limited(MAX_BYTES_PER_TOKEN * info.max_sequence_tokens, info.max_sequence_tokens),
        template=None if assets.chat_template is None else ChatTemplate(assets.chat_template, assets.special_tokens),
        eos_token_ids=eos_ids,
        defaults=assets.generation_defaults,
        grammars=GrammarChecker(lambda: LoadVocabulary(tokenizer_json, info.vocabulary_size, _grammar_eos_ids(assets))),
        writes_tools=assets.writes_tools,
    )


def _grammar_eos_ids(assets: TextAssets) -> tuple[int, ...]:
    added_ids = {token["content"]: token["id"] for token in json.loads(assets.tokenizer_json).get("added_tokens") or ()}
    named_ids = {added_ids[text] for text in assets.eos_texts if text in added_ids}
    return tuple(sorted(named_ids | set(assets.eos_token_ids)))
