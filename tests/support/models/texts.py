"""Is what was streamed what would have been said at once? Texts of many kinds, cut everywhere, and plain oracles.

`check_texts` runs many random cases on any tokenizer: tests run a few on small ones, the proof many on a real one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from quire.text.detokenizer import AnswerText, Detokenizer
from quire.text.tokenizer import Tokenizer
from tests.support.core.text_at_once import text_at_once

WORDS: dict[str, Sequence[str]] = {
    "ascii": ["the ", "cat", " sat", "\n\n", "  ", "def f(x):\n    return x", "3.14", "{'a': [1]}", "\t", "."],
    "emoji": ["👍", "😀", " 🎉", "🇫🇷", "👍🏽", "☃", "❤️", "1️⃣", "a"],
    "joined emoji": ["👨‍👩‍👧‍👦", "🏳️‍🌈", "👩🏽‍💻", "\u200d", "🧑‍🚀 "],
    "cjk": ["日本", "語", "中文", "한국어", "、", "𠮷", "の ", "々"],
    "combining": ["e\u0301", "n\u0303\u0323", "ă̂", "Z͑ͫ̓", "ก็", "क्षि", "a"],
    "right to left": ["שלום", " עולם", "مرحبا", " \u202babc\u202c", "بِسْمِ", "\u200f", "123"],
    "rare": ["\u0000", "\ufeff", "\ufffd", "\U0010ffff", "\u2028", "ﬁ", "\r\n", "été", "▁", "<0x41>", "Ġ"],
}


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The whole text and `str.find`: the first stop to be complete, of those the longest, ends it."""
    found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    _, start, stop = min(found)
    return text[:start], stop


def held_back(text: str, stops: Sequence[str]) -> int:
    """How many of the last characters may yet become a stop string."""
    return max((size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])), default=0)


def wrong_deltas(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], token_ids: Sequence[int], num_early: int
) -> list[str]:
    """What is wrong with the deltas: joined, and after the first `num_early` tokens."""
    detokenizer = Detokenizer(tokenizer, prompt_ids)
    deltas = [detokenizer.push(token_id) for token_id in token_ids]
    joined, early = "".join(deltas) + detokenizer.finish(), "".join(deltas[:num_early])
    at_once = text_at_once(tokenizer, prompt_ids, token_ids)
    early_at_once = text_at_once(tokenizer, prompt_ids, token_ids[:num_early])
    problems = []
    if joined != at_once:
        problems.append(f"deltas {joined!r} are not the text {at_once!r}")
    # Only an unfinished character may be missing. It would show as one U+FFFD; the beginning of a surrogate as two.
    if early not in (early_at_once, early_at_once.removesuffix("\ufffd"), early_at_once.removesuffix("\ufffd\ufffd")):
        problems.append(f"after {num_early} tokens {early!r} was sent of {early_at_once!r}")
    if not at_once.startswith(early):
        problems.append(f"{early!r} was sent and is no beginning of {at_once!r}")
    return problems


