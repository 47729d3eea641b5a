"""Slots for the members of a simulated fleet; its gateways; and block hashes, by which gateways route prompts."""

from collections import deque
from dataclasses import dataclass, field

from quire.core.digests import BlockHasher, block_hash
from quire.core.events import KVEvent
from quire.core.memory.block_table import max_hit_blocks, pack_tokens
from quire.fleet.routing.membership import MemberState
from quire.fleet.routing.router import Router
from quire.sim.fleet.member import KEY, Member, MemberSize
from quire.sim.fleet.policies import Policy
from quire.workload.workload_request import WorkloadRequest


class MemberSlot:
    """A position in the fleet: its member may crash or leave, and a new member may replace it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.key = f"{number:05}"
        """The member's name in the gateways' routers."""
        self.member: Member | None = None
        self.epoch = 0
        """Increases whenever a member joins or is removed; messages with another epoch are stale."""
        self.is_draining = False
        self.outbox: deque[KVEvent] = deque()
        self.requests: dict[str, WorkloadRequest] = {}
        """The member's unfinished requests."""
        self.stranded: dict[str, WorkloadRequest] = {}
        """Requests of a removed member whose gateways have not detected the removal."""
        self.num_requests = 0
        self.num_prompt_tokens_computed = 0
        self.busy_s = 0.0

    def remove_member(self) -> Member | None:
        """Remove and return the member; its requests are moved to `stranded`."""
        member, self.member = self.member, None
        if member is not None:
            self.num_prompt_tokens_computed += member.num_prompt_tokens_computed
            self.busy_s += member.busy_s
            self.epoch += 1
            self.outbox.clear()
            self.stranded.update(self.requests)
            self.requests = {}
        return member


@dataclass(slots=True)
class Gateway:
    """A gateway and the members that it knows."""

    number: int
    router: Router
    policy: Policy
    member_epochs: dict[int, int] = field(default_factory=dict)
    """Slot number -> epoch of the member that the gateway knows; messages with another epoch are ignored."""

    def drop_member(self, slot: MemberSlot) -> None:
        """Drop the member that the gateway knows in this slot, if any."""
        self.member_epochs.pop(slot.number, None)
        if self.router.membership.state_of(slot.key) is not MemberState.GONE:
            self.router.leave(slot.key)


class BlockHashes:
    """Block hashes of prompts, for routing. All members share one key, so equal prompts have equal hashes."""

    def __init__(self, size: MemberSize) -> None:
        self._size = size
        self._hasher = BlockHasher(KEY)
        self._root_digests: dict[str, bytes] = {}
        """Root digests by tenant."""

    def of_prompt(self, request: WorkloadRequest) -> tuple[int, ...]:
        """Return the hashes of the prompt's blocks, as far as a cache hit can reach."""
        size, hasher, digest = self._size.block_size, self._hasher, self._root_digests.get(request.tenant)
        if digest is None:
            digest = self._root_digests[request.tenant] = hasher.root(self._size.namespace(request.tenant))
        packed_tokens, hashes = pack_tokens(request.prompt), list[int]()
        for index in range(max_hit_blocks(len(request.prompt), size)):
            digest = hasher.child(digest, packed_tokens[index * 4 * size : (index + 1) * 4 * size])
            hashes.append(block_hash(digest))
        return tuple(hashes)
