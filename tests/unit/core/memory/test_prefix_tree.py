"""Digests, namespaces, the tree, and why a prefix was not found."""

from dataclasses import replace

import pytest

from quire.core.digests import BlockHasher, Namespace
from quire.core.divergence import MissReason
from quire.core.memory.block_table import pack_tokens
from quire.core.memory.kv_config import KVMemoryConfig
from quire.core.memory.kv_memory import KVMemory
from quire.core.memory.prefix_tree import EvictionLog, PrefixTree, num_shared_tokens
from quire.errors import ConfigError, InvariantError
from tests.support.core.shadow import KEY, namespace
from tests.support.errors import raises_code

SPACE = namespace(block_size=2)


def new_tree(num_blocks: int = 8) -> PrefixTree:
    return PrefixTree(num_blocks, 2, BlockHasher(KEY), 16)


def name_chain(tree: PrefixTree, blocks: list[int], tokens: list[int], parent: int) -> list[bytes]:
    digests, digest = [], tree.digest_of(parent)
    for index in range(len(blocks)):
        digest = tree.hasher.child(digest, pack_tokens(tokens[2 * index : 2 * index + 2]))
        digests.append(digest)
    assert tree.name(blocks, digests, pack_tokens(tokens), parent) == len(blocks)
    return digests


def name_chain_of_one(tree: PrefixTree, token: int, root: int) -> None:
    packed = pack_tokens([token])
    tree.name([token], [tree.hasher.child(tree.digest_of(root), packed)], packed, root)


def compute(memory: KVMemory, space: Namespace, tokens: list[int]) -> None:
    table = memory.open(space)
    memory.match(table, tokens)
    memory.reserve(table, tokens, len(tokens) - table.num_computed)
    memory.commit(table, len(tokens) - table.num_computed)
    memory.release(table)


def test_a_digest_depends_on_key_parent_and_every_token() -> None:
    hasher, other = BlockHasher(KEY), BlockHasher(bytes(32))
    root, tokens = hasher.root(SPACE), pack_tokens([1, 2])
    digest = hasher.child(root, tokens)
    assert len(digest) == 32
    assert digest == BlockHasher(KEY).child(root, tokens), "the same in every process"
    assert digest not in {
        other.child(root, tokens),
        hasher.child(digest, tokens),
        hasher.child(root, pack_tokens([2, 1])),
        hasher.child(root, pack_tokens([1, 3])),
    }


def test_the_digest_is_the_one_the_design_names() -> None:
    import hashlib  # noqa: PLC0415 - an independent computation, kept beside the claim

    parent, tokens = BlockHasher(KEY).root(SPACE), [5, 6]
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    expected = hashlib.blake2b(parent + packed, digest_size=32, key=KEY, person=b"quire.block").digest()
    assert BlockHasher(KEY).child(parent, pack_tokens(tokens)) == expected


def test_a_key_of_another_length_is_refused() -> None:
    with raises_code(ConfigError, "invalid_config"):
        BlockHasher(b"short")


def test_fields_that_join_to_the_same_text_are_still_different_namespaces() -> None:
    one = replace(SPACE, model="ab", adapter="c")
    two = replace(SPACE, model="a", adapter="bc")
    assert one.encode() != two.encode()


@pytest.mark.parametrize(
    "change",
    [
        {"format_version": 2},
        {"model": "other"},
        {"adapter": "other"},
        {"kv_layout": "other"},
        {"block_size": 4},
        {"cache_group": "other"},
    ],
)
def test_every_field_of_the_namespace_changes_the_root(change: dict[str, int | str]) -> None:
    assert BlockHasher(KEY).root(replace(SPACE, **change)) != BlockHasher(KEY).root(SPACE)  # type: ignore[arg-type]


def test_a_namespace_of_another_block_size_is_refused() -> None:
    with raises_code(InvariantError, "invariant_broken"):
        new_tree().open_root(namespace(block_size=4))


def test_a_root_is_dropped_with_its_last_table_and_its_place_is_used_again() -> None:
    tree = new_tree()
    first = tree.open_root(SPACE)
    assert tree.open_root(SPACE) == first
    tree.close_root(first)
    tree.close_root(first)
    with raises_code(InvariantError, "root_is_closed"):
        tree.digest_of(first)
    assert tree.open_root(namespace(2, "other")) == first


