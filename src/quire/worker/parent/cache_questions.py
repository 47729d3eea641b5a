"""Open queries about the worker's cache. Bounded by the client that sends them."""

from collections.abc import Sequence

from quire.core.events import Explained, Refused, RequestEvent
from quire.errors import EngineDeadError, MessageError


class CacheQuestions:
    """Queries by their ids, until the response or the worker's end."""

    def __init__(self) -> None:
        self.open: dict[str, None] = {}

    def add(self, question_id: str) -> None:
        """This one is sent."""
        self.open[question_id] = None

    def take(self, events: Sequence[RequestEvent], responses: list[RequestEvent]) -> Sequence[RequestEvent]:
        """Move responses from these events to `responses`; returns the rest. Raises MessageError for an unknown id."""
        answers = [event for event in events if isinstance(event, Explained)]
        if not answers:
            return events
        for answer in answers:
            if answer.request_id not in self.open:
                raise MessageError(f"the worker answered query {answer.request_id[:64]!r}, which is not pending")
            del self.open[answer.request_id]
        responses += answers
        return [event for event in events if not isinstance(event, Explained)]

    def drop(self) -> list[RequestEvent]:
        """Not repeated to the next worker: its cache is another one, and the query may have crashed this one."""
        dropped, self.open = self.open, {}
        error = EngineDeadError("the worker exited during a cache query; retry")
        return [Refused.of(question_id, error) for question_id in dropped]
