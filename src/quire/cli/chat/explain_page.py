"""Why a prompt missed, as text: the cached tokens, the reason, and the two texts under each other.

Differences are marked with brackets and a line of their own; on a terminal also with colour.
"""

from collections.abc import Callable
from typing import Any

MARGIN = "  prompt  "
CUT = "…"
LEAST_WIDTH = 40
Style = Callable[[str, str], str]
"""A text in a colour."""


def uncoloured(text: str, _colour: str) -> str:
    """The style without colours."""
    return text


def explanation_page(response: dict[str, Any], width: int, style: Style = uncoloured) -> str:
    """The explanation of one prompt."""
    num_lost, place = response["lost_tokens"], part_words(response["part"])
    could = f"; {num_lost} more could have been" if num_lost and response["reason"] != "first_seen" else ""
    lines = [
        f"{response['cached_tokens']} of {response['prompt_tokens']} tokens are cached{could}",
        f"{response['reason']}: {response['explanation']}{place and f', {place}'}",
    ]
    if (found := response["difference"]) is not None:
        lines += _difference(found, width, style) if "token" in found else ["the texts belong to another tenant"]
    return "\n".join(lines)


def request_page(response: dict[str, Any], width: int, style: Style = uncoloured) -> str:
    """The explanation of a request that ran, with all its prompts."""
    prompts = response["prompts"]
    pages = [explanation_page(one, width, style) for one in prompts]
    if len(pages) > 1:
        pages = [f"prompt {at} of {len(pages)}: {page}" for at, page in enumerate(pages, 1)]
    request_id, model = _shown(response["request_id"]), _shown(response["model"])
    head = f"request {request_id}, {model}, {round(response['seconds_ago'])} s ago"
    return "\n\n".join([head, *pages])


def part_words(part: dict[str, Any] | None) -> str:
    """The part of the prompt that differs; empty if unknown."""
    if part is None:
        return ""
    named = f" ({_shown(part['name'])})" if part["name"] else ""
    match part["kind"]:
        case "system":
            return "in the system text"
        case "text":
            return "in the text of the chat template" if part["name"] else "in the prompt"
        case kind:
            return f"in {kind} {part['index']}{named}"


def _difference(found: dict[str, Any], width: int, style: Style) -> list[str]:
    """Both texts aligned, with the difference in brackets and a mark under it."""
    room = max(LEAST_WIDTH, width) - len(MARGIN)
    before = _end_of(_shown(found["before"]), room // 2)
    ours = _line(found["token"], found["after"], room - _width(before))
    theirs = _line(found["cached_token"], found["cached_after"], room - _width(before))
    mark = "^" * max(_width(ours[0]), _width(theirs[0]))
    both = (found["token"], found["token_id"], found["cached_token"], found["cached_token_id"])
    return [
        "",
        f"{MARGIN}{before}{style(ours[0], 'green')}{ours[1]}",
        f"  cached  {before}{style(theirs[0], 'red')}{theirs[1]}",
        f"{' ' * (len(MARGIN) + _width(before))}{style(mark, 'yellow')}",
        "prompt: {!r} ({}), cached: {!r} ({})".format(*both),
    ]


def _line(token: str, text: str, room: int) -> tuple[str, str]:
    """The token in brackets, and what follows it as far as there is room."""
    marked = f"[{_shown(token)}]"
    return marked, _start_of(_shown(text.removeprefix(token)), max(0, room - _width(marked)))


def _start_of(text: str, room: int) -> str:
    if _width(text) <= room:
        return text
    if room < 1:
        return ""
    kept = ""
    for char in text:
        if _width(kept + char) > room - 1:
            break
        kept += char
    return kept + CUT


def _end_of(text: str, room: int) -> str:
    return text if _width(text) <= room else _start_of(text[::-1], room)[::-1]


def _width(text: str) -> int:
    """Width in terminal columns."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _shown(text: str) -> str:
    """The text on one line, with control characters escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
