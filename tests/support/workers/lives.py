"""Workers that die in this process: the real engine on the oracle behind the real ledger, killed wherever it hurts.

No processes and no sockets, so that thousands of lives go by in a second. What crosses between the two is bytes, as in
the real thing, and a crash loses those on their way. The worker's clock may be any number of seconds ahead of ours, and
what dead workers said may come again.
"""

from collections import deque
from collections.abc import Callable, Sequence
from random import Random

from quire.backends.oracle import OracleRunner, answer_alone
from quire.backends.protocol import Capacity
from quire.core.events import (
    Admitted,
    Finished,
    FirstToken,
    Queued,
    RequestEvent,
    SequenceFinished,
    Token,
)
from quire.core.request import FinishReason, Request
from quire.core.scheduling.scheduler_config import SchedulerConfig
from quire.core.step import NO_MASKS, Masks, StepPlan, StepResult
from quire.engine.commands import Cancel, Restore, Submit
from quire.engine.engine import Engine, ModelIdentity
from quire.errors import MessageError
from quire.worker.messages import Stepped, decode_to_parent, decode_to_worker, encode_message
from quire.worker.parent.ledger import Ledger

VOCABULARY = 5
IDENTITY = ModelIdentity("oracle", "slots")
CONFIG = SchedulerConfig(max_step_tokens=32, max_running=8, max_sequence_tokens=64)


class Crash(BaseException):
    """The process is gone in the middle of a step."""


class DyingRunner(OracleRunner):
    """Dies when it is asked to."""

    def __init__(self, dies: Callable[[StepPlan], bool]) -> None:
        super().__init__(Capacity(64, 4, 64, CONFIG.max_step_tokens, VOCABULARY, 32))
        self._dies = dies

    def run(self, plan: StepPlan, masks: Masks = NO_MASKS) -> StepResult:
        if self._dies(plan):
            raise Crash
        return super().run(plan, masks)


