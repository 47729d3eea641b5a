"""The invariants of a router, as functions, and what of an index only they need.

Router, index, loads and membership each keep members and requests; here they are compared, and running counts are
counted again. That takes as long as the index is large. Requests of a member that has left are
expected to have been moved.
"""

from collections import Counter
from collections.abc import Collection

from quire.core.memory.block_table import max_hit_blocks
from quire.errors import InvariantError
from quire.fleet.routing.block_index import BlockIndex
from quire.fleet.routing.member_load import MemberLoads
from quire.fleet.routing.membership import Membership, MemberState
from quire.fleet.routing.router import UNCACHED_WEIGHT, RoutedPrompt, Router, RoutingChoice


def check_router(router: Router, request_ids: Collection[str] | None = None) -> None:
    """Raise InvariantError at the first one that does not hold. With `request_ids`, these are the ones that members
    have, and no others."""
    membership, loads, routed = router.membership, router.loads, router.routed
    check_membership(membership)
    check_index(router.index)
    check_loads(loads)
    members = set(membership.records)
    for what, known in (
        ("the index", router.index.members),
        ("loads", loads.in_flight_tokens),
        ("block sizes", router.block_sizes),
        ("last choices", router.last_chosen),
    ):
        _require(set(known) == members, f"{what} know {sorted(known)}, membership {sorted(members)}")
    by_size = {member: size for size, ready in router.ready_by_size.items() for member in ready}
    ready = {member: router.block_sizes[member] for member in membership.ready_members}
    _require(by_size == ready, f"{by_size} get work by their block size, {ready} are ready")
    if request_ids is not None:
        wrong = set(routed) ^ set(request_ids)
        _require(not wrong, f"members have {sorted(request_ids)}, the router has assigned {sorted(routed)}")
    for request_id, one in routed.items():
        _require(membership.is_current(one.assignment), f"{request_id!r} is at {one.assignment}, which is of the past")
    num_open = Counter(one.assignment.member for one in routed.values())
    for member, record in membership.records.items():
        _require(record.num_open == num_open[member], f"{member!r} has {num_open[member]}, {record.num_open} counted")
    for request_id, member in loads.member_of.items():
        has_it = request_id in routed and routed[request_id].assignment.member == member
        _require(has_it, f"{request_id!r} is reserved at {member!r}, which does not have it")


def check_membership(membership: Membership) -> None:
    """States, epochs and ready members."""
    records = membership.records
    for member, record in records.items():
        _require(record.assignment.member == member, f"{member!r} is filed as {record.assignment.member!r}")
        _require(record.state is not MemberState.GONE, f"{member!r} is gone, and still there")
        _require(record.num_open >= 0, f"{member!r} has {record.num_open} requests")
    epochs = [record.assignment.epoch for record in records.values()]
    are_own = len(set(epochs)) == len(epochs) and all(0 < one <= membership.last_epoch for one in epochs)
    _require(are_own, f"epochs {epochs} up to {membership.last_epoch}")
    ready = {member: one.assignment for member, one in records.items() if one.state is MemberState.READY}
    _require(membership.ready_members == ready, f"{membership.ready_members} get work, {ready} are ready")


def check_loads(loads: MemberLoads) -> None:
    """In flight is what was reported and what was reserved since."""
    _require(loads.in_flight_tokens.keys() == loads.loads.keys(), "members with a load and with tokens differ")
    reserved: dict[str, str] = {}
    for member, load in loads.loads.items():
        num_tokens = sum(one for one, _ in load.reservations.values())
        _require(
            load.num_reserved_tokens == num_tokens, f"{member!r}: {load.num_reserved_tokens} counted, not {num_tokens}"
        )
        num_reported = loads.in_flight_tokens[member] - num_tokens
        is_sound = num_reported >= 0 if load.as_of_s is not None else num_reported == 0
        _require(is_sound, f"{member!r}: {num_reported} tokens in flight are neither reserved nor reported")
        _require(all(one >= 0 for one, _ in load.reservations.values()), f"{member!r}: a reservation is negative")
        reserved |= dict.fromkeys(load.reservations, member)
    _require(reserved == loads.member_of, "reservations of requests and of members differ")


def check_index(index: BlockIndex) -> None:
    """Bits belong to one member or to none, and entries have bits that are in use or being swept."""
    holders = index.holders
    bits = {holder.bit: member for member, holder in holders.items()}
    _require(bits == index.member_of, "bits of members and members of bits differ")
    for members, mask in index.masks.items():
        known = sum(holders[one].bit for one in members if one in holders)
        _require(mask == known, f"the bits of {sorted(members)} are others by now")
    live, awaiting = sum(bits), index.dead_bits | index.sweeping_bits
    free = sum(set(index.free_bits))
    _require(len(set(index.free_bits)) == len(index.free_bits), "a bit is free twice")
    _require(not (live & awaiting or live & free or free & awaiting), "a bit is in two states")
    _require(live | awaiting | free == (1 << index.num_bits) - 1, "a bit is lost")
    confirmed, expected = _bits_in(index.confirmed), _bits_in(index.expected)
    _require(not (confirmed | expected) & free, "an entry has a bit that is free")
    expected_entries = [entry for shard in filter(None, index.expected) for entry in shard.items()]
    for member, holder in holders.items():
        has_bits = bool((confirmed | expected) & holder.bit)
        _require(holder.has_bits_set or not has_bits, f"{member!r} holds blocks, and would leave without a sweep")
        names = {name for name, held in expected_entries if held & holder.bit}
        _require(names == holder.unconfirmed.keys(), f"what {member!r} is believed to hold is not what is noted")


def _bits_in(shards: list[dict[int, int]]) -> int:
    found = 0
    for shard in filter(None, shards):  # most of them, in a small fleet
        for held in shard.values():
            _require(held > 0, f"an entry has the bits {held}")
            found |= held
    return found


def _require(is_sound: bool, text: str) -> None:
    if not is_sound:
        raise InvariantError(f"router: {text}", code="router_inconsistent")


def is_swept(index: BlockIndex) -> bool:
    """Whether no entry has the bit of a member that left or cleared its cache."""
    return not index.dead_bits and not index.sweeping_bits


def num_unconfirmed(index: BlockIndex) -> int:
    return sum(len(holder.unconfirmed) for holder in index.holders.values())


def holders_of(index: BlockIndex, name: int) -> list[str]:
    """Members that hold this block, confirmed or expected."""
    at = name % len(index.confirmed)
    held = index.confirmed[at].get(name, 0) | index.expected[at].get(name, 0)
    return [member for member, holder in index.holders.items() if held & holder.bit]


def ranked(
    router: Router, prompt: RoutedPrompt, exclude: Collection[str] = (), weight: float = UNCACHED_WEIGHT
) -> list[RoutingChoice]:
    """All members that could get the request, the best first, by their cost alone: no search that ends early."""
    in_flight, offers = router.loads.in_flight_tokens, []
    for member, assignment in router.membership.ready_members.items():
        size = router.block_sizes[member]
        depths = router.index.depths(prompt.names.get(size, ())[: max_hit_blocks(prompt.num_tokens, size)])
        num_cached = size * depths.get(member, 0)
        cost = weight * (prompt.num_tokens - num_cached) + in_flight[member]
        offers.append((cost, in_flight[member], router.last_chosen[member], member, assignment.epoch, num_cached))
    return [
        RoutingChoice(member, epoch, num_cached, cost)
        for cost, _, _, member, epoch, num_cached in sorted(offers)
        if member not in exclude
    ]
