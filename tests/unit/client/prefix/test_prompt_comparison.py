"""Comparisons of a prompt with an earlier one: a cause is reported only for tokens that were missed, and it is the part
that changed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from quire.client.prefix.explanation import Explanation
from quire.client.prefix.kept_prompts import MAX_NAMES, KeptPrompts, PromptName, PromptScope
from quire.client.prefix.prompt_alignment import packed
from quire.client.prefix.prompt_comparison import ComparedPrompt, ComparisonResult, PromptComparison, compare_prompts
from quire.client.prefix.reuse_log import PromptPart, PromptParts, ReuseRecord
from quire.text.chat.prompt_parts import PartSpan

Texts = tuple[tuple[int, ...], ...]
BEGIN, END, TOOLS_BEGIN, TOOLS_END, EFFORT = 1000, 1001, 1002, 1003, 1100
ROLES = ("user", "assistant")


@dataclass(frozen=True)
class Chat:
    """A client's request, as far as it reaches the prompt."""

    system: tuple[int, ...]
    tools: Texts
    messages: Texts
    effort: int = 0

    def rendered(self, order: str) -> tuple[list[int], PromptParts]:
        """The tokens and parts, by a template that writes its sections in this order: e, s, t, m."""
        tokens, spans = list[int](), list[PartSpan]()

        def write(text: Sequence[int], part: PromptPart) -> None:
            if text:
                spans.append(PartSpan(len(tokens), len(tokens) + len(text), part))
                tokens.extend(text)

        for section in order:
            if section == "e":
                tokens += [EFFORT, EFFORT + 1 + self.effort]
            elif section == "s" and self.system:
                tokens += [BEGIN, 2000]
                write(self.system, PromptPart("system", 0))
                tokens.append(END)
            elif section == "t" and self.tools:
                tokens.append(TOOLS_BEGIN)
                for index, text in enumerate(self.tools):
                    write(text, PromptPart("tool", index, "tool"))
                    tokens.append(TOOLS_END)
            elif section == "m":
                for index, text in enumerate(self.messages):
                    role = ROLES[index % 2]
                    tokens += [BEGIN, 2001 + index % 2]
                    write(text, PromptPart("message", index, role))
                    tokens.append(END)
        return [*tokens, BEGIN, 2002], PromptParts(spans)


TEXT = st.lists(st.integers(1, 4), min_size=1, max_size=12).map(tuple)
CHATS = st.builds(
    Chat,
    system=st.one_of(st.just(()), TEXT),
    tools=st.lists(TEXT, max_size=3).map(tuple),
    messages=st.lists(TEXT, min_size=1, max_size=4).map(tuple),
)
ORDERS = st.sampled_from(["estm", "etsm", "tsm", "stm"])
SCOPE = PromptScope("alice", "alice", "m")


def compare(
    order: str,
    earlier: Chat,
    later: Chat,
    block_size: int,
    num_cached: int | None = None,
    scope: PromptScope = SCOPE,
) -> PromptComparison:
    """Compare as a server does: with as many cached tokens as both prompts share, unless fewer were left."""
    kept = KeptPrompts()
    tokens, parts = earlier.rendered(order)
    kept.add(SCOPE, "r1", packed(tokens), parts=parts, name=PromptName("msg_1", len(tokens), str(earlier.effort)))
    new_tokens, new_parts = later.rendered(order)
    if num_cached is None:
        num_cached = shared_blocks(tokens, new_tokens, block_size)
    explanation = Explanation(len(new_tokens), num_cached, "first_seen")
    record = ReuseRecord(
        "r2", scope.tenant, scope.cache_group, scope.model, 0.0, explanation, None, 0, num_cached, answer_id="msg_2"
    )
    ours = ComparedPrompt(record, packed(new_tokens), block_size, new_parts, str(later.effort))
    return compare_prompts(ours, kept.find(scope.tenant, "msg_1"))


