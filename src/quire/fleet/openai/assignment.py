"""One assignment of an OpenAI member: converts chunks of its streams into gateway events. Pure logic, no I/O.

    streams, one per answer ──chunks──► this ──► Queued Admitted FirstToken Token … SequenceFinished … Finished

OpenAI servers report cached prompt tokens at the end, so `Finished` has the number, and `FirstToken` has 0.
"""

from collections.abc import Sequence

from quire.core.events import Admitted, Finished, FirstToken, Queued, RequestEvent, SequenceFinished, Token
from quire.core.request import FinishReason
from quire.core.step import TokenLogprobs
from quire.engine.commands import Restore, Submit
from quire.fleet.openai.stream import OpenAIChunk


class OpenAIAssignment:
    """The state of an assignment until its last event. Later data is discarded."""

    def __init__(self, command: Submit | Restore, num_uncached_tokens: int) -> None:
        self.command = command
        self._num_uncached = min(max(num_uncached_tokens, 0), len(command.prompt))
        self._num_tokens = {one.index: len(one.produced) for one in command.continuations}
        self._untaken = set(self._num_tokens)
        """Indexes of answers that the server has not accepted yet."""
        self._unended = set(self._num_tokens)
        self._streaming = set(self._num_tokens)
        """Indexes of answers whose stream is open; after the last token, usage may still arrive."""
        self._cached_tokens: list[int] = []
        """Cached prompt tokens from the usage of each stream."""
        self._has_begun = False

    @property
    def num_uncomputed_tokens(self) -> int:
        """Prompt tokens still to be computed: the gateway's estimate until the first token, then 0."""
        return self._num_uncached if self._streaming and not self._has_begun else 0

    @property
    def is_taken(self) -> bool:
        """Whether the server has accepted all answers."""
        return not self._untaken

    @property
    def is_over(self) -> bool:
        return not self._streaming

    def is_open(self, index: int) -> bool:
        """Whether this answer has not ended."""
        return index in self._unended

    def accepted(self, index: int) -> list[RequestEvent]:
        """Record that the server accepted this answer. Returns events once all answers are accepted."""
        if self.is_taken or self.is_over:
            return []
        self._untaken.discard(index)
        if self._untaken:
            return []
        name, epoch = self.command.request_id, self.command.epoch
        # OpenAI servers do not report admission. Assume it now, so that a crash counts against this request.
        return [
            Queued(name, epoch=epoch),
            Admitted(name, age_s=0.0, wait_s=max(0.0, self.command.age_s), num_cached_tokens=0, epoch=epoch),
        ]

    def take_chunk(self, index: int, chunk: OpenAIChunk) -> list[RequestEvent]:
        """Convert one chunk of this answer's stream into events."""
        if index not in self._streaming:
            return []
        name, epoch, events = self.command.request_id, self.command.epoch, list[RequestEvent]()
        if chunk.token_ids and not self._has_begun:
            self._has_begun = True
            events.append(FirstToken(name, num_cached_tokens=0, epoch=epoch))
        logprobs: Sequence[TokenLogprobs | None] = chunk.logprobs or (None,) * len(chunk.token_ids)
        for token_id, entry in zip(chunk.token_ids, logprobs, strict=True):
            self._num_tokens[index] += 1
            events.append(Token(name, index, token_id, self._num_tokens[index], entry, epoch=epoch))
        if chunk.num_cached_tokens is not None:
            self._cached_tokens.append(min(chunk.num_cached_tokens, len(self.command.prompt)))
        if chunk.reason is not None:
            events.append(self._end(index, chunk.reason))
        return events

    def over(self, index: int) -> list[RequestEvent]:
        """Record that the stream of this answer, which has ended, is closed. Returns Finished after the last stream."""
        if index not in self._streaming:
            return []
        self._streaming.remove(index)
        return [] if self._streaming else [self._finished()]

    def cancelled(self, index: int) -> list[RequestEvent]:
        """End this answer as cancelled; its stream is closed."""
        if index not in self._streaming:
            return []
        events: list[RequestEvent] = [self._end(index, FinishReason.CANCELLED)] if self.is_open(index) else []
        return [*self.accepted(index), *events, *self.over(index)]

    def ended(self, reason: FinishReason, error: str | None = None) -> list[RequestEvent]:
        """End the request, and all its open answers with this reason."""
        if self.is_over:
            return []
        events: list[RequestEvent] = [self._end(index, reason, error) for index in sorted(self._unended)]
        self._streaming.clear()
        return [*events, self._finished()]

    def _end(self, index: int, reason: FinishReason, error: str | None = None) -> SequenceFinished:
        self._unended.remove(index)
        name, epoch = self.command.request_id, self.command.epoch
        return SequenceFinished(name, index, reason, self._num_tokens[index], error, epoch=epoch)

    def _finished(self) -> Finished:
        """The smallest cached number counts, because later answers may hit blocks that the first one computed."""
        num_cached = min(self._cached_tokens, default=0)
        num_output = sum(self._num_tokens.values())
        return Finished(
            self.command.request_id, len(self.command.prompt), num_cached, num_output, epoch=self.command.epoch
        )
