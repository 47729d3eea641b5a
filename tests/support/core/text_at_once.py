"""What deltas of text are compared with."""

from collections.abc import Sequence

from quire.text.tokenizer import Tokenizer


def text_at_once(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], token_ids: Sequence[int], skip_special_tokens: bool = True
) -> str:
    """The text of an answer, computed from all tokens together. Slow, obvious: what deltas are compared with."""
    before = tokenizer.decode(prompt_ids, skip_special_tokens)
    both = tokenizer.decode([*prompt_ids, *token_ids], skip_special_tokens)
    differing = (index for index, (old, new) in enumerate(zip(before, both, strict=False)) if old != new)
    return both[next(differing, len(before)) :]
