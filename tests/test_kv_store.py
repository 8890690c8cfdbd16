"""KVStore: what was written is what is gathered, also after moves and copies."""

import pytest
import torch

from ridgeline.kv.blocks import BlockPool
from ridgeline.kv.store import KVStore, LayerShape, bytes_per_token
from ridgeline.kv.table import BlockTable

TARGET = LayerShape((2, 8), (2, 4), torch.float32)
DRAFT = LayerShape((1, 4), (1, 4), torch.bfloat16)
LATENT = LayerShape((1, 6), (1, 0), torch.float32)
LAYERS = (TARGET, DRAFT, TARGET, LATENT, DRAFT)


@pytest.fixture
def store():
    return KVStore(LAYERS, num_blocks=8, block_size=4, device="cpu")


def random_rows(layer, n, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(n, *shape, generator=rng).to(layer.dtype) for shape in (layer.key, layer.value)
    )


def fill(store):
    """Write random rows to every slot of every layer and return copies of them."""
    every = torch.arange(32)
    for index, layer in enumerate(LAYERS):
        store.write(index, every, *random_rows(layer, 32, seed=index))
    return [store.gather(index, every) for index in range(len(LAYERS))]


def assert_rows(store, rows, expected_slots):
    """Slot i of every layer holds what `rows` has for slot expected_slots[i]."""
    for index in range(len(LAYERS)):
        for now, before in zip(store.gather(index, torch.arange(32)), rows[index], strict=True):
            assert torch.equal(now, before[expected_slots])


def test_append_ten_roll_back_to_six():
    """The source article's own test."""
    pool = BlockPool(8, 4)
    store = KVStore(LAYERS, pool.num_blocks, pool.block_size, "cpu")
    neighbour, table = BlockTable(pool), BlockTable(pool)
    rows = [random_rows(layer, 10, seed=index) for index, layer in enumerate(LAYERS)]
    for i in range(10):
        table.grow(i + 1)
        neighbour.grow(i + 1)
        slot = torch.tensor([table.slot(i)])
        for index, (key, value) in enumerate(rows):
            store.write(index, slot, key[i : i + 1], value[i : i + 1])
    table.shrink(6)
    assert table.capacity == 8
    assert pool.free == 8 - 3 - 2
    for index, (key, value) in enumerate(rows):
        kept_key, kept_value = store.gather(index, torch.tensor(table.slots(0, 6)))
        assert torch.equal(kept_key, key[:6])
        assert torch.equal(kept_value, value[:6])


def test_gather_takes_slots_of_any_shape(store):
    rows = fill(store)
    slots = torch.tensor([[3, 1, 3], [31, 0, 7]])
    for index, layer in enumerate(LAYERS):
        key, value = store.gather(index, slots)
        assert key.shape == (2, 3, *layer.key)
        assert value.shape == (2, 3, *layer.value)
        assert torch.equal(key, rows[index][0][slots])
        assert torch.equal(value, rows[index][1][slots])
    assert store.gather(0, torch.empty(2, 0, dtype=torch.int64))[0].shape == (2, 0, 2, 8)


def test_a_gathered_copy_does_not_follow_later_writes(store):
    rows = fill(store)
    key, _ = store.gather(0, torch.tensor([5]))
    store.write(0, torch.tensor([5]), *random_rows(TARGET, 1, seed=9))
    assert torch.equal(key, rows[0][0][[5]])


def test_layers_do_not_touch_one_another(store):
    rows = fill(store)
    store.write(2, torch.tensor([4]), *random_rows(TARGET, 1, seed=9))
    for index in (0, 1, 3, 4):
        assert torch.equal(store.gather(index, torch.arange(32))[0], rows[index][0])


def test_write_converts_to_the_layers_dtype(store):
    key, value = torch.full((1, 1, 4), 1.001), torch.full((1, 1, 4), 2.0)
    store.write(1, torch.tensor([0]), key, value)
    assert store.gather(1, torch.tensor([0]))[0].dtype == torch.bfloat16
    assert torch.equal(store.gather(1, torch.tensor([0]))[0], key.bfloat16())


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ([5, 7, 8], [4, 5, 6]),
        ([4, 5, 6], [5, 6, 7]),  # overlapping, towards the end
        ([9, 2], [2, 9]),  # a swap
        ([3, 3], [30, 31]),
        ([], []),
    ],
)
def test_move_reads_before_it_writes(store, src, dst):
    rows = fill(store)
    store.move(torch.tensor(src, dtype=torch.int64), torch.tensor(dst, dtype=torch.int64))
    expected = torch.arange(32)
    expected[dst] = torch.tensor(src, dtype=torch.int64)
    assert_rows(store, rows, expected)


def test_copy_blocks(store):
    rows = fill(store)
    store.copy_blocks([(1, 6), (2, 0)])
    expected = torch.arange(32)
    expected[24:28] = torch.arange(4, 8)
    expected[0:4] = torch.arange(8, 12)
    assert_rows(store, rows, expected)
    store.copy_blocks([])
    assert_rows(store, rows, expected)


def test_sizes(store):
    assert bytes_per_token([TARGET]) == (16 + 8) * 4
    assert bytes_per_token([DRAFT]) == 8 * 2
    assert bytes_per_token([LATENT]) == 6 * 4, "a latent layer keeps no values"
    assert store.nbytes == bytes_per_token(LAYERS) * 32
    assert sum(t.nbytes for t in (*store.keys, *store.values)) == store.nbytes


def test_keys_and_values_are_views_of_the_store(store):
    rows = fill(store)
    assert torch.equal(store.keys[4], rows[4][0])
    store.values[0][3] = 0.5
    assert torch.equal(store.gather(0, torch.tensor([3]))[1], torch.full((1, 2, 4), 0.5))
