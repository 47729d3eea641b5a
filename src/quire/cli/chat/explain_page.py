"""Text output of `quire explain`: the number of cached tokens, the reason for the cache miss, and both texts aligned.
The difference is marked with brackets and with `^` on a separate line; on a terminal also with colour.
"""

from collections.abc import Callable
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from quire.cli.shared.columns import plain

MARGIN = "  prompt  "
LEAST_WIDTH = 40
Style = Callable[[str, str], str]
"""A function that colours a text: (text, colour) -> coloured text."""


def explanation_page(response: dict[str, Any], width: int, style: Style) -> str:
    """Format the explanation of one prompt."""
    num_lost, place = response["lost_tokens"], part_words(response["part"])
    could = f"; {num_lost} more could have been" if num_lost and response["reason"] != "first_seen" else ""
    lines = [
        f"{response['cached_tokens']} of {response['prompt_tokens']} tokens are cached{could}",
        f"{response['reason']}: {response['explanation']}{place and f', {place}'}",
    ]
    if (found := response["difference"]) is not None:
        lines += _difference(found, width, style) if "token" in found else ["the texts belong to another tenant"]
    return "\n".join(lines)


def request_page(response: dict[str, Any], width: int, style: Style) -> str:
    """Format the explanations of all prompts of a request that ran."""
    prompts = response["prompts"]
    pages = [explanation_page(one, width, style) for one in prompts]
    if len(pages) > 1:
        pages = [f"prompt {at} of {len(pages)}: {page}" for at, page in enumerate(pages, 1)]
    request_id, model = plain(response["request_id"]), plain(response["model"])
    head = f"request {request_id}, {model}, {round(response['seconds_ago'])} s ago"
    return "\n\n".join([head, *pages])


def part_words(part: dict[str, Any] | None) -> str:
    """Describe the part of the prompt that differs; empty if unknown."""
    if part is None:
        return ""
    named = f" ({plain(part['name'])})" if part["name"] else ""
    match part["kind"]:
        case "system":
            return "in the system text"
        case "text":
            return "in the text of the chat template" if part["name"] else "in the prompt"
        case kind:
            return f"in {kind} {part['index']}{named}"


def _difference(found: dict[str, Any], width: int, style: Style) -> list[str]:
    """Format both texts aligned, with the differing token in brackets and marked on the next line."""
    room = max(LEAST_WIDTH, width) - len(MARGIN)
    before = _end_of(plain(found["before"]), room // 2)
    ours = _line(found["token"], found["after"], room - cell_len(before))
    theirs = _line(found["cached_token"], found["cached_after"], room - cell_len(before))
    mark = "^" * max(cell_len(ours[0]), cell_len(theirs[0]))
    both = (found["token"], found["token_id"], found["cached_token"], found["cached_token_id"])
    return [
        "",
        f"{MARGIN}{before}{style(ours[0], 'green')}{ours[1]}",
        f"  cached  {before}{style(theirs[0], 'red')}{theirs[1]}",
        f"{' ' * (len(MARGIN) + cell_len(before))}{style(mark, 'yellow')}",
        "prompt: {!r} ({}), cached: {!r} ({})".format(*both),
    ]


def _line(token: str, text: str, room: int) -> tuple[str, str]:
    """Return the token in brackets, and as much of the following text as fits into `room` columns."""
    marked = f"[{plain(token)}]"
    return marked, _start_of(plain(text.removeprefix(token)), max(0, room - cell_len(marked)))


def _start_of(text: str, room: int) -> str:
    if room < 1:
        return ""
    shown = Text(text)
    shown.truncate(room, overflow="ellipsis")
    return shown.plain


def _end_of(text: str, room: int) -> str:
    return _start_of(text[::-1], room)[::-1]
