"""BlockPool: counting, reuse, and finding blocks by their content."""

import pytest

from ridgeline.errors import ConfigError, OutOfBlocksError
from ridgeline.kv.blocks import BlockPool, block_hashes
from ridgeline.kv.table import BlockTable


def sealed_chain(pool, tokens):
    """Blocks of `tokens`, sealed and held."""
    hashes = block_hashes(tokens, pool.block_size)
    blocks = pool.allocate(len(hashes))
    for block, digest in zip(blocks, hashes, strict=True):
        pool.seal(block, digest)
    return blocks, hashes


def release_all(pool, blocks):
    for block in reversed(blocks):
        pool.release(block)


def test_allocation_is_all_or_nothing():
    pool = BlockPool(4)
    assert sorted(pool.allocate(3)) == [0, 1, 2]
    with pytest.raises(OutOfBlocksError, match=r"2 more .* 1 of 4 are free"):
        pool.allocate(2)
    assert (pool.free, pool.used) == (1, 3)
    pool.check()
    assert pool.allocate(0) == []


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (-1, 16), (4, 0)])
def test_an_empty_pool_is_refused(num_blocks, block_size):
    with pytest.raises(ConfigError, match="at least one block"):
        BlockPool(num_blocks, block_size)


def test_a_shared_block_is_free_after_its_last_release():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.share(block)
    assert pool.refcount(block) == 2
    pool.release(block)
    assert (pool.refcount(block), pool.used) == (1, 1)
    pool.release(block)
    assert (pool.refcount(block), pool.free) == (0, 2)
    pool.check([])


def test_a_free_block_can_be_neither_released_shared_nor_sealed():
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="already free"):
        pool.release(0)
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.share(0)
    with pytest.raises(AssertionError, match="cannot be sealed"):
        pool.seal(0, b"x")


def test_hashes_cover_full_blocks_and_all_before_them():
    tokens = list(range(10))
    hashes = block_hashes(tokens, 4)
    assert len(hashes) == 2
    assert block_hashes(tokens[:8], 4) == hashes
    assert block_hashes(tokens[4:], 4, parent=hashes[0]) == hashes[1:]
    changed = block_hashes([99, *tokens[1:]], 4)
    assert changed[0] != hashes[0]
    assert changed[1] != hashes[1], "the second block has the same tokens but another prefix"
    assert block_hashes([7] * 8, 4)[0] != block_hashes([7] * 8, 4)[1]


def test_a_salt_keeps_equal_prefixes_apart():
    plain, salted = block_hashes(range(8), 4), block_hashes(range(8), 4, parent=b"tenant")
    assert not set(plain) & set(salted)
    assert salted == block_hashes(range(8), 4, parent=b"tenant")


def test_hashes_are_the_same_in_every_process():
    assert block_hashes([1, 2, 3, 4], 4)[0].hex() == "087a24230771ee662be37e5493b333d7"


def test_match_shares_the_longest_sealed_run():
    pool = BlockPool(8, 4)
    blocks, hashes = sealed_chain(pool, list(range(12)))
    assert pool.match(hashes) == blocks
    assert [pool.refcount(block) for block in blocks] == [2, 2, 2]
    assert pool.match([b"unknown", *hashes]) == []
    assert pool.match([hashes[0], b"unknown", hashes[2]]) == blocks[:1]
    assert pool.refcount(blocks[0]) == 3


def test_match_revives_free_sealed_blocks():
    pool = BlockPool(3, 4)
    blocks, hashes = sealed_chain(pool, list(range(8)))
    release_all(pool, blocks)
    assert (pool.free, pool.used) == (3, 0)
    assert pool.match(hashes) == blocks
    assert (pool.free, pool.used) == (1, 2)
    pool.check()
    with pytest.raises(OutOfBlocksError):
        pool.allocate(2)


def test_blank_blocks_go_first_then_the_least_recently_used_sealed_ones():
    pool = BlockPool(6, 4)
    old, old_hashes = sealed_chain(pool, [1] * 8)
    young, young_hashes = sealed_chain(pool, [2] * 8)
    release_all(pool, old)
    release_all(pool, young)
    # Using the old ones once more makes them the younger ones.
    release_all(pool, pool.match(old_hashes))

    assert not set(pool.allocate(2)) & {*old, *young}, "two were blank"
    assert pool.allocate(1) == young[1:], "of a released sequence, its end goes before its start"
    assert pool.match(young_hashes) == young[:1]
    pool.release(young[0])
    assert pool.allocate(2) == old[::-1], "the revived one was used last"
    assert pool.match(old_hashes) == []
    pool.check()


def test_sealing_a_known_hash_keeps_the_first_block():
    pool = BlockPool(4, 4)
    (first,), (digest,) = sealed_chain(pool, [5] * 4)
    (second,) = pool.allocate(1)
    pool.seal(second, digest)
    assert pool.match([digest]) == [first]
    pool.check()
    pool.release(second)
    assert pool.allocate(1) == [second], "it was never sealed, so it is blank again"


def test_resealing_with_other_content_is_an_error():
    pool = BlockPool(2, 4)
    (block,), (digest,) = sealed_chain(pool, [5] * 4)
    pool.seal(block, digest)
    with pytest.raises(AssertionError, match="sealed as something else"):
        pool.seal(block, b"other")
    pool.unseal(block)
    assert pool.match([digest]) == []
    pool.seal(block, b"other")
    assert pool.match([b"other"]) == [block]


CORRUPTIONS = {
    "a count too high": lambda pool: pool._refcounts.__setitem__(0, 2),
    "a negative count": lambda pool: pool._refcounts.__setitem__(3, -1),
    "free and used": lambda pool: pool._blank.append(0),
    "free twice": lambda pool: pool._blank.append(pool._blank[0]),
    "lost": lambda pool: pool._blank.pop(),
    "indexed but not sealed": lambda pool: pool._sealed.__setitem__(b"x", 1),
    "sealed but not indexed": lambda pool: pool._hashes.__setitem__(1, b"x"),
    "one hash, two blocks": lambda pool: pool._hashes.__setitem__(1, pool._hashes[0]),
    "blank but sealed": lambda pool: (
        pool._hashes.__setitem__(pool._blank[0], b"x"),
        pool._sealed.__setitem__(b"x", pool._blank[0]),
    ),
    "revivable but not sealed": lambda pool: pool._revivable.__setitem__(pool._blank.pop(), None),
}


@pytest.mark.parametrize("fault", CORRUPTIONS)
def test_check_notices(fault):
    pool = BlockPool(4, 4)
    table = BlockTable(pool)
    table.grow(8)
    pool.seal(table.blocks[0], block_hashes([0] * 4, 4)[0])
    pool.check([table])
    CORRUPTIONS[fault](pool)
    with pytest.raises(AssertionError):
        pool.check([table])


def test_check_compares_the_counts_with_the_tables():
    pool = BlockPool(4, 4)
    table = BlockTable(pool)
    table.grow(8)
    pool.check([table])
    with pytest.raises(AssertionError, match="number of tables"):
        pool.check([])
    with pytest.raises(AssertionError, match="number of tables"):
        pool.check([table, table])
    table._slots[5] += 1
    with pytest.raises(AssertionError, match="stale"):
        pool.check([table])
