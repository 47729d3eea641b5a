"""Pins, which protect cached prefixes from eviction for a limited time, within a budget of blocks.

A pin is a block table that no sequence writes to. It references its blocks like any other table, so no other code
needs special cases for pinned blocks. This module divides the budget among tenants and stores when each pin expires.

The budget is divided by weight among the tenants that have pins. A pin that does not fit is shortened. If the budget is
used up, a tenant below its share takes blocks of a tenant above its share, from the pin nearest its end.
"""

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from quire.core.memory.block_table import BlockTable

UNPIN_BLOCKS_AT_ONCE = 4096  # per call of `Pins.take_expired`


@dataclass(frozen=True, slots=True)
class Pin:
    """A prefix that stays cached until a given time, whether it is used or not."""

    pin_id: int
    num_tokens: int
    """Number of pinned tokens: the cached whole blocks of the prefix, as far as the budget allows; possibly 0."""
    expires_s: float


class Pins:
    """The block tables of all pins. A block with several pins counts once."""

    def __init__(self, num_blocks: int, budget_blocks: int, max_pins: int) -> None:
        self.budget_blocks = budget_blocks
        self.max_pins = max_pins
        self.weights: Mapping[str, float] = {}
        """Tenant -> weight of its share; 1 for tenants that are not listed."""
        self.num_pinned_blocks = 0
        self.num_yielded = 0
        """Number of pins that lost blocks before their end: to a request, or to a tenant below its share."""
        self.tables: dict[int, BlockTable] = {}
        self.holders: dict[int, tuple[str, float]] = {}
        """Pin id -> its tenant and when it expires."""
        self.pin_count = array("i", bytes(4 * (num_blocks + 1)))
        self.num_of_tenant: dict[str, Counter[int]] = {}
        """Tenant -> number of its pins by block."""
        self._pin_at: dict[tuple[str, int], int] = {}
        """A tenant and the last block of one of its pins -> the pin."""
        self._expiries: list[tuple[float, int]] = []

    def shares(self, tenant: str) -> dict[str, int]:
        """Return how many blocks this tenant, and each tenant that has pins now, may pin."""
        weights = {name: self.weights.get(name, 1.0) for name in (*self.num_of_tenant, tenant)}
        total = sum(weights.values())
        return {name: int(self.budget_blocks * weight / total) for name, weight in weights.items()}

    def num_fitting(self, tenant: str, blocks: Sequence[int]) -> int:
        """Return how many leading blocks a new pin of this tenant may hold."""
        own: Mapping[int, int] = self.num_of_tenant.get(tenant, {})
        if len(self.tables) >= self.max_pins:
            return 0
        num_left, num_left_of_tenant = (
            self.budget_blocks - self.num_pinned_blocks,
            self.shares(tenant)[tenant] - len(own),
        )
        for index, block in enumerate(blocks):
            num_left -= not self.pin_count[block]
            num_left_of_tenant -= block not in own
            if num_left < 0 or num_left_of_tenant < 0:
                return index
        return len(blocks)

    def next_above_share(self, tenant: str) -> tuple[int, int] | None:
        """Return the pin nearest its end of another tenant above its share, and how many blocks above it that tenant
        holds; None if there is no such tenant, or this tenant has its share, too."""
        shares = self.shares(tenant)
        if len(self.num_of_tenant.get(tenant, ())) >= shares[tenant]:
            return None
        above = {name: len(own) - shares[name] for name, own in self.num_of_tenant.items() if len(own) > shares[name]}
        pins = ((expires_s, pin_id) for pin_id, (name, expires_s) in self.holders.items() if name in above)
        _, pin_id = min(pins, default=(0.0, 0))
        return (pin_id, above[self.holders[pin_id][0]]) if pin_id else None

    def covering(self, tenant: str, block: int, expires_s: float) -> Pin | None:
        """Return the tenant's pin that ends with this block, if it lasts at least until then."""
        pin_id = self._pin_at.get((tenant, block))
        if pin_id is None or self.holders[pin_id][1] < expires_s:
            return None
        table = self.tables[pin_id]
        return Pin(pin_id, len(table.blocks) * table.block_size, self.holders[pin_id][1])

    def add(self, table: BlockTable, tenant: str, expires_s: float) -> list[int]:
        """Add a pin's table, whose blocks fit (`num_fitting`). Returns the tenant's pins that it replaces: prefixes of
        it that expire no later. The caller ends these."""
        own, replaced = self.num_of_tenant.setdefault(tenant, Counter()), list[int]()
        for block in table.blocks:
            self.num_pinned_blocks += not self.pin_count[block]
            self.pin_count[block] += 1
            own[block] += 1
            pin_id = self._pin_at.get((tenant, block))
            if pin_id is not None and self.holders[pin_id][1] <= expires_s:
                replaced.append(pin_id)
        self.tables[table.table_id] = table
        self.holders[table.table_id] = tenant, expires_s
        self._pin_at[tenant, table.blocks[-1]] = table.table_id
        heappush(self._expiries, (expires_s, table.table_id))
        return replaced

    def drop(self, pin_id: int) -> BlockTable | None:
        """Remove a pin and return its table, which the caller releases; None if the pin has already ended."""
        table = self.tables.get(pin_id)
        if table is None:
            return None
        self._uncount(pin_id, table.blocks)
        self._forget(pin_id)
        if len(self._expiries) > 2 * len(self.tables) + 64:
            # Pins that were ended early leave stale entries in the heap; remove these once they are the majority.
            self._expiries = [(expires_s, pin_id) for pin_id, (_, expires_s) in self.holders.items()]
            heapify(self._expiries)
        return table

    def expire_next(self, now_s: float) -> bool:
        """Let the pin nearest its end expire now. Returns False if no pin is left or an expired one is not released."""
        pins = [(expires_s, pin_id) for pin_id, (_, expires_s) in self.holders.items()]
        expires_s, pin_id = min(pins, default=(now_s, 0))
        if expires_s <= now_s:
            return False
        self.holders[pin_id] = self.holders[pin_id][0], now_s
        heappush(self._expiries, (now_s, pin_id))
        return True

    def take_expired(self, now_s: float) -> Iterator[tuple[BlockTable, list[int]]]:
        """Yield the tables of expired pins, each with the blocks that the caller must release, last block first.

        A call yields at most `UNPIN_BLOCKS_AT_ONCE` blocks, so that no step is delayed for long; a long pin is released
        from its tail over several calls. A pin has ended when its table is empty.
        """
        num_left = UNPIN_BLOCKS_AT_ONCE
        while self._expiries and self._expiries[0][0] <= now_s and num_left > 0:
            pin_id = self._expiries[0][1]
            table = self.tables.get(pin_id)
            if table is None:
                heappop(self._expiries)
                continue
            blocks = self.shorten(pin_id, num_left)
            num_left -= len(blocks)
            yield table, blocks

    def shorten(self, pin_id: int, num_blocks: int) -> list[int]:
        """Remove up to this many blocks from the tail of a pin, and return them, last block first. The caller releases
        them, and the table if it is empty: then the pin has ended."""
        table, (tenant, _) = self.tables[pin_id], self.holders[pin_id]
        blocks = table.blocks[-num_blocks:]
        self._uncount(pin_id, blocks)
        del table.blocks[-num_blocks:]
        table.num_computed = table.num_reserved = len(table.blocks) * table.block_size
        if table.blocks:
            self._pin_at.setdefault((tenant, table.blocks[-1]), pin_id)
        else:
            self._forget(pin_id)
        return blocks[::-1]

    def drop_all(self) -> list[BlockTable]:
        """Remove all pins and return their tables."""
        tables = list(self.tables.values())
        self.tables, self.holders, self._pin_at, self._expiries, self.num_of_tenant = {}, {}, {}, [], {}
        for table in tables:
            for block in table.blocks:
                self.pin_count[block] = 0
        self.num_pinned_blocks = 0
        return tables

    def select_unpinned(self, blocks: list[int]) -> list[int]:
        """Return those of these blocks that are in no pin any more."""
        return [block for block in blocks if not self.pin_count[block]]

    def _forget(self, pin_id: int) -> None:
        tenant, _ = self.holders.pop(pin_id)
        del self.tables[pin_id]
        if not self.num_of_tenant[tenant]:
            del self.num_of_tenant[tenant]

    def _uncount(self, pin_id: int, blocks: list[int]) -> None:
        """Remove the last blocks of a pin from all counts."""
        tenant, _ = self.holders[pin_id]
        own, place = self.num_of_tenant[tenant], (tenant, blocks[-1])
        if self._pin_at.get(place) == pin_id:
            del self._pin_at[place]
        for block in blocks:
            self.pin_count[block] -= 1
            self.num_pinned_blocks -= self.pin_count[block] == 0
            own[block] -= 1
            if not own[block]:
                del own[block]
