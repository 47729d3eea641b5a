"""How many lists and objects a JSON text has, before one is made: a parser makes all of them in one go. Pure.

It holds the interpreter's lock meanwhile, and a list costs as much as a hundred characters of a text: two bytes each, a
body has a million, and every other thread waits for half a second.
"""

import re

MAX_JSON_LISTS = 50_000
"""Lists and objects in one JSON text."""
_TEXTS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_AS_LISTS, _ALL_ELSE = bytes.maketrans(b"{}", b"[]"), bytes(set(range(256)) - set(b"[]{}"))


def brackets_of(data: bytes) -> bytes:
    """Where lists and objects begin and end, all written as lists; what stands in texts is none."""
    return _TEXTS.sub(b"", data).translate(_AS_LISTS, _ALL_ELSE)


def has_too_many_lists(text: str) -> bool:
    """Whether it is not to be read."""
    if text.count("[") + text.count("{") <= MAX_JSON_LISTS:
        return False
    return brackets_of(text.encode("utf-8", "replace")).count(b"[") > MAX_JSON_LISTS