class Lives:
    """A ledger, the worker of the moment, and what each client was told."""

    def __init__(
        self,
        random: Random,
        dies: Callable[[StepPlan], bool] = lambda _plan: False,
        *,
        rate: float = 0.0,
        lies: float = 0.0,
        late: float = 0.0,
        ahead_s: float = 0.0,
    ) -> None:
        self.ledger = Ledger(VOCABULARY)
        self.told: dict[str, list[RequestEvent]] = {}
        self.plans: list[StepPlan] = []
        self.ahead_s = ahead_s
        self.num_lies = self.num_late = 0
        self.num_lives = 1
        self.now_s = 0.0
        self._random = random
        self._dies = dies
        self._rate = rate
        self._lies = lies
        self._late = late
        self.said: list[RequestEvent] = []
        """By the worker of the moment, whether or not it arrived."""
        self.said_before: list[RequestEvent] = []
        self._spawn()

    def submit(self, request: Request) -> None:
        self.told[request.request_id] = []
        self.ledger.add(request)

    def cancel(self, request_id: str) -> None:
        commands, events = self.ledger.cancel(request_id)
        self._send(commands)
        self._tell(events)

    def drop(self, request_id: str, index: int) -> None:
        """One answer is no longer wanted."""
        commands, events = self.ledger.cancel_answer(request_id, index)
        self._send(commands)
        self._tell(events)

    def step(self) -> None:
        """Some commands arrive, one step runs, some of what it brought arrives."""
        self.now_s += 1.0
        self._send(self.ledger.due_commands(self.now_s))
        for _ in range(self._random.randint(0, len(self._inbox))):
            self._obey(self._inbox.popleft())
        flying: list[str] = []
        try:
            self._say(self._engine.step(lambda: self.now_s + self.ahead_s, flying.extend))
        except Crash:
            self.crash(flying)
            return
        self._hear_again()
        for _ in range(self._random.randint(0, len(self._outbox))):
            try:
                self._hear(self._outbox.popleft())
            except MessageError:
                self.crash([*self.ledger.assigned_ids()])
                return

    def _send(self, commands: Sequence[Submit | Restore | Cancel]) -> None:
        self._inbox.extend(map(encode_message, commands))

    def _say(self, events: Sequence[RequestEvent]) -> None:
        if events:
            self.said += events
            self._outbox.append(encode_message(Stepped(tuple(self._spoilt([*events])))))

    def _hear_again(self) -> None:
        """What dead workers said, or were about to say, comes again: late, in any order, any number of times."""
        if self.said_before and self._random.random() < self._late:
            events = self._random.choices(self.said_before, k=self._random.randint(1, 20))
            before, told = repr(self.ledger.entries), list[RequestEvent]()
            self.ledger.take(events, told)
            assert (repr(self.ledger.entries), told) == (before, []), "it changes nothing"
            self.num_late += len(events)

    def _spoilt(self, events: list[RequestEvent]) -> list[RequestEvent]:
        """Sometimes a worker says, in the middle of what is true, something that cannot be."""
        if self._is_trial or self._random.random() >= self._lies:
            return events
        self.num_lies += 1
        at = self._random.randint(0, len(events))
        name, epoch = self._random.choice(
            [("stranger", 0), ("stranger", events[0].epoch), (events[0].request_id, 9999)]
        )
        return [*events[:at], Token(name, 0, 1, 1, None, epoch=epoch), *events[at:]]

    def _hear(self, data: bytes) -> None:
        message, told = decode_to_parent(data), list[RequestEvent]()
        assert isinstance(message, Stepped)
        try:
            self.ledger.take(message.events, told)
        finally:
            self._tell(told)

    def crash(self, flying: list[str]) -> None:
        """Whatever was on its way is lost."""
        self._tell(self.ledger.record_crash(flying))
        self.num_lives += 1
        self._spawn()

    def run(self, between: Callable[[], None] = lambda: None, max_steps: int = 5_000) -> None:
        while self.ledger.entries:
            self.step()
            between()
            max_steps -= 1
            assert max_steps, f"{sorted(self.ledger.entries)} come to no end"

    @property
    def is_speaking(self) -> bool:
        """Something the worker said has not arrived."""
        return bool(self._outbox)

    def _dies_now(self, plan: StepPlan) -> bool:
        self.plans.append(plan)
        return self._dies(plan) or (not self._is_trial and self._random.random() < self._rate)

    @property
    def _is_trial(self) -> bool:
        """Whoever is in flight alone when the worker dies is ended for it, so nobody is killed by chance just then."""
        return any(one.is_suspect for one in self.ledger.entries.values())

    def _spawn(self) -> None:
        self._engine = Engine(DyingRunner(self._dies_now), CONFIG, IDENTITY, bytes(32))
        self._inbox: deque[bytes] = deque()
        self._outbox: deque[bytes] = deque()
        self.said_before += self.said
        self.said = []

    def _obey(self, data: bytes) -> None:
        match decode_to_worker(data):
            case Submit() as command:
                self._say([self._engine.submit(command.to_request(self.now_s + self.ahead_s))])
            case Restore() as command:
                self._say([self._engine.restore(command.to_request(self.now_s + self.ahead_s))])
            case Cancel(request_id, index):
                self._engine.cancel(request_id, index)

    def _tell(self, events: list[RequestEvent]) -> None:
        for event in events:
            self.told[event.request_id].append(event)


def check_told(request: Request, told: list[RequestEvent], *, whole: bool = True) -> None:
    """What a client was told is what it gets alone, from the first event to the last, with nothing twice."""
    assert isinstance(told[-1], Finished)
    assert sum(isinstance(event, Finished) for event in told) == 1
    assert [type(event) for event in told].count(Queued) <= 1
    if any(isinstance(event, Token) for event in told):
        kinds = [type(event) for event in told]
        firsts = [kinds.index(kind) for kind in (Queued, Admitted, FirstToken, Token)]
        assert firsts == sorted(firsts)
        assert kinds.count(FirstToken) == 1
    num_output = 0
    for one in request.continuations:
        tokens = [event.token_id for event in told if isinstance(event, Token) and event.sequence_index == one.index]
        alone = answer_alone(request.prompt, request.params, request.seed, VOCABULARY, one.index)
        ends = [event for event in told if isinstance(event, SequenceFinished) and event.sequence_index == one.index]
        assert [end.num_output_tokens for end in ends] == [len(tokens)]
        is_whole = whole or ends[0].reason in (FinishReason.STOP, FinishReason.LENGTH)
        assert tokens == (alone if is_whole else alone[: len(tokens)])
        logprobs = [event.logprobs for event in told if isinstance(event, Token) and event.sequence_index == one.index]
        assert [one is None for one in logprobs] == [request.params.logprobs is None] * len(tokens)
        num_output += len(tokens)
    assert told[-1].num_output_tokens == num_output
    assert told[-1].num_prompt_tokens == len(request.prompt)