def test_a_root_that_is_dropped_leaves_the_others_of_its_group() -> None:
    tree = new_tree()
    adapted = namespace(2, adapter="lora")
    gone, kept = tree.open_root(SPACE), tree.open_root(adapted)
    tree.close_root(gone)
    assert list(tree.roots()) == [kept]
    assert tree.slots_of_group == {SPACE.cache_group: {~kept: adapted}}


def test_a_namespace_that_cannot_be_encoded_costs_no_place() -> None:
    tree = new_tree()
    tree.close_root(tree.open_root(SPACE))
    for _ in range(3):
        with pytest.raises(UnicodeEncodeError):
            tree.open_root(namespace(2, "\ud800"))
    tree.open_root(SPACE)
    assert len(tree.root_nodes) == 1


def test_a_root_stays_while_a_block_hangs_under_it() -> None:
    tree = new_tree()
    root = tree.open_root(SPACE)
    name_chain(tree, [1], [5, 6], root)
    tree.close_root(root)
    assert list(tree.roots()) == [root]
    tree.forget([1], 0.0)
    assert list(tree.roots()) == []


def test_a_hit_needs_equal_tokens_and_the_same_parent() -> None:
    tree = new_tree()
    root, other = tree.open_root(SPACE), tree.open_root(namespace(2, "other"))
    digest = name_chain(tree, [1], [5, 6], root)[0]
    assert tree.find(digest, pack_tokens([5, 6]), root) == 1
    assert tree.find(digest, pack_tokens([5, 7]), root) is None
    assert tree.find(digest, pack_tokens([5, 6]), other) is None
    assert tree.find(bytes(32), pack_tokens([5, 6]), root) is None


def test_naming_stops_at_a_digest_that_another_block_carries() -> None:
    tree = new_tree()
    root = tree.open_root(SPACE)
    digests = name_chain(tree, [1, 2], [1, 1, 2, 2], root)
    assert tree.name([3, 4], [bytes(32), digests[1]], pack_tokens([9, 9, 9, 9]), root) == 1
    assert tree.parent_of(4) == 0


def test_a_block_is_named_only_under_a_named_parent() -> None:
    tree = new_tree()
    for nobody in (0, 3):
        with raises_code(InvariantError, "parent_not_named"):
            tree.name([1], [bytes(32)], pack_tokens([1, 2]), nobody)


def test_a_block_is_not_named_twice() -> None:
    tree = new_tree()
    root = tree.open_root(SPACE)
    name_chain(tree, [1], [1, 2], root)
    with raises_code(InvariantError, "block_named_already"):
        tree.name([1], [bytes(32)], pack_tokens([3, 4]), root)


def test_only_a_leaf_can_be_forgotten() -> None:
    tree = new_tree()
    name_chain(tree, [1, 2], [1, 1, 2, 2], tree.open_root(SPACE))
    with raises_code(InvariantError, "block_not_leaf"):
        tree.forget([1], 0.0)
    with raises_code(InvariantError, "block_not_leaf"):
        tree.forget([3], 0.0)
    assert len(tree.forget([2, 1], 0.0)) == 2
    assert len(tree) == 0


def test_siblings_are_listed_newest_first_whichever_is_forgotten() -> None:
    tree = new_tree()
    root = tree.open_root(SPACE)
    for block in (1, 2, 3, 4):
        name_chain(tree, [block], [block, 0], root)
    assert list(tree.children(root)) == [4, 3, 2, 1]
    tree.forget([3], 0.0)
    assert list(tree.children(root)) == [4, 2, 1]
    tree.forget([1], 0.0)
    tree.forget([4], 0.0)
    assert list(tree.children(root)) == [2]


def test_clearing_forgets_every_name_and_keeps_open_roots() -> None:
    tree = new_tree()
    root, idle = tree.open_root(SPACE), tree.open_root(namespace(2, "idle"))
    digest = name_chain(tree, [1], [1, 2], root)[0]
    name_chain(tree, [2], [1, 2], idle)
    tree.close_root(idle)
    tree.clear()
    tree.clear()
    assert tree.named(digest) is None
    assert list(tree.roots()) == [root]


