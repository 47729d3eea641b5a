"""One continuation's text as the client gets it where there are stop strings: detokenised, and cut at the first."""

from collections.abc import Sequence

from quire.text.detokenizer import Detokenizer
from quire.text.stop_strings import Delta, StopStrings
from quire.text.tokenizer import Tokenizer


class AnswerText(Detokenizer):
    """Push each sampled token, send what comes back; end the continuation when there is a stop.

    The token that completes a stop string was generated and counts; text it carries beyond the stop is dropped.
    """

    __slots__ = ("_include_stop", "_stops", "stop")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stops: Sequence[str],
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        shown_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(tokenizer, prompt_ids, skip_special_tokens, shown_token_ids)
        self._stops = StopStrings(stops)
        self._include_stop = include_stop
        self.stop = None

    def push(self, token_id: int) -> str:
        return self._shown(self._stops.push(super().push(token_id)))

    def finish(self) -> str:
        """The answer ended by itself: all that was held back. Even this may complete a stop string."""
        text = self._shown(self._stops.push(super().finish()))
        return text + self._stops.flush()

    def _shown(self, delta: Delta) -> str:
        if delta.stop is None:
            return delta.text
        self.stop = delta.stop
        return delta.text + delta.stop if self._include_stop else delta.text
