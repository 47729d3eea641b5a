"""One assignment of an OpenAI member: converts chunks of its streams into gateway events. Pure logic, no I/O.

    streams, one per answer ──chunks──► this ──► Queued Admitted FirstToken Token … SequenceFinished … Finished

An *answer* is a continuation of the request. `FirstToken` reports 0 cached tokens, as servers report them at the end.
"""

from collections.abc import Sequence

from quire.core.events import Admitted, Finished, FirstToken, Queued, RequestEvent, SequenceFinished, Token
from quire.core.request import FinishReason
from quire.core.step import TokenLogprobs
from quire.engine.commands import Restore, Submit
from quire.fleet.openai.stream import OpenAIChunk


class OpenAIAssignment:
    """The state of an assignment until its last event; later data of the streams is discarded."""

    def __init__(self, command: Submit | Restore, num_uncached_tokens: int) -> None:
        self.command = command
        self._num_uncached = min(max(num_uncached_tokens, 0), len(command.prompt))
        self._num_tokens = {continuation.index: len(continuation.produced) for continuation in command.continuations}
        self._unaccepted_indexes = set(self._num_tokens)
        """Answers that the server has not accepted yet; `_open_indexes`: those that have not ended."""
        self._open_indexes = set(self._num_tokens)
        self._streaming_indexes = set(self._num_tokens)
        """Answers whose stream is open; after the last token, usage may still arrive."""
        self._cached_tokens: list[int] = []
        """Cached prompt tokens from the usage of each stream."""
        self._has_begun = False

    @property
    def num_uncomputed_tokens(self) -> int:
        """Prompt tokens still to be computed: the gateway's estimate until the first token, then 0."""
        return self._num_uncached if self._streaming_indexes and not self._has_begun else 0

    @property
    def is_accepted(self) -> bool:
        """Whether the server has accepted all answers."""
        return not self._unaccepted_indexes

    @property
    def is_over(self) -> bool:
        return not self._streaming_indexes

    def is_open(self, index: int) -> bool:
        """Whether this answer has not ended."""
        return index in self._open_indexes

    def accept(self, index: int) -> list[RequestEvent]:
        """Record that the server accepted this answer. Returns events once all answers are accepted."""
        if self.is_accepted or self.is_over:
            return []
        self._unaccepted_indexes.discard(index)
        if self._unaccepted_indexes:
            return []
        request_id, epoch = self.command.request_id, self.command.epoch
        # OpenAI servers do not report admission. Assume it now, so that a crash counts against this request.
        return [
            Queued(request_id, epoch=epoch),
            Admitted(request_id, age_s=0.0, wait_s=max(0.0, self.command.age_s), num_cached_tokens=0, epoch=epoch),
        ]

    def take_chunk(self, index: int, chunk: OpenAIChunk) -> list[RequestEvent]:
        """Convert one chunk of this answer's stream into events."""
        if index not in self._streaming_indexes:
            return []
        request_id, epoch, events = self.command.request_id, self.command.epoch, list[RequestEvent]()
        if chunk.token_ids and not self._has_begun:
            self._has_begun = True
            events.append(FirstToken(request_id, num_cached_tokens=0, epoch=epoch))
        logprobs: Sequence[TokenLogprobs | None] = chunk.logprobs or (None,) * len(chunk.token_ids)
        for token_id, entry in zip(chunk.token_ids, logprobs, strict=True):
            self._num_tokens[index] += 1
            events.append(Token(request_id, index, token_id, self._num_tokens[index], entry, epoch=epoch))
        if chunk.num_cached_tokens is not None:
            self._cached_tokens.append(min(chunk.num_cached_tokens, len(self.command.prompt)))
        if chunk.reason is not None:
            events.append(self._end(index, chunk.reason))
        return events

    def close_stream(self, index: int) -> list[RequestEvent]:
        """Record that the stream of an ended answer is closed. Returns Finished after the last stream."""
        if index not in self._streaming_indexes:
            return []
        self._streaming_indexes.remove(index)
        return [] if self._streaming_indexes else [self._finished()]

    def cancel(self, index: int) -> list[RequestEvent]:
        """End this answer as cancelled; the caller closes its stream."""
        if index not in self._streaming_indexes:
            return []
        events: list[RequestEvent] = [self._end(index, FinishReason.CANCELLED)] if self.is_open(index) else []
        return [*self.accept(index), *events, *self.close_stream(index)]

    def end(self, reason: FinishReason, error: str | None = None) -> list[RequestEvent]:
        """End the request, and all its open answers with this reason."""
        if self.is_over:
            return []
        events: list[RequestEvent] = [self._end(index, reason, error) for index in sorted(self._open_indexes)]
        self._streaming_indexes.clear()
        return [*events, self._finished()]

    def _end(self, index: int, reason: FinishReason, error: str | None = None) -> SequenceFinished:
        self._open_indexes.remove(index)
        request_id, epoch = self.command.request_id, self.command.epoch
        return SequenceFinished(request_id, index, reason, self._num_tokens[index], error, epoch=epoch)

    def _finished(self) -> Finished:
        """Report the smallest number of cached tokens, because an answer may hit blocks that another one computed."""
        num_cached = min(self._cached_tokens, default=0)
        num_output = sum(self._num_tokens.values())
        return Finished(
            self.command.request_id, len(self.command.prompt), num_cached, num_output, epoch=self.command.epoch
        )
