"""BlockPool: who holds which block of the cache, and which full blocks can be found by content.

The pool deals in block numbers only; the tensors behind them are in `ridgeline.kv.store`. A block
is in one of three states:

- used: held by one or more tables; its reference count is the number of them;
- free and sealed: held by nobody, but its content is known by hash and can be revived;
- free and blank: held by nobody, content worthless.

Paging as in PagedAttention (Kwon et al. 2023, arXiv 2309.06180). A hash covers a block and all
before it, so equal hashes mean equal prefixes and therefore equal keys and values.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from ridgeline.errors import ConfigError, OutOfBlocksError

if TYPE_CHECKING:
    from ridgeline.kv.table import BlockTable

HASH_BYTES = 16


def block_hashes(tokens: Sequence[int], block_size: int, parent: bytes = b"") -> list[bytes]:
    """Hash every full block of `tokens`, each chained to the one before.

    `parent` is the hash of the block before the first one. For the first block of a sequence it
    is empty, or a salt: sequences with different salts never share blocks. Tokens behind the last
    full block are left out. 16 bytes of BLAKE2b each, so that a collision need not be feared.
    """
    full = len(tokens) // block_size
    data = np.asarray(tokens[: full * block_size], dtype="<i8").tobytes()
    step = block_size * 8
    hashes = []
    for start in range(0, full * step, step):
        parent = blake2b(parent + data[start : start + step], digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens, reference counted, with a prefix index.

    Raises ConfigError when either size is below one.
    """

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(
                f"a cache of {num_blocks} blocks of {block_size} tokens is empty: "
                "it needs at least one block of one token"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._refcounts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._sealed: dict[bytes, int] = {}
        # A stack, so that memory touched last is used first; block 0 comes first of all.
        self._blank = list(range(num_blocks - 1, -1, -1))
        # Free sealed blocks, the least recently used first.
        self._revivable: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Blocks that nobody holds, the sealed ones among them included."""
        return len(self._blank) + len(self._revivable)

    @property
    def used(self) -> int:
        """Blocks that some table holds."""
        return self.num_blocks - self.free

    def refcount(self, block: int) -> int:
        """The number of tables that hold `block`."""
        return self._refcounts[block]

    def allocate(self, n: int) -> list[int]:
        """Take `n` free blocks, each with reference count one.

        Blank blocks go first, then sealed ones, the least recently used first: these lose their
        hash. Raises OutOfBlocksError when fewer than `n` are free; nothing has changed then.
        """
        if n > self.free:
            raise OutOfBlocksError(
                f"{n} more cache blocks are needed but {self.free} of {self.num_blocks} are free: "
                "enlarge the cache, or run fewer or shorter requests at once"
            )
        blocks = []
        for _ in range(n):
            if self._blank:
                block = self._blank.pop()
            else:
                block, _ = self._revivable.popitem(last=False)
                self.unseal(block)
            self._refcounts[block] = 1
            blocks.append(block)
        return blocks

    def share(self, block: int) -> None:
        """Count one more holder of a used block."""
        assert self._refcounts[block] > 0, f"block {block} is free and cannot be shared"
        self._refcounts[block] += 1

    def release(self, block: int) -> None:
        """Count one holder less; without any the block is free, and still sealed if it was.

        Release a table's blocks from the last to the first: then the ends of old prefixes are
        reused before their beginnings, without which the ends could not be matched.
        """
        assert self._refcounts[block] > 0, f"block {block} is already free"
        self._refcounts[block] -= 1
        if self._refcounts[block] == 0:
            if self._hashes[block] is None:
                self._blank.append(block)
            else:
                self._revivable[block] = None

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest run of `hashes` that is sealed, from the first on.

        The caller now holds each of them (reference count + 1); free ones are revived.
        """
        blocks = []
        for digest in hashes:
            block = self._sealed.get(digest)
            if block is None:
                break
            if self._refcounts[block] == 0:
                del self._revivable[block]
            self._refcounts[block] += 1
            blocks.append(block)
        return blocks

    def seal(self, block: int, digest: bytes) -> None:
        """Make a used block findable: it is full, and every layer of it is committed.

        A hash that another block bears already stays with that block.
        """
        assert self._refcounts[block] > 0, f"block {block} is free and cannot be sealed"
        assert self._hashes[block] in (None, digest), f"block {block} is sealed as something else"
        if digest not in self._sealed:
            self._sealed[digest] = block
            self._hashes[block] = digest

    def unseal(self, block: int) -> None:
        """Forget the hash of `block`, if any, because its content is about to change."""
        digest = self._hashes[block]
        if digest is not None:
            del self._sealed[digest]
            self._hashes[block] = None

    def check(self, tables: Iterable[BlockTable] | None = None) -> None:
        """Assert every invariant; given all tables, that they and the counts agree as well."""
        free = self._blank + list(self._revivable)
        assert len(free) == len(set(free)), "a block is free twice"
        used = {block for block, count in enumerate(self._refcounts) if count > 0}
        assert min(self._refcounts) >= 0, "a reference count is negative"
        assert not used & set(free), "a block is both free and used"
        assert len(used) + len(free) == self.num_blocks, "a block is neither free nor used"
        assert (self.used, self.free) == (len(used), len(free)), "the totals are wrong"

        sealed = [(digest, block) for block, digest in enumerate(self._hashes) if digest]
        assert sorted(self._sealed.items()) == sorted(sealed), "the prefix index is wrong"
        unsealed = {block for block, digest in enumerate(self._hashes) if not digest}
        assert unsealed >= set(self._blank), "a blank block is sealed"
        assert not unsealed & self._revivable.keys(), "a block can be revived but is not sealed"

        if tables is not None:
            held: Counter[int] = Counter()
            for table in tables:
                table.check()
                held.update(table.blocks)
            counts = {block: self._refcounts[block] for block in used}
            assert counts == held, "reference counts differ from the number of tables"
