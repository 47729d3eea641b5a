"""The store of conversations: two servers on one file, and tools that no prompt has carried along for ever."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.api.access.admission import AdmissionSettings
from quire.api.access.conversation_store import ConversationStore
from quire.errors import ConfigError
from tests.api.dialects.test_tools import tool_talker
from tests.support.servers.local_api import house

JUNK = "j" * 20_000
TOOLS = [
    {"type": "web_search_20250305", "name": "web_search", "junk": JUNK},
    {"name": "find", "description": "Finds.", "input_schema": {"type": "object"}, "junk": JUNK},
]
HELLO = {"role": "user", "content": "hello"}
BODY = {"model": "oracle", "max_tokens": 4, "messages": [HELLO]}


def prompt_tokens(told: Any) -> int:
    """The cached ones, too."""
    return sum(number for name, number in told["usage"].items() if name.endswith("input_tokens"))


def test_a_second_server_on_one_store_does_not_start(tmp_path: Path) -> None:
    """Failed: it started, and each counted its own bytes alone."""
    path = tmp_path / "kept.db"
    first = ConversationStore(path, 1 << 20)
    with pytest.raises(ConfigError) as told:
        ConversationStore(path, 1 << 20)
    assert told.value.settings == ("store",)
    first.close()
    ConversationStore(path, 1 << 20).close()


def test_a_thread_keeps_of_its_beginning_what_prompts_are_made_of(tmp_path: Path) -> None:
    """Failed: 40,000 characters of junk were kept, and written again for every message."""
    store = ConversationStore(tmp_path / "kept.db", 1 << 20)
    system = [{"type": "text", "text": "be brief", "junk": JUNK}]
    with house(models={"oracle": tool_talker()}, settings=AdmissionSettings(store=store)) as here:
        begun = here.post("/v1/messages", {**BODY, "system": system, "tools": TOOLS, "thread": {"type": "create"}})
        assert begun.status == 200, begun.data
        kept = store.find("default", begun.json["id"])
        thread = {"type": "continue", "previous_message_id": begun.json["id"]}
        more = {"role": "user", "content": "more"}
        said = [HELLO, {"role": "assistant", "content": begun.json["content"]}, more]
        going_on = here.post("/v1/messages", {**BODY, "messages": [more], "thread": thread})
        all_of_it = {**BODY, "messages": said, "system": system, "tools": TOOLS}
        assert prompt_tokens(going_on.json) == prompt_tokens(here.post("/v1/messages", all_of_it).json)
    store.close()
    assert kept is not None
    assert JUNK not in json.dumps(kept.fields)
    assert kept.fields["tools"] == [{"name": "find", "description": "Finds.", "input_schema": {"type": "object"}}]
