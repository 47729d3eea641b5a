"""One assignment of an OpenAI member: its streams' chunks as the events that a gateway handles. Pure.

    streams of the answers ──chunks──► this ──► Queued Admitted FirstToken Token … SequenceFinished … Finished

Such a server reports cached prompt tokens only at the end, so the last event has them and the first token none.
"""

from quire.core.events import Admitted, Finished, FirstToken, Queued, RequestEvent, SequenceFinished, Token
from quire.core.request import FinishReason
from quire.engine.commands import Restore, Submit
from quire.fleet.openai.stream import OpenAIChunk


class OpenAIAssignment:
    """From its assignment to its last event. Later data is discarded."""

    def __init__(self, command: Submit | Restore, num_uncached_tokens: int) -> None:
        self.command = command
        self._num_uncached = min(max(num_uncached_tokens, 0), len(command.prompt))
        self._num_tokens = {one.index: len(one.produced) for one in command.continuations}
        self._untaken = set(self._num_tokens)
        """Answers that the server has not accepted yet."""
        self._unended = set(self._num_tokens)
        self._streaming = set(self._num_tokens)
        """Answers of which something may still come, if only usage."""
        self._cached_tokens: list[int] = []
        """By the streams' usage."""
        self._has_begun = False

    @property
    def num_uncomputed_tokens(self) -> int:
        """Prompt tokens that are still to be computed, as far as is known here."""
        return self._num_uncached if self._streaming and not self._has_begun else 0

    @property
    def is_taken(self) -> bool:
        """The server has accepted all answers."""
        return not self._untaken

    @property
    def is_over(self) -> bool:
        return not self._streaming

    def is_open(self, index: int) -> bool:
        """Whether this answer has not ended."""
        return index in self._unended

    def accepted(self, index: int) -> list[RequestEvent]:
        """The server has accepted this answer. Returns events once it has accepted all of them."""
        if self.is_taken or self.is_over:
            return []
        self._untaken.discard(index)
        if self._untaken:
            return []
        name, epoch = self.command.request_id, self.command.epoch
        # An OpenAI server does not report when it begins. If it dies of this request, that must be known.
        return [
            Queued(name, epoch=epoch),
            Admitted(name, age_s=0.0, wait_s=max(0.0, self.command.age_s), num_cached_tokens=0, epoch=epoch),
        ]

    def take_chunk(self, index: int, chunk: OpenAIChunk) -> list[RequestEvent]:
        """The events of one chunk of this answer's stream."""
        if index not in self._streaming:
            return []
        name, epoch, events = self.command.request_id, self.command.epoch, list[RequestEvent]()
        if chunk.token_ids and not self._has_begun:
            self._has_begun = True
            events.append(FirstToken(name, num_cached_tokens=0, epoch=epoch))
        logprobs = chunk.logprobs or (None,) * len(chunk.token_ids)
        for token_id, entry in zip(chunk.token_ids, logprobs, strict=True):
            self._num_tokens[index] += 1
            events.append(Token(name, index, token_id, self._num_tokens[index], entry, epoch=epoch))
        if chunk.num_cached_tokens is not None:
            self._cached_tokens.append(min(chunk.num_cached_tokens, len(self.command.prompt)))
        if chunk.reason is not None:
            events.append(self._end(index, chunk.reason))
        return events

    def over(self, index: int) -> list[RequestEvent]:
        """The stream of this answer, which has ended, is closed."""
        if index not in self._streaming:
            return []
        self._streaming.remove(index)
        return [] if self._streaming else [self._finished()]

    def cancelled(self, index: int) -> list[RequestEvent]:
        """This answer was cancelled: its stream is closed."""
        if index not in self._streaming:
            return []
        events: list[RequestEvent] = [self._end(index, FinishReason.CANCELLED)] if self.is_open(index) else []
        return [*self.accepted(index), *events, *self.over(index)]

    def ended(self, reason: FinishReason, error: str | None = None) -> list[RequestEvent]:
        """All answers that have not ended end with this reason, and with them the request."""
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
        """Answers may hit what the first of them left; only what that one hit was not computed."""
        num_cached = min(self._cached_tokens, default=0)
        num_output = sum(self._num_tokens.values())
        return Finished(
            self.command.request_id, len(self.command.prompt), num_cached, num_output, epoch=self.command.epoch
        )
