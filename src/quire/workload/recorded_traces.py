"""Read traces written by `quire serve --trace` as workloads: each request's tenant, arrival, prompt and output length.

Only lines that record submitted requests and their ends are needed, plus plans and results for answers that were still
running when the trace ended. A request that a second worker resumed counts once. If a request has several answers, each
becomes a request of its own, because each is computed.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

RecordedFields = dict[str, Any]
HEADER_FIELD = "quire_trace"


@dataclass(slots=True)
class _RecordedRequest:
    """One request, and the number of output tokens of each of its answers."""

    line: int
    fields: RecordedFields
    num_tokens: dict[int, int] = field(default_factory=dict)
    ended_answers: set[int] = field(default_factory=set)

    def active_answer(self, index: int) -> int | None:
        """Return the answer that a sequence computes: its own, or, if that has ended, the first that has not ended."""
        unfinished = (answer for answer in sorted(self.num_tokens) if answer not in self.ended_answers)
        return next(unfinished, None) if index in self.ended_answers else index


class _Session:
    """State of one worker: its sequences, and the sequences of its last plan."""

    def __init__(self) -> None:
        self.next_sequence = 1
        self.sequences: dict[int, tuple[_RecordedRequest, int]] = {}
        self.planned_sequences: list[int] = []


class RecordedLoad:
    """Collects requests from a trace, line by line."""

    def __init__(self) -> None:
        self.requests: list[_RecordedRequest] = []
        self._by_name: dict[str, _RecordedRequest] = {}
        self._session = _Session()
        self._last_request: tuple[str, int] | None = None
        """The request of the previous line and its number of sequences; a `refused` line may follow."""
        self._damaged_line: int | None = None

    def take(self, number: int, line: str) -> None:
        """Process one line. Raises ValueError, KeyError or TypeError if it is not a line of a trace."""
        try:
            record = json.loads(line)
        except ValueError:
            record = None  # a killed worker leaves a partial line; only the header of the next worker may follow
        if self._damaged_line is not None and (record is None or record["is"] != "header"):
            raise ValueError(f"line {self._damaged_line} is damaged")
        self._damaged_line = number if record is None else None
        if record is not None:
            self._take_record(number, record)

    def _take_record(self, number: int, record: Mapping[str, Any]) -> None:
        last_request, self._last_request = self._last_request, None
        match record["is"]:
            case "header":
                self._session = _Session()
            case "submit" | "restore" as kind:
                self._add_request(number, record, is_new=kind == "submit")
            case "refused" if last_request is not None:
                self._remove_request(*last_request)
            case "plan":
                self._session.planned_sequences = [int(row[0]) for row in record["rows"]]
            case "result":
                self._count_tokens(record["outcomes"])
            case "events":
                self._end_answers(record["events"])

    def _add_request(self, number: int, record: Mapping[str, Any], *, is_new: bool) -> None:
        name, session = str(record["request_id"]), self._session
        request = self._by_name.get(name)
        if request is None or is_new:
            fields = {
                "arrival_s": record["arrival_s"],
                "token_ids": record["prompt"],
                "tenant": record["tenant"],
                "class": record["priority"],
            }
            request = self._by_name[name] = _RecordedRequest(number, fields)
            self.requests.append(request)
        for continuation in record["continuations"]:
            request.num_tokens[int(continuation["index"])] = len(continuation["produced"])
            session.sequences[session.next_sequence] = request, int(continuation["index"])
            session.next_sequence += 1
        self._last_request = name, len(record["continuations"])

    def _remove_request(self, name: str, num_sequences: int) -> None:
        self._session.next_sequence -= num_sequences
        request = self._by_name.pop(name)
        if request is self.requests[-1]:
            self.requests.pop()

    def _count_tokens(self, outcomes: Iterable[Any]) -> None:
        for sequence, outcome in zip(self._session.planned_sequences, outcomes, strict=False):
            if sequence not in self._session.sequences or outcome is None:
                continue
            request, answer = self._session.sequences[sequence]
            tokens = outcome if isinstance(outcome, list) else [*outcome.get("tokens", ()), *outcome.get("forced", ())]
            if (active := request.active_answer(answer)) is not None:
                request.num_tokens[active] = request.num_tokens.get(active, 0) + len(tokens)

    def _end_answers(self, events: Iterable[list[Any]]) -> None:
        for kind, name, *rest in events:
            request = self._by_name.get(name)
            if request is not None and kind == "answer_ended":
                request.num_tokens[int(rest[0])] = int(rest[2])
                request.ended_answers.add(int(rest[0]))
            elif request is not None and kind == "finished":
                del self._by_name[name]


def recorded_requests(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, RecordedFields]]:
    """Yield the requests of a trace with their line numbers, as fields of quire's own trace format."""
    load = RecordedLoad()
    for number, line in lines:
        if line.strip():
            load.take(number, line)
    for request in load.requests:
        for num_tokens in request.num_tokens.values():
            yield request.line, {**request.fields, "output_tokens": num_tokens}
