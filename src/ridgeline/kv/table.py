"""BlockTable: where one sequence's tokens lie in the cache.

Token i lies in slot `blocks[i // block_size] * block_size + i % block_size` of every layer. The
table knows blocks and capacity, never a length: rolling a chain back is the caller's smaller
length and, when it wants the memory back, `shrink`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ridgeline.kv.blocks import BlockPool


class BlockTable:
    """The blocks of one sequence, in order. Every method costs O(blocks touched)."""

    def __init__(self, pool: BlockPool) -> None:
        self.blocks: list[int] = []
        self._pool = pool
        # Slots of all tokens up to the capacity; longer than that, it is doubled when too short.
        self._slots = np.empty(0, dtype=np.int64)

    @property
    def capacity(self) -> int:
        """The number of tokens that the blocks have room for."""
        return len(self.blocks) * self._pool.block_size

    def slot(self, i: int) -> int:
        """The slot of token `i`; IndexError beyond the capacity."""
        index, offset = divmod(i, self._pool.block_size)
        return self.blocks[index] * self._pool.block_size + offset

    def slots(self, lo: int, hi: int) -> NDArray[np.int64]:
        """The slots of tokens lo to hi-1, i64[hi-lo].

        A read-only view, valid until the table changes: copy it to keep it longer.
        """
        assert 0 <= lo <= hi <= self.capacity, f"tokens {lo} to {hi} are not within {self.capacity}"
        view = self._slots[lo:hi]
        view.flags.writeable = False
        return view

    def grow(self, n: int) -> None:
        """Make room for `n` tokens in all.

        Raises OutOfBlocksError when the pool has too few blocks; nothing has changed then.
        """
        missing = self._blocks_for(n) - len(self.blocks)
        if missing > 0:
            self._extend(self._pool.allocate(missing))

    def shrink(self, n: int) -> None:
        """Release the blocks that the first `n` tokens do not need, the last one first."""
        keep = self._blocks_for(n)
        for block in reversed(self.blocks[keep:]):
            self._pool.release(block)
        del self.blocks[keep:]

    def fork(self) -> BlockTable:
        """A second table over the same blocks, each shared; `writable` separates them later."""
        for block in self.blocks:
            self._pool.share(block)
        other = BlockTable(self._pool)
        other.adopt(self.blocks)
        return other

    def writable(self, lo: int, hi: int) -> list[tuple[int, int]]:
        """Make tokens lo to hi-1 this table's own, so that they may be written (copy on write).

        Blocks shared with others are replaced by new ones; returns (old block, new block) pairs,
        whose content the caller copies (`KVStore.copy_blocks`) before it writes anything. Blocks
        held alone lose their seal. Raises OutOfBlocksError; nothing has changed then.
        """
        assert 0 <= lo <= hi <= self.capacity, f"tokens {lo} to {hi} are not within {self.capacity}"
        touched = range(lo // self._pool.block_size, self._blocks_for(hi)) if lo < hi else range(0)
        shared = [i for i in touched if self._pool.refcount(self.blocks[i]) > 1]
        pairs = []
        for i, new in zip(shared, self._pool.allocate(len(shared)), strict=True):
            pairs.append((self.blocks[i], new))
            self._pool.release(self.blocks[i])
            self.blocks[i] = new
            self._fill(i, [new])
        for i in touched:
            self._pool.unseal(self.blocks[i])
        return pairs

    def adopt(self, blocks: Sequence[int]) -> None:
        """Begin with blocks already counted for this table, as `BlockPool.match` returns them."""
        assert not self.blocks, "only an empty table can adopt a prefix"
        self._extend(blocks)

    def release(self) -> None:
        """Release every block; the table is empty then and may be used again."""
        self.shrink(0)

    def check(self) -> None:
        """Assert that no block is held twice and that the slots are those of the blocks."""
        assert len(self.blocks) == len(set(self.blocks)), "a table holds a block twice"
        index, offset = np.divmod(np.arange(self.capacity), self._pool.block_size)
        slots = np.asarray(self.blocks, dtype=np.int64)[index] * self._pool.block_size + offset
        assert np.array_equal(self.slots(0, self.capacity), slots), "a table's slots are stale"

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._pool.block_size)

    def _extend(self, blocks: Sequence[int]) -> None:
        first = len(self.blocks)
        self.blocks.extend(blocks)
        if self.capacity > len(self._slots):
            longer = np.empty(max(self.capacity, 2 * len(self._slots)), dtype=np.int64)
            longer[: len(self._slots)] = self._slots
            self._slots = longer
        self._fill(first, blocks)

    def _fill(self, first: int, blocks: Sequence[int]) -> None:
        """Write the slots of `blocks`, which are the table's from index `first` on."""
        size = self._pool.block_size
        starts = np.asarray(blocks, dtype=np.int64) * size
        slots = self._slots[first * size : (first + len(blocks)) * size]
        slots.reshape(-1, size)[:] = starts[:, None] + np.arange(size)