def num_equal(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def shared_blocks(a: Sequence[int], b: Sequence[int], block_size: int) -> int:
    return min(num_equal(a, b), len(b) - 1) // block_size * block_size


def reusable(a: Sequence[int], b: Sequence[int], block_size: int) -> int:
    return min(len(a) // block_size, (len(b) - 1) // block_size) * block_size


@given(CHATS, st.lists(TEXT, max_size=3).map(tuple), ORDERS, st.sampled_from([1, 4, 8]))
def test_appended_messages_are_a_hit(chat: Chat, more: Texts, order: str, block_size: int) -> None:
    later = replace(chat, messages=chat.messages + more)
    comparison = compare(order, chat, later, block_size)
    # The last two tokens, which ask for the answer, are not a part of the client's prompt.
    assert comparison.verdict in (ComparisonResult.HIT, ComparisonResult.UNAVAILABLE)
    if comparison.verdict is ComparisonResult.UNAVAILABLE:
        assert comparison.num_missed_tokens <= 2 * block_size


@given(CHATS, CHATS, ORDERS, st.sampled_from([1, 4, 8]), st.sampled_from(["system", "tools", "messages", "effort"]))
def test_a_single_change_is_the_cause_exactly_if_tokens_were_missed(
    chat: Chat, other: Chat, order: str, block_size: int, field: str
) -> None:
    effort = field == "effort"
    later = replace(chat, effort=1) if effort else replace(chat, **{field: getattr(other, field)})
    tokens, new_tokens = chat.rendered(order)[0], later.rendered(order)[0]
    num_missed = reusable(tokens, new_tokens, block_size) - shared_blocks(tokens, new_tokens, block_size)
    comparison = compare(order, chat, later, block_size)
    assert comparison.num_missed_tokens == num_missed
    assert comparison.num_common_tokens == num_equal(tokens, new_tokens)
    if not num_missed:
        assert comparison.verdict is ComparisonResult.HIT
    elif field == "messages" and later.messages[: len(chat.messages)] == chat.messages:
        assert comparison.verdict is ComparisonResult.UNAVAILABLE, "only appended"
    else:
        assert comparison.verdict is ComparisonResult[field.upper()]


@given(CHATS, CHATS, ORDERS, st.data())
def test_tokens_missed_before_the_first_difference_have_no_cause_in_the_prompt(
    chat: Chat, other: Chat, order: str, data: st.DataObject
) -> None:
    later = replace(other, system=chat.system)
    tokens, new_tokens = chat.rendered(order)[0], later.rendered(order)[0]
    num_shared = shared_blocks(tokens, new_tokens, 4)
    num_cached = data.draw(st.integers(0, num_shared // 4)) * 4
    comparison = compare(order, chat, later, 4, num_cached)
    assert (comparison.verdict is ComparisonResult.UNAVAILABLE) >= (num_cached < num_shared)
    assert comparison.num_missed_tokens == reusable(tokens, new_tokens, 4) - num_cached


CHAT = Chat((1, 2, 3, 4), ((1, 1, 1, 1),), ((2,) * 9, (3,) * 9, (4,) * 9))


def test_tools_that_a_template_writes_last_move_with_each_message_and_are_no_change() -> None:
    later = replace(CHAT, messages=(*CHAT.messages, (1, 2)))
    assert compare("smt", CHAT, later, 4).verdict is ComparisonResult.UNAVAILABLE
    changed = replace(later, messages=((9,), *later.messages[1:]))
    assert compare("smt", CHAT, changed, 4).verdict is ComparisonResult.MESSAGES


def test_of_two_changes_the_first_in_the_prompt_is_the_cause() -> None:
    both = replace(CHAT, system=(1, 2, 9, 9, 9), tools=((5, 5),))
    assert compare("stm", CHAT, both, 1).verdict is ComparisonResult.SYSTEM
    assert compare("tsm", CHAT, both, 1).verdict is ComparisonResult.TOOLS
    assert compare("estm", CHAT, replace(both, effort=2), 1).verdict is ComparisonResult.EFFORT


def test_another_model_is_the_cause_only_if_its_cache_lacks_the_prompt() -> None:
    other, size = PromptScope("alice", "alice", "other"), len(CHAT.rendered("stm")[0])
    assert compare("stm", CHAT, CHAT, 4, 0, other) == PromptComparison(
        ComparisonResult.MODEL, (size - 1) // 4 * 4, size
    )
    assert compare("stm", CHAT, CHAT, 4, None, other).verdict is ComparisonResult.HIT


def test_a_prompt_in_another_cache_group_has_no_cause_and_of_another_tenant_is_not_found() -> None:
    assert compare("stm", CHAT, CHAT, 4, 0, PromptScope("alice", "salt", "m")).verdict is ComparisonResult.UNAVAILABLE
    assert compare("stm", CHAT, CHAT, 4, 0, PromptScope("bob", "alice", "m")).verdict is ComparisonResult.NOT_FOUND


def test_a_prompt_is_found_by_the_ids_of_all_answers_of_its_conversation() -> None:
    kept, ids = KeptPrompts(), [1, 2, 3]
    kept.add(SCOPE, "r0", packed(ids), name=PromptName("msg_0", 3))
    for turn in range(1, MAX_NAMES + 2):
        ids += [turn]
        (old, _), *_ = kept.nearest(SCOPE, packed(ids))
        kept.add(SCOPE, f"r{turn}", packed(ids), old, name=PromptName(f"msg_{turn}", len(ids)))
    assert len(kept) == 1
    assert (kept.find("alice", "msg_0"), kept.find("alice", "msg_1")) == (None, None), "the oldest are forgotten"
    found = kept.find("alice", "msg_2")
    assert found is not None
    assert (found.name.num_tokens, found.prompt.num_prompt_tokens) == (5, len(ids))
    assert kept.find("bob", "msg_2") is None
