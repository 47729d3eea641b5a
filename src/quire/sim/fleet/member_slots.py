"""Slots for the members of a simulated fleet, and gateways with the members that each of them knows."""

from collections import deque
from dataclasses import dataclass, field

from quire.core.digests import BlockHasher
from quire.core.events import KVEvent
from quire.core.memory.block_table import hit_cap, pack_tokens
from quire.fleet.routing.membership import MemberState
from quire.fleet.routing.router import Router
from quire.sim.fleet.member import KEY, Member, MemberSize
from quire.sim.fleet.policies import Policy
from quire.workload.workload_request import WorkloadRequest


class MemberSlot:
    """A place in the fleet: its member may die, and a new member may take its place."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.key = f"{number:05}"
        """The member's name in the gateways' routers."""
        self.member: Member | None = None
        self.epoch = 0
        """Number of the current member; messages of earlier members are stale."""
        self.is_draining = False
        self.outbox: deque[KVEvent] = deque()
        self.taken: dict[str, WorkloadRequest] = {}
        """The member's unfinished requests."""
        self.stranded: dict[str, WorkloadRequest] = {}
        """Requests of a dead member whose gateways have not detected its death."""
        self.num_requests = 0
        self.num_prompt_tokens_computed = 0
        self.busy_s = 0.0

    def clear(self) -> Member | None:
        """Remove and return the member; its requests become stranded."""
        member, self.member = self.member, None
        if member is not None:
            self.num_prompt_tokens_computed += member.num_prompt_tokens_computed
            self.busy_s += member.busy_s
            self.epoch += 1
            self.outbox.clear()
            self.stranded.update(self.taken)
            self.taken = {}
        return member


@dataclass(slots=True)
class Gateway:
    """A gateway and the members that it knows."""

    number: int
    router: Router
    policy: Policy
    known: dict[int, int] = field(default_factory=dict)
    """Slot number -> epoch of the member that the gateway knows; messages of other epochs are stale."""

    def left(self, slot: MemberSlot) -> None:
        """Drop the member that the gateway knows in this slot, if any."""
        self.known.pop(slot.number, None)
        if self.router.membership.state_of(slot.key) is not MemberState.GONE:
            self.router.leave(slot.key)


class PromptNames:
    """Block hashes for routing. All members share one key, so equal prompts have equal digests."""

    def __init__(self, size: MemberSize) -> None:
        self._size = size
        self._hasher = BlockHasher(KEY)
        self._roots: dict[str, bytes] = {}
        """Root digests by tenant."""

    def of_prompt(self, request: WorkloadRequest) -> tuple[int, ...]:
        """Return the hashes of the prompt's blocks, as far as a cache hit can reach."""
        size, hasher, digest = self._size.block_size, self._hasher, self._roots.get(request.tenant)
        if digest is None:
            digest = self._roots[request.tenant] = hasher.root(self._size.namespace(request.tenant))
        packed, names = pack_tokens(request.prompt), list[int]()
        for at in range(hit_cap(len(request.prompt), size)):
            digest = hasher.child(digest, packed[at * 4 * size : (at + 1) * 4 * size])
            names.append(name_of(digest))
        return tuple(names)


def name_of(digest: bytes) -> int:
    """Return the hash of a block from its digest."""
    return int.from_bytes(digest[:8]) >> 1
