"""The helper processes of a template, or of a checker of grammars."""

from typing import Any

from quire.text.chat.rendering.template import ChatTemplate
from quire.text.grammars.checker import GrammarChecker
from quire.text.sandboxed.pool import Helper, HelperPool


def pool_of(owner: ChatTemplate | GrammarChecker) -> HelperPool[Any]:
    return owner._helpers


def free_helpers(owner: ChatTemplate | GrammarChecker | HelperPool[Any]) -> list[Helper]:
    """Those that have no work, as the pool itself holds them."""
    pool = owner if isinstance(owner, HelperPool) else pool_of(owner)
    return pool._free
