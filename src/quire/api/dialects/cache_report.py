"""Report how much of each prompt was found in the prefix cache: in the reuse log, the metrics and a response header.

The result is known when prefill ends, just before the first token. If the request ends earlier, the report contains
what is known by then.
"""

from collections.abc import Sequence
from functools import partial
from time import monotonic

from quire.api.access.admission import Admission
from quire.api.dialects.resolved_request import ResolvedRequest
from quire.api.dialects.response_writer import ResponseWriter
from quire.api.http.request_record import RequestRecord
from quire.api.prefix.warnings import removed_headers, warning_headers
from quire.client.prefix.explanation import UNKNOWN, Explanation, decoded_text
from quire.client.prefix.prefix_guard import NewPrompt
from quire.client.prefix.reuse_log import PromptPart, PromptParts, ReuseRecord, lost_tokens
from quire.client.reply.reply import Reply
from quire.client.request.text_model import Tokenizer

HEADER = b"x-quire-cache"


class CacheReport:
    """The cache report of one request."""

    def __init__(
        self,
        admission: Admission,
        record: RequestRecord,
        request: ResolvedRequest,
        writer: ResponseWriter,
        tokenizer: Tokenizer,
    ) -> None:
        self._log = admission.reuse_log
        self._metrics = admission.metrics
        self._guard = admission.prefix_guard
        self._record = record
        self._request = request
        self._answer_id = writer.answer_id
        self._tokenizer = tokenizer
        self.is_waiting = True
        """Whether some prompts are not recorded yet."""

    def update(self, *, is_last: bool = False) -> None:
        """Record the prompts whose result is known; if `is_last`, all prompts that left the queue."""
        if not self.is_waiting:
            return
        for index, handle in enumerate(self._record.handles):
            reply = handle.reply
            is_known = reply.is_prefilled or (is_last and reply.is_admitted)
            if reply.reuse is None and is_known:
                reply.reuse = self._record_of(reply, index)
                self._log.add(reply.reuse)
                reply.comparison = self._guard.examine(self._seen_prompt(reply, reply.reuse))
                reason = reply.reuse.explanation.reason
                self._metrics.observe_reuse(self._record.model, reason, reply.reuse.num_lost_tokens)
        self.is_waiting = any(handle.reply.reuse is None for handle in self._record.handles)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The response headers; the cache header only if the result is known for all prompts."""
        self.update()
        handles = self._record.handles
        records = [handle.reply.reuse for handle in handles if handle.reply.reuse is not None]
        removed = removed_headers(self._request.removed)
        if not records or len(records) < len(handles):
            return removed
        warnings = self._guard.warnings_of_request(self._record.request_id, monotonic())
        return [(HEADER, _header_value(records).encode()), *warning_headers(warnings), *removed]

    def close(self) -> None:
        """End the report: record the remaining prompts, and pass the answers to the prefix guard for later prompts."""
        self.update(is_last=True)
        for handle in self._record.handles:
            if (reuse := handle.reply.reuse) is not None:
                pieces = handle.reply.pieces
                self._guard.complete(reuse, [token for piece in pieces if not piece.index for token in piece.token_ids])

    def _seen_prompt(self, reply: Reply, reuse: ReuseRecord) -> NewPrompt:
        parts = self._request.parts[reuse.prompt_index] if self._request.parts else None
        return NewPrompt(
            reuse,
            reply.request.prompt,
            partial(decoded_text, self._tokenizer),
            parts,
            self._request.effort,
            self._request.compared_id,
            reply.request.namespace.block_size,
        )

    def _record_of(self, reply: Reply, index: int) -> ReuseRecord:
        request = reply.request
        explanation = reply.explanation or Explanation(len(request.prompt), reply.num_cached_tokens, UNKNOWN)
        is_known = reply.explanation is not None
        num_lost = lost_tokens(len(request.prompt), reply.num_cached_tokens, request.namespace.block_size)
        return ReuseRecord(
            request_id=self._record.request_id,
            tenant=request.tenant,
            cache_group=request.namespace.cache_group,
            model=self._record.model,
            at_s=monotonic(),
            explanation=explanation,
            part=part_at(self._request.parts, index, explanation.position),
            num_lost_tokens=num_lost if is_known else 0,
            num_cached_tokens=reply.num_cached_tokens,
            prompt_index=index,
            answer_id=self._answer_id,
        )


def part_at(parts: Sequence[PromptParts], prompt_index: int, position: int | None) -> PromptPart | None:
    """Return the part of a prompt (message, tool …) that contains a position. A raw prompt has one part, its text."""
    if position is None:
        return None
    return parts[prompt_index].at(position) if parts else PromptPart("text", prompt_index)


def _header_value(records: Sequence[ReuseRecord]) -> str:
    """Return the header's value: full details for one prompt, sums for several."""
    num_cached = sum(record.num_cached_tokens for record in records)
    num_prompt = sum(record.explanation.num_prompt_tokens for record in records)
    if len(records) > 1:
        return f"cached={num_cached}; prompt={num_prompt}; prompts={len(records)}"
    explanation = records[0].explanation
    position = "" if explanation.position is None else f"; position={explanation.position}"
    cached = "" if explanation.reason == UNKNOWN else f"cached={num_cached}; "
    return f"{cached}prompt={num_prompt}; reason={explanation.reason}{position}"
