"""The prompts that later ones are compared with."""

import random

from quire.client.prefix.kept_prompts import MAX_PROMPTS, KeptPrompts, PromptScope
from quire.client.prefix.prompt_alignment import WIDTH, packed

ONE = PromptScope("one", "one", "m")


def test_the_nearest_begins_like_the_prompt_for_longest_and_the_newest_of_them_is_first() -> None:
    kept = KeptPrompts()
    for name, ids in (("a", [1, 2, 3]), ("b", list(range(50))), ("c", [*range(49), 7])):
        kept.add(ONE, name, packed(ids))
    found = kept.nearest(ONE, packed([*range(48), 5]))
    assert [(one.request_id, num) for one, num in found] == [("c", 48), ("b", 48)]
    assert kept.nearest(ONE, packed([9])) == []
    assert kept.nearest(PromptScope("two", "one", "m"), packed(range(50))) == []


def test_an_answer_is_kept_behind_its_prompt() -> None:
    kept = KeptPrompts()
    kept.add(ONE, "a", packed([1, 2]))
    kept.add_answer("a", packed([3, 4]))
    kept.add_answer("who", packed([3, 4]))
    ((one, num),) = kept.nearest(ONE, packed([1, 2, 3, 9]))
    assert (num, one.num_prompt_tokens, len(one.tokens) // WIDTH) == (3, 2, 4)


def test_whatever_comes_the_bounds_hold_and_nothing_is_left_of_what_was_dropped() -> None:
    dice, kept = random.Random(5), KeptPrompts(max_bytes=60_000, max_tenant_bytes=20_000)
    for number in range(2000):
        name = PromptScope(f"t{dice.randrange(9)}", f"g{dice.randrange(4)}", "m")
        tokens = packed([dice.randrange(3) for _ in range(dice.randrange(1, 900))])
        nearest = kept.nearest(name, tokens)
        kept.add(name, f"r{dice.randrange(1500)}", tokens, nearest[0][0] if nearest and dice.random() < 0.3 else None)
        kept.add_answer(f"r{number}", tokens[:400])
        assert kept.num_bytes <= 60_000
    assert len(kept) <= 60_000 // 512
    sizes = [one.num_bytes for _, one in kept.by_request.values()]
    assert sum(sizes) == kept.num_bytes
    for tenant in kept.tenants.values():
        assert tenant.num_bytes <= 20_000
        assert all(0 < len(shelf) <= MAX_PROMPTS for shelf in tenant.scopes.values())
