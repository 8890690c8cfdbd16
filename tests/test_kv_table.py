"""BlockTable: growing, rolling back, forking, copy on write."""

import numpy as np
import pytest

from ridgeline.errors import OutOfBlocksError
from ridgeline.kv.blocks import BlockPool, block_hashes
from ridgeline.kv.table import BlockTable


def grown(pool, n):
    table = BlockTable(pool)
    table.grow(n)
    return table


def test_slots_follow_the_blocks():
    pool = BlockPool(8, 4)
    pool.allocate(1)
    table = BlockTable(pool)
    table.adopt([6, 2, 5])
    assert table.capacity == 12
    expected = [24, 25, 26, 27, 8, 9, 10, 11, 20, 21, 22, 23]
    assert table.slots(0, 12).tolist() == expected
    assert [table.slot(i) for i in range(12)] == expected
    assert table.slots(3, 5).tolist() == [27, 8]
    assert table.slots(12, 12).size == 0
    with pytest.raises(AssertionError, match="not within 12"):
        table.slots(10, 13)
    with pytest.raises(IndexError):
        table.slot(12)


def test_slots_are_a_read_only_view():
    table = grown(BlockPool(4, 4), 16)
    view = table.slots(2, 9)
    assert view.dtype == np.int64
    assert np.shares_memory(view, table.slots(0, 16)), "no work for each token"
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_growing_keeps_the_slots_there_are():
    pool = BlockPool(300, 4)
    table, other = BlockTable(pool), BlockTable(pool)
    before = []
    for n in range(1, 500):
        table.grow(n)
        other.grow(n)  # so that blocks are not consecutive
        assert table.slots(0, n).tolist()[:-1] == before
        before = table.slots(0, n).tolist()
        assert len(table.blocks) == -(-n // 4)
    pool.check([table, other])
    table.grow(3)
    assert table.capacity == 500, "growing never takes anything away"


def test_growing_is_all_or_nothing():
    pool = BlockPool(3, 4)
    table = grown(pool, 5)
    with pytest.raises(OutOfBlocksError):
        table.grow(13)
    assert (table.capacity, pool.free) == (8, 1)
    pool.check([table])


def test_shrinking_releases_what_is_not_needed():
    pool = BlockPool(8, 4)
    table = grown(pool, 20)
    for n, blocks in [(17, 5), (16, 4), (13, 4), (5, 2), (1, 1), (0, 0)]:
        table.shrink(n)
        assert (len(table.blocks), pool.used) == (blocks, blocks)
        pool.check([table])


def test_a_fork_shares_until_it_writes():
    pool = BlockPool(8, 4)
    table = grown(pool, 10)
    fork = table.fork()
    assert fork.blocks == table.blocks
    assert pool.used == 3
    pool.check([table, fork])

    first, _, last = table.blocks
    pairs = fork.writable(10, 12)
    assert pairs == [(last, fork.blocks[2])], "only the block that is written to"
    assert fork.blocks[:2] == table.blocks[:2]
    assert fork.blocks[2] != last
    assert fork.writable(10, 12) == [], "it is its own now"
    assert table.writable(10, 12) == [], "and the other table's too"
    pool.check([table, fork])

    table.release()
    assert pool.refcount(first) == 1
    pool.check([fork])


def test_writable_spans_exactly_the_blocks_of_its_range():
    pool = BlockPool(16, 4)
    table = grown(pool, 16)
    for lo, hi, touched in [(0, 0, []), (8, 8, []), (3, 5, [0, 1]), (4, 8, [1]), (0, 16, range(4))]:
        fork = table.fork()
        assert [old for old, _ in fork.writable(lo, hi)] == [table.blocks[i] for i in touched]
        pool.check([table, fork])
        fork.release()


def test_writable_is_all_or_nothing():
    pool = BlockPool(3, 4)
    table = grown(pool, 8)
    fork = table.fork()
    with pytest.raises(OutOfBlocksError):
        fork.writable(0, 8)
    assert fork.blocks == table.blocks
    pool.check([table, fork])


def test_writing_to_a_sealed_block_takes_its_seal_off():
    pool = BlockPool(4, 4)
    table = grown(pool, 8)
    hashes = block_hashes(range(8), 4)
    for block, digest in zip(table.blocks, hashes, strict=True):
        pool.seal(block, digest)
    assert table.writable(6, 8) == []
    assert pool.match(hashes) == table.blocks[:1], "the second block's content is no longer known"


def test_a_matched_prefix_is_adopted():
    pool = BlockPool(6, 4)
    table = grown(pool, 9)
    hashes = block_hashes(range(9), 4)
    for block, digest in zip(table.blocks, hashes, strict=False):
        pool.seal(block, digest)
    other = BlockTable(pool)
    other.adopt(pool.match(hashes))
    assert other.blocks == table.blocks[:2]
    pool.check([table, other])
    with pytest.raises(AssertionError, match="empty table"):
        other.adopt([])


def test_a_released_table_can_be_used_again():
    pool = BlockPool(4, 4)
    table = grown(pool, 16)
    table.release()
    assert (table.capacity, pool.free) == (0, 4)
    table.grow(2)
    pool.check([table])


def test_the_end_of_a_released_sequence_is_reused_before_its_start():
    pool = BlockPool(3, 4)
    table = grown(pool, 12)
    hashes = block_hashes(range(12), 4)
    for block, digest in zip(table.blocks, hashes, strict=True):
        pool.seal(block, digest)
    blocks = table.blocks.copy()
    table.release()
    assert pool.allocate(1) == blocks[2:]
    assert pool.match(hashes) == blocks[:2], "what is left can still be matched"