def test_what_a_clear_forgets_is_given_back_a_little_at_a_time() -> None:
    tree = PrefixTree(20_000, 1, BlockHasher(KEY), 16)
    root = tree.open_root(namespace(1))
    for block in range(1, 20_001):
        name_chain_of_one(tree, block, root)
    tree.clear()
    left = [len(tree.discarded)]
    while tree.discarded:
        tree.sweep()
        left.append(len(tree.discarded))
    assert left == [32, 28, 24, 20, 16, 12, 8, 4, 0]


def test_the_index_is_cut_in_small_pieces_so_that_no_growth_stops_a_step() -> None:
    assert len(new_tree(8).shards) == 1
    assert len(new_tree(100_000).shards) == 128


def test_the_eviction_log_remembers_the_latest_and_stays_bounded() -> None:
    log = EvictionLog(4)
    for index in range(100):
        log.record([bytes([index])], float(index))
        assert len(log) <= 8
        for recent in range(max(0, index - 3), index + 1):
            assert log.evicted_at_s(bytes([recent])) == float(recent), "at least the last four"
    assert log.evicted_at_s(bytes([3])) is None
    log.record([bytes([98])], 1000.0)
    assert log.evicted_at_s(bytes([98])) == 1000.0, "the later of two evictions"
    log.record([bytes([index]) for index in range(50)], 2000.0)
    assert len(log) <= 8, "however many at once"
    log.clear()
    assert log.evicted_at_s(bytes([49])) is None


def test_shared_tokens_are_counted_from_the_front() -> None:
    assert num_shared_tokens(pack_tokens([1, 2, 3]), pack_tokens([1, 2, 4])) == 2
    assert num_shared_tokens(pack_tokens([1, 2]), pack_tokens([1, 2, 4])) == 2
    assert num_shared_tokens(pack_tokens([256]), pack_tokens([0])) == 0


