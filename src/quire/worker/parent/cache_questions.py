"""Questions about the worker's cache that have no answer yet. Bounded by the client, which asks."""

from collections.abc import Sequence

from quire.core.events import Explained, Refused, RequestEvent
from quire.errors import EngineDeadError, MessageError


class CacheQuestions:
    """Questions by their ids, from asking to the answer or the worker's end."""

    def __init__(self) -> None:
        self.open: dict[str, None] = {}

    def add(self, question_id: str) -> None:
        """This one is sent."""
        self.open[question_id] = None

    def take(self, events: Sequence[RequestEvent], told: list[RequestEvent]) -> Sequence[RequestEvent]:
        """Add answers among these events to `told`; the rest of them. Raises MessageError for one nobody asked for."""
        answers = [event for event in events if isinstance(event, Explained)]
        if not answers:
            return events
        for answer in answers:
            if answer.request_id not in self.open:
                raise MessageError(f"the worker answers question {answer.request_id[:64]!r}, which nobody asked")
            del self.open[answer.request_id]
        told += answers
        return [event for event in events if not isinstance(event, Explained)]

    def drop(self) -> list[RequestEvent]:
        """Not asked again of the next worker: its cache is another one, and what ended this one may be the question."""
        dropped, self.open = self.open, {}
        error = EngineDeadError("the worker ended while it was asked about its cache; ask again")
        return [Refused.of(question_id, error) for question_id in dropped]
