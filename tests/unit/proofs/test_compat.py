"""`make compat`: new and removed fields of SDKs are named, and the committed list is what the command writes."""

import json

from hypothesis import given
from hypothesis import strategies as st

from proofs.agents.clients_run.packages import GROUPS, NEWEST
from proofs.compat.__main__ import LIST, SDKS, differences, text_of

NAMES = st.text("abc_", min_size=1, max_size=3)
FIELDS = st.dictionaries(
    NAMES, st.dictionaries(NAMES, st.lists(NAMES, unique=True, max_size=4), max_size=4), max_size=3
)


def test_the_committed_list_is_in_the_written_form() -> None:
    listed = json.loads(LIST.read_text())
    assert text_of(listed) == LIST.read_text()
    assert list(listed) == [sdk.name for sdk in SDKS]
    assert "cache_miss_reason" in listed["anthropic"]["Diagnostics"]


@given(FIELDS)
def test_a_list_is_read_as_it_was_written(fields: dict[str, dict[str, list[str]]]) -> None:
    assert json.loads(text_of(fields)) == fields
    assert not [*differences(fields, fields)]


def test_new_and_removed_fields_are_named() -> None:
    was, now = {"openai": {"Response": ["id", "old"]}}, {"openai": {"Response": ["id"], "Cache": ["ttl"]}}
    assert [*differences(was, now)] == ["new   openai: Cache.ttl", "gone  openai: Response.old"]


def test_every_group_of_clients_has_a_newest_form() -> None:
    for group in GROUPS.values():
        newest = group.unpinned()
        assert newest.package == group.package
        assert newest.version(newest.package) == NEWEST
        assert newest.folder != group.folder