def wrong_border(tokenizer: Tokenizer, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> list[str]:
    """What is wrong with an answer whose prompt and answer together are whole characters, by the library's word."""
    whole = tokenizer.library.decode([*prompt_ids, *token_ids])
    before, answer = tokenizer.decode(prompt_ids), text_at_once(tokenizer, prompt_ids, token_ids)
    if whole in (before + answer, before.removesuffix("\ufffd") + answer):
        return []
    return [f"{before!r} and {answer!r} are not the library's {whole!r}"]


def wrong_stop(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], token_ids: Sequence[int], stops: Sequence[str], include_stop: bool
) -> list[str]:
    """What is wrong with an answer that stop strings may cut."""
    answer = AnswerText(tokenizer, prompt_ids, stops, include_stop=include_stop)
    deltas = [*(answer.push(token_id) for token_id in token_ids), answer.finish()]
    sent = "".join(deltas)
    text, stop = cut_at_stop(text_at_once(tokenizer, prompt_ids, token_ids), stops)
    expected = text + stop if stop and include_stop else text
    if sent != expected or answer.stop != stop:
        return [f"stops {stops!r}: sent {sent!r}, {answer.stop!r}; the oracle says {expected!r}, {stop!r}"]
    return []


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt and an answer; whether together they are whole characters."""

    prompt_ids: list[int]
    token_ids: list[int]
    is_whole: bool


def check_texts(tokenizer: Tokenizer, count: int, seed: int) -> list[str]:
    """Descriptions of wrong cases among `count` random ones of all kinds; empty if all is well."""
    random = Random(seed)
    kinds = [*WORDS, "mixed", "any ids", "byte soup", "damaged"]
    wrong = []
    for index in range(count):
        kind = kinds[index % len(kinds)]
        case = _case(tokenizer, kind, random)
        prompt_ids, token_ids = case.prompt_ids, case.token_ids
        problems = wrong_deltas(tokenizer, prompt_ids, token_ids, random.randint(0, len(token_ids)))
        problems += wrong_border(tokenizer, prompt_ids, token_ids) if case.is_whole else []
        stops = _stops(text_at_once(tokenizer, prompt_ids, token_ids), random)
        problems += wrong_stop(tokenizer, prompt_ids, token_ids, stops, random.random() < 0.2)
        wrong += [f"seed {seed}, case {index} ({kind}), {prompt_ids} + {token_ids}: {one}" for one in problems]
    return wrong


def _case(tokenizer: Tokenizer, kind: str, random: Random) -> Case:
    make: dict[str, Callable[[Tokenizer, Random], list[int]]] = {
        "any ids": _any_ids,
        "byte soup": _byte_soup,
        "damaged": _damaged,
    }
    is_whole = kind not in make
    token_ids = _text_ids(tokenizer, kind, random) if is_whole else make[kind](tokenizer, random)
    # An answer to nothing, or a prompt that ends anywhere, most often inside a character.
    border = random.choice([0, 0, random.randint(0, len(token_ids)), random.randint(0, len(token_ids))])
    return Case(token_ids[:border], token_ids[border:], is_whole)


def _text_ids(tokenizer: Tokenizer, kind: str, random: Random) -> list[int]:
    words = WORDS[kind] if kind in WORDS else [word for words in WORDS.values() for word in words]
    text = "".join(random.choices(words, k=random.randint(0, 12)))
    return tokenizer.encode(text, add_special_tokens=random.random() < 0.5)


def _any_ids(tokenizer: Tokenizer, random: Random) -> list[int]:
    size, special = tokenizer.vocabulary_size, sorted(tokenizer.special_token_ids) or [0]
    pick: list[Callable[[], int]] = [
        lambda: random.randrange(size),
        lambda: random.choice(special),
        lambda: random.choice([size, size + 100, 2**31, 2**40, -1]),
    ]
    return [random.choices(pick, weights=[8, 1, 1])[0]() for _ in range(random.randint(0, 24))]


def _byte_soup(tokenizer: Tokenizer, random: Random) -> list[int]:
    """Tokens of emoji and rare letters in any order: mostly halves of characters."""
    ids = _text_ids(tokenizer, "emoji", random) + _text_ids(tokenizer, "cjk", random)
    random.shuffle(ids)
    return ids


def _damaged(tokenizer: Tokenizer, random: Random) -> list[int]:
    """A text that has lost some of its tokens."""
    return [token_id for token_id in _text_ids(tokenizer, "mixed", random) if random.random() < 0.8]


def _stops(text: str, random: Random) -> list[str]:
    """Pieces of the text itself, their ends changed now and then, so that most nearly match somewhere."""
    stops = []
    for _ in range(random.randint(1, 4)):
        start = random.randint(0, max(0, len(text) - 1))
        piece = text[start : start + random.randint(1, 6)] or "x"
        stops.append(piece if random.random() < 0.5 else piece + random.choice(["x", "", "\ufffd", text[:1]]))
    return stops
