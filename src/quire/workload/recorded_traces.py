"""Read traces written by `quire serve --trace` as workloads: each request's tenant, arrival, prompt and output length.

Only lines that record submitted requests and their ends are needed, plus plans and results for answers that were still
running when the trace ended. A request that a second worker continued counts once. Each of several answers to one
prompt becomes a request of its own, because that is the work it causes.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

RecordedFields = dict[str, Any]
HEADER_FIELD = "quire_trace"


@dataclass(slots=True)
class _RecordedRequest:
    """One request, and the number of tokens of each of its answers."""

    line: int
    fields: RecordedFields
    counts: dict[int, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)

    def going_on(self, index: int) -> int | None:
        """Return the answer that a sequence computes: its own, or, if that has ended, the first one that has not."""
        left = (one for one in sorted(self.counts) if one not in self.ended)
        return next(left, None) if index in self.ended else index


class _Session:
    """State that belongs to one worker: its sequences, and the last plan."""

    def __init__(self) -> None:
        self.next_sequence = 1
        self.sequences: dict[int, tuple[_RecordedRequest, int]] = {}
        self.planned: list[int] = []


class RecordedLoad:
    """Collects requests from a trace, line by line."""

    def __init__(self) -> None:
        self.requests: list[_RecordedRequest] = []
        self._by_name: dict[str, _RecordedRequest] = {}
        self._session = _Session()
        self._entered: tuple[str, int] | None = None
        """The request of the previous line and its number of sequences, because the next line may refuse it."""
        self._damaged: int | None = None

    def take(self, number: int, line: str) -> None:
        """Process one line. Raises ValueError, KeyError or TypeError if it is not a line of a trace."""
        try:
            found = json.loads(line)
        except ValueError:
            found = None  # a killed worker leaves a partial line; only the header of the next worker may follow
        if self._damaged is not None and (found is None or found["is"] != "header"):
            raise ValueError(f"line {self._damaged} is damaged")
        self._damaged = number if found is None else None
        if found is not None:
            self._take(number, found)

    def _take(self, number: int, found: Mapping[str, Any]) -> None:
        entered, self._entered = self._entered, None
        match found["is"]:
            case "header":
                self._session = _Session()
            case "submit" | "restore" as kind:
                self._enter(number, found, is_new=kind == "submit")
            case "refused" if entered is not None:
                self._forget(*entered)
            case "plan":
                self._session.planned = [int(row[0]) for row in found["rows"]]
            case "result":
                self._count(found["outcomes"])
            case "events":
                self._end(found["events"])

    def _enter(self, number: int, found: Mapping[str, Any], *, is_new: bool) -> None:
        name, session = str(found["request_id"]), self._session
        request = self._by_name.get(name)
        if request is None or is_new:
            fields = {
                "arrival_s": found["arrival_s"],
                "token_ids": found["prompt"],
                "tenant": found["tenant"],
                "class": found["priority"],
            }
            request = self._by_name[name] = _RecordedRequest(number, fields)
            self.requests.append(request)
        for one in found["continuations"]:
            request.counts[int(one["index"])] = len(one["produced"])
            session.sequences[session.next_sequence] = request, int(one["index"])
            session.next_sequence += 1
        self._entered = name, len(found["continuations"])

    def _forget(self, name: str, num_sequences: int) -> None:
        self._session.next_sequence -= num_sequences
        request = self._by_name.pop(name)
        if request is self.requests[-1]:
            self.requests.pop()

    def _count(self, outcomes: Iterable[Any]) -> None:
        for sequence, outcome in zip(self._session.planned, outcomes, strict=False):
            if sequence not in self._session.sequences or outcome is None:
                continue
            request, first = self._session.sequences[sequence]
            tokens = outcome if isinstance(outcome, list) else [*outcome.get("tokens", ()), *outcome.get("forced", ())]
            if (index := request.going_on(first)) is not None:
                request.counts[index] = request.counts.get(index, 0) + len(tokens)

    def _end(self, events: Iterable[list[Any]]) -> None:
        for kind, name, *rest in events:
            request = self._by_name.get(name)
            if request is not None and kind == "answer_ended":
                request.counts[int(rest[0])] = int(rest[2])
                request.ended.add(int(rest[0]))
            elif request is not None and kind == "finished":
                del self._by_name[name]


def recorded_requests(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, RecordedFields]]:
    """Yield the requests of a trace with their line numbers, as fields of quire's own trace format."""
    load = RecordedLoad()
    for number, line in lines:
        if line.strip():
            load.take(number, line)
    for request in load.requests:
        for count in request.counts.values():
            yield request.line, {**request.fields, "output_tokens": count}
