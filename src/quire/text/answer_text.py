"""One continuation's text as the client gets it: detokenised, and cut at a stop string."""

from collections.abc import Sequence

from quire.text.detokenizer import Detokenizer
from quire.text.stop_strings import Delta, StopStrings
from quire.text.tokenizer import Tokenizer


class AnswerText:
    """Push each sampled token, send the delta; end the continuation when a delta has a stop.

    The token that completes a stop string was generated and counts; text it carries beyond the stop is dropped.
    """

    __slots__ = ("_detokenizer", "_include_stop", "_stops")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, skip_special_tokens)
        self._stops = StopStrings(stops) if stops else None
        self._include_stop = include_stop

    def push(self, token_id: int) -> Delta:
        """What this token adds to what may be sent."""
        text = self._detokenizer.push(token_id)
        return Delta(text) if self._stops is None else self._shown(self._stops.push(text))

    def finish(self) -> Delta:
        """The answer ended by itself: all that was held back. Even this may complete a stop string."""
        text = self._detokenizer.finish()
        if self._stops is None:
            return Delta(text)
        delta = self._shown(self._stops.push(text))
        return delta if delta.stop else Delta(delta.text + self._stops.flush())

    def _shown(self, delta: Delta) -> Delta:
        if delta.stop and self._include_stop:
            return Delta(delta.text + delta.stop, delta.stop)
        return delta
