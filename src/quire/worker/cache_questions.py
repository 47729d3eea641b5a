"""Who waits for an answer about the worker's cache. Bounded by the client, which asks."""

from quire.engine.port import OnExplained
from quire.errors import EngineDeadError, MessageError


class CacheQuestions:
    """Questions by number, from asking to the answer or the worker's end."""

    def __init__(self) -> None:
        self._asked: dict[int, OnExplained] = {}
        self._num_asked = 0

    def __len__(self) -> int:
        return len(self._asked)

    def add(self, told: OnExplained) -> int:
        """The number under which this question is sent."""
        self._num_asked += 1
        self._asked[self._num_asked] = told
        return self._num_asked

    def take(self, explain_id: int) -> OnExplained:
        """Who asked this question; it is answered now."""
        told = self._asked.pop(explain_id, None)
        if told is None:
            raise MessageError(f"the worker answers question {explain_id} about its cache, which nobody asked")
        return told

    def drop(self) -> None:
        """Not asked again of the next worker: its cache is another one, and what ended this one may be the question."""
        asked, self._asked = self._asked, {}
        for told in asked.values():
            told(EngineDeadError("the worker ended while it was asked about its cache; ask again"))
