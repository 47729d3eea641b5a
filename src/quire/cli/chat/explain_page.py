"""Text output of `quire explain`: the number of cached tokens, the reason for the cache miss, and both texts aligned.
The difference is marked with brackets and with `^` on a separate line; on a terminal also with colour.
"""

from collections.abc import Callable
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from quire.cli.shared.columns import plain

MARGIN = "  prompt  "
MIN_WIDTH = 40
Style = Callable[[str, str], str]
"""A function that colours a text: (text, colour) -> coloured text."""


def explanation_page(response: dict[str, Any], width: int, style: Style) -> str:
    """Format the explanation of one prompt."""
    num_lost, location = response["lost_tokens"], part_words(response["part"])
    lost = f"; {num_lost} more could have been" if num_lost and response["reason"] != "first_seen" else ""
    lines = [
        f"{response['cached_tokens']} of {response['prompt_tokens']} tokens are cached{lost}",
        f"{response['reason']}: {response['explanation']}{location and f', {location}'}",
    ]
    if (fields := response["difference"]) is not None:
        lines += _difference(fields, width, style) if "token" in fields else ["the texts belong to another tenant"]
    return "\n".join(lines)


def request_page(response: dict[str, Any], width: int, style: Style) -> str:
    """Format the explanations of all prompts of a request that ran."""
    prompts = response["prompts"]
    pages = [explanation_page(prompt, width, style) for prompt in prompts]
    if len(pages) > 1:
        pages = [f"prompt {number} of {len(pages)}: {page}" for number, page in enumerate(pages, 1)]
    request_id, model = plain(response["request_id"]), plain(response["model"])
    head = f"request {request_id}, {model}, {round(response['seconds_ago'])} s ago"
    return "\n\n".join([head, *pages])


def part_words(part: dict[str, Any] | None) -> str:
    """Describe the part of the prompt that differs; empty if unknown."""
    if part is None:
        return ""
    name = f" ({plain(part['name'])})" if part["name"] else ""
    match part["kind"]:
        case "system":
            return "in the system text"
        case "text":
            return "in the text of the chat template" if part["name"] else "in the prompt"
        case kind:
            return f"in {kind} {part['index']}{name}"


def _difference(fields: dict[str, Any], width: int, style: Style) -> list[str]:
    """Format both texts aligned, with the differing token in brackets and marked on the next line."""
    text_width = max(MIN_WIDTH, width) - len(MARGIN)
    before = _end_of(plain(fields["before"]), text_width // 2)
    prompt = _line(fields["token"], fields["after"], text_width - cell_len(before))
    cached = _line(fields["cached_token"], fields["cached_after"], text_width - cell_len(before))
    mark = "^" * max(cell_len(prompt[0]), cell_len(cached[0]))
    tokens = (fields["token"], fields["token_id"], fields["cached_token"], fields["cached_token_id"])
    return [
        "",
        f"{MARGIN}{before}{style(prompt[0], 'green')}{prompt[1]}",
        f"  cached  {before}{style(cached[0], 'red')}{cached[1]}",
        f"{' ' * (len(MARGIN) + cell_len(before))}{style(mark, 'yellow')}",
        "prompt: {!r} ({}), cached: {!r} ({})".format(*tokens),
    ]


def _line(token: str, text: str, width: int) -> tuple[str, str]:
    """Return the token in brackets, and as much of the following text as fits into `width` columns."""
    marked = f"[{plain(token)}]"
    return marked, _start_of(plain(text.removeprefix(token)), max(0, width - cell_len(marked)))


def _start_of(text: str, width: int) -> str:
    if width < 1:
        return ""
    line = Text(text)
    line.truncate(width, overflow="ellipsis")
    return line.plain


def _end_of(text: str, width: int) -> str:
    return _start_of(text[::-1], width)[::-1]