class TestWhyAPrefixMissed:
    """One test per reason of the design, and the order among them."""

    def setup_method(self) -> None:
        self.memory = KVMemory(KVMemoryConfig(8, 2), BlockHasher(KEY))

    def reason(self, tokens: list[int], space: Namespace = SPACE) -> tuple[int, MissReason]:
        found = self.memory.divergence(space, tokens)
        return found.num_cached_tokens, found.reason

    def test_tokens_never_seen_are_first_seen(self) -> None:
        assert self.reason([1, 2, 3]) == (0, MissReason.FIRST_SEEN)

    def test_a_prompt_below_a_block_is_too_short(self) -> None:
        assert self.reason([1, 2]) == (0, MissReason.TOO_SHORT)

    def test_a_rest_below_a_block_is_too_short(self) -> None:
        compute(self.memory, SPACE, [1, 2, 3, 4])
        assert self.reason([1, 2, 3, 4]) == (2, MissReason.TOO_SHORT)
        assert self.reason([1, 2, 3, 4, 5]) == (4, MissReason.TOO_SHORT)

    def test_the_first_different_token_is_named_by_its_position(self) -> None:
        compute(self.memory, SPACE, [1, 2, 3, 4])
        found = self.memory.divergence(SPACE, [1, 2, 3, 9, 9])
        assert found.reason is MissReason.DIVERGED
        assert (found.num_cached_tokens, found.first_different_token) == (2, 3)

    def test_the_closest_sibling_counts_not_the_newest(self) -> None:
        memory = self.memory = KVMemory(KVMemoryConfig(8, 4), BlockHasher(KEY))
        compute(memory, namespace(4), [1, 2, 3, 4])
        compute(memory, namespace(4), [1, 9, 9, 9])
        assert memory.divergence(namespace(4), [1, 2, 3, 5, 5]).first_different_token == 3

    def test_siblings_that_share_no_token_are_no_divergence(self) -> None:
        compute(self.memory, SPACE, [1, 2, 3, 4])
        assert self.reason([1, 2, 9, 9, 9]) == (2, MissReason.FIRST_SEEN)

    def test_an_evicted_block_says_how_long_ago(self) -> None:
        compute(self.memory, SPACE, [1, 2, 3, 4])
        self.memory.advance(7.5)
        self.memory.evict(1)
        for now_s, ago_s in ((7.5, 0.0), (10.0, 2.5), (7.0, 0.0)):  # a clock may go back
            self.memory.advance(now_s)
            found = self.memory.divergence(SPACE, [1, 2, 3, 4, 5])
            assert (found.num_cached_tokens, found.reason, found.evicted_s_ago) == (2, MissReason.EVICTED, ago_s)

    def test_evicted_comes_before_diverged(self) -> None:
        compute(self.memory, SPACE, [1, 2])
        compute(self.memory, SPACE, [1, 3])
        self.memory.evict(1)
        assert self.reason([1, 2, 9]) == (0, MissReason.EVICTED)

    def test_a_block_another_sequence_is_writing_is_computing(self) -> None:
        table = self.memory.open(SPACE)
        self.memory.reserve(table, [1, 2, 3], 3)
        assert self.reason([1, 2, 3]) == (0, MissReason.COMPUTING)
        self.memory.commit(table, 3)
        assert self.reason([1, 2, 3]) == (2, MissReason.TOO_SHORT)

    def test_computing_comes_before_evicted(self) -> None:
        compute(self.memory, SPACE, [1, 2])
        self.memory.evict(1)
        table = self.memory.open(SPACE)
        self.memory.reserve(table, [1, 2], 2)
        assert self.reason([1, 2, 3]) == (0, MissReason.COMPUTING)

    def test_the_same_tokens_under_another_adapter_name_that_namespace(self) -> None:
        adapted = namespace(2, adapter="lora")
        compute(self.memory, adapted, [1, 2])
        found = self.memory.divergence(SPACE, [1, 2, 3])
        assert (found.reason, found.other_namespace) == (MissReason.OTHER_NAMESPACE, adapted)
        assert self.reason([5, 6, 7]) == (0, MissReason.FIRST_SEEN)

    def test_diverged_comes_before_other_namespace(self) -> None:
        compute(self.memory, namespace(2, adapter="lora"), [1, 2])
        compute(self.memory, SPACE, [1, 3])
        assert self.reason([1, 2, 3]) == (0, MissReason.DIVERGED)

    def test_another_tenants_blocks_read_as_first_seen(self) -> None:
        compute(self.memory, namespace(2, "theirs"), [1, 2])
        compute(self.memory, namespace(2, "theirs", adapter="lora"), [1, 2])
        assert self.reason([1, 2, 3]) == (0, MissReason.FIRST_SEEN)

    def test_another_namespace_explains_only_a_prompt_that_hit_nothing(self) -> None:
        compute(self.memory, namespace(2, adapter="lora"), [1, 2, 3, 4])
        compute(self.memory, SPACE, [1, 2])
        assert self.reason([1, 2, 3, 4, 5]) == (2, MissReason.FIRST_SEEN)

    def test_an_older_sibling_can_be_the_closest(self) -> None:
        memory = KVMemory(KVMemoryConfig(64, 4), BlockHasher(KEY))
        compute(memory, namespace(4), [1, 2, 3, 4])
        for other in range(10, 20):
            compute(memory, namespace(4), [1, other, other, other])
        assert memory.divergence(namespace(4), [1, 2, 3, 5, 5]).first_different_token == 3

    def test_an_older_namespace_of_the_same_tenant_is_found(self) -> None:
        compute(self.memory, namespace(2, adapter="first"), [1, 2])
        for index in range(3):
            compute(self.memory, namespace(2, adapter=f"later{index}"), [8, 9])
        assert self.reason([1, 2, 3]) == (0, MissReason.OTHER_NAMESPACE)

    def test_after_a_clear_nothing_counts_as_evicted(self) -> None:
        compute(self.memory, SPACE, [1, 2])
        self.memory.evict(1)
        self.memory.clear()
        assert self.reason([1, 2, 3]) == (0, MissReason.FIRST_SEEN)

    def test_asking_changes_nothing(self) -> None:
        compute(self.memory, SPACE, [1, 2, 3, 4])
        before = (self.memory.stats(), list(self.memory.pool.free_queue()))
        self.memory.divergence(SPACE, [1, 2, 3, 4, 5])
        assert before == (self.memory.stats(), list(self.memory.pool.free_queue()))
