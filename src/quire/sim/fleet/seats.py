"""Who is who in a simulated fleet: places for members, and gateways with what each of them has heard."""

from collections import deque
from dataclasses import dataclass, field

from quire.core.digests import BlockHasher
from quire.core.events import KVEvent
from quire.core.memory.block_table import hit_cap, pack_tokens
from quire.sim.fleet.member import KEY, Member, MemberSize
from quire.sim.fleet.policy_protocol import Policy
from quire.workload.workload_request import WorkloadRequest


class Seat:
    """A member's place in the fleet: who sits there may die, and another comes."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.member: Member | None = None
        self.epoch = 0
        """Which member it is that sits here: messages of an earlier one are late."""
        self.is_draining = False
        self.outbox: deque[KVEvent] = deque()
        self.taken: dict[str, WorkloadRequest] = {}
        """What it has been given and has not ended."""
        self.stranded: dict[str, WorkloadRequest] = {}
        """What was given to a member that is dead, and whose gateway has not heard of it."""
        self.num_requests = 0
        self.num_prompt_tokens_computed = 0
        self.busy_s = 0.0

    def vacate(self) -> Member | None:
        """Nobody sits here any more. Returns who did; what it had is stranded."""
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
    """One of those who choose."""

    number: int
    policy: Policy
    known: dict[int, int] = field(default_factory=dict)
    """Place -> the epoch that it knows there; what another epoch says is late."""

    def left(self, seat: Seat) -> None:
        """The member that it knew there is gone; nothing, if it knew none."""
        if self.known.pop(seat.number, None) is not None:
            self.policy.left(seat.number)


class PromptNames:
    """A router's names for blocks: here all members share a key, so that their digests will do."""

    def __init__(self, size: MemberSize) -> None:
        self._size = size
        self._hasher = BlockHasher(KEY)
        self._roots: dict[str, bytes] = {}
        """Of tenants: there are few, and they ask often."""

    def of_prompt(self, asked: WorkloadRequest) -> tuple[int, ...]:
        """Of the prompt's blocks, as far as a hit can go."""
        size, hasher, digest = self._size.block_size, self._hasher, self._roots.get(asked.tenant)
        if digest is None:
            digest = self._roots[asked.tenant] = hasher.root(self._size.namespace(asked.tenant))
        packed, names = pack_tokens(asked.prompt), list[int]()
        for at in range(hit_cap(len(asked.prompt), size)):
            digest = hasher.child(digest, packed[at * 4 * size : (at + 1) * 4 * size])
            names.append(name_of(digest))
        return tuple(names)


def name_of(digest: bytes) -> int:
    """Of one block."""
    return int.from_bytes(digest[:8]) >> 1
