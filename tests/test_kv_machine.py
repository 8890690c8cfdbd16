"""A Hypothesis state machine over pool, tables and store, against a cache that has no pages.

Any number of sequences share one small pool. After every action the pool's invariants hold, every
sequence holds just the blocks that it needs, and gathers what a naive cache of its own holds.
"""

import sys
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ridgeline.errors import OutOfBlocksError
from ridgeline.kv import blocks
from ridgeline.kv.blocks import BlockPool, block_hashes
from ridgeline.kv.store import KVStore, LayerShape
from ridgeline.kv.table import BlockTable

BLOCK_SIZE, NUM_BLOCKS, MAX_SEQUENCES = 4, 12, 5
# A grouped-query layer, a latent one without values, and a drafter's layer in another dtype.
LAYERS = (
    LayerShape((2, 3), (2, 2), torch.float32),
    LayerShape((1, 5), (1, 0), torch.float32),
    LayerShape((1, 2), (1, 2), torch.bfloat16),
)
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=2 * BLOCK_SIZE + 1)
NUMBER = st.integers(0, 1000)


def rows(prefixes, layer):
    """Keys and values of the last token of each prefix: like a model's, they depend on all of it.

    Whole numbers up to 255, which bfloat16 represents exactly.
    """
    shape, seed, n = LAYERS[layer], bytes([layer]), len(prefixes)
    digests = [blake2b(seed + bytes(prefix), digest_size=16).digest() for prefix in prefixes]
    numbers = torch.tensor(np.frombuffer(b"".join(digests), np.uint8).reshape(n, 16))
    size = shape.key[0] * shape.key[1]
    key = numbers[:, :size].reshape(n, *shape.key)
    value = numbers[:, size : size + shape.value[0] * shape.value[1]].reshape(n, *shape.value)
    return key.to(shape.dtype), value.to(shape.dtype)


class NaiveCache:
    """Plain tensors, concatenated to append and sliced to roll back."""

    def __init__(self):
        self.layers = [rows([], layer) for layer in range(len(LAYERS))]

    def append(self, prefixes):
        self.layers = [
            tuple(torch.cat(pair) for pair in zip(past, rows(prefixes, layer), strict=True))
            for layer, past in enumerate(self.layers)
        ]

    def roll_back(self, n):
        self.layers = [(key[:n], value[:n]) for key, value in self.layers]


@dataclass
class Sequence:
    table: BlockTable
    tokens: list[int] = field(default_factory=list)
    naive: NaiveCache = field(default_factory=NaiveCache)


def is_running(machine):
    return bool(machine.running)


def has_room(machine):
    return len(machine.running) < MAX_SEQUENCES


class CacheMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.store = KVStore(LAYERS, NUM_BLOCKS, BLOCK_SIZE, "cpu")
        for layer in range(len(LAYERS)):  # whoever reads a slot that was never written gets NaN
            self.store.keys[layer].fill_(torch.nan)
            self.store.values[layer].fill_(torch.nan)
        self.running = []
        self.waiting = []

    def pick(self, number):
        return self.running[number % len(self.running)]

    def write(self, sequence, prefixes):
        """Write the last tokens of `prefixes` behind the committed ones, into the pages only."""
        lo, hi = len(sequence.tokens), len(sequence.tokens) + len(prefixes)
        try:
            sequence.table.grow(hi)
            self.store.copy_blocks(sequence.table.writable(lo, hi))
        except OutOfBlocksError:
            sequence.table.shrink(lo)
            return False
        slots = torch.tensor(sequence.table.slots(lo, hi))
        for layer in range(len(LAYERS)):
            self.store.write(layer, slots, *rows(prefixes, layer))
        return True

    def extend(self, sequence, tokens):
        """Append tokens: to pages and naive cache, or to neither when the blocks run out."""
        longer = sequence.tokens + tokens
        prefixes = [longer[: i + 1] for i in range(len(sequence.tokens), len(longer))]
        fits = self.write(sequence, prefixes)
        if fits:
            sequence.naive.append(prefixes)
            sequence.tokens = longer
        return fits

    def begin(self, tokens):
        """Take what is cached of `tokens` from the pool, compute the rest."""
        sequence = Sequence(BlockTable(self.pool))
        sequence.table.adopt(self.pool.match(block_hashes(tokens, BLOCK_SIZE)))
        sequence.tokens = tokens[: sequence.table.capacity]
        sequence.naive.append([tokens[: i + 1] for i in range(len(sequence.tokens))])
        if self.extend(sequence, tokens[len(sequence.tokens) :]):
            self.running.append(sequence)
            return True
        sequence.table.release()
        return False

    @precondition(has_room)
    @rule(length=st.integers(1, 4 * BLOCK_SIZE + 1), change=st.integers(0, 4 * BLOCK_SIZE))
    def start(self, length, change):
        """Begin a prompt of zeros but for one token, so that many prompts begin alike."""
        self.begin([int(i == change) for i in range(length)])

    @precondition(lambda machine: is_running(machine) and has_room(machine))
    @rule(number=NUMBER, tokens=TOKENS)
    def fork(self, number, tokens):
        """Begin a second sequence that goes on from the first one's tokens with others."""
        parent = self.pick(number)
        child = Sequence(parent.table.fork(), list(parent.tokens))
        child.naive.layers = parent.naive.layers
        self.running.append(child)
        self.extend(child, tokens)

    @precondition(is_running)
    @rule(number=NUMBER, tokens=TOKENS)
    def append(self, number, tokens):
        self.extend(self.pick(number), tokens)

    @precondition(is_running)
    @rule(number=NUMBER, length=NUMBER)
    def roll_back(self, number, length):
        sequence = self.pick(number)
        length %= len(sequence.tokens) + 1
        sequence.table.shrink(length)
        sequence.tokens = sequence.tokens[:length]
        sequence.naive.roll_back(length)

    @precondition(is_running)
    @rule(
        number=NUMBER,
        nodes=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 1)), min_size=1, max_size=7),
        leaf=NUMBER,
    )
    def commit_tree(self, number, nodes, leaf):
        """Write a tree of nodes (distance to the parent, token), accept the path to one of them."""
        sequence = self.pick(number)
        parents, prefixes, base = [-1], [[*sequence.tokens, nodes[0][1]]], len(sequence.tokens)
        for i, (distance, token) in enumerate(nodes[1:], start=1):
            parents.append(max(0, i - distance))
            prefixes.append([*prefixes[parents[i]], token])
        if not self.write(sequence, prefixes):
            return
        path = []
        node = leaf % len(nodes)
        while node >= 0:
            path.insert(0, node)
            node = parents[node]
        slots = torch.tensor(sequence.table.slots(base, base + len(nodes)))
        self.store.move(slots[path], slots[: len(path)])
        sequence.tokens = prefixes[path[-1]]
        sequence.table.shrink(len(sequence.tokens))
        sequence.naive.append([prefixes[node] for node in path])

    @precondition(is_running)
    @rule()
    def seal(self):
        for sequence in self.running:
            hashes = block_hashes(sequence.tokens, BLOCK_SIZE)
            for block, digest in zip(sequence.table.blocks, hashes, strict=False):
                self.pool.seal(block, digest)

    @precondition(is_running)
    @rule(number=NUMBER)
    def preempt(self, number):
        sequence = self.pick(number)
        self.running.remove(sequence)
        sequence.table.release()
        self.waiting.append(sequence.tokens)

    @precondition(lambda machine: machine.waiting and has_room(machine))
    @rule()
    def resume(self):
        if self.begin(self.waiting[0]):
            del self.waiting[0]

    @precondition(is_running)
    @rule(number=NUMBER)
    def abort(self, number):
        sequence = self.pick(number)
        self.running.remove(sequence)
        sequence.table.release()

    @invariant()
    def pool_is_sound(self):
        self.pool.check([sequence.table for sequence in self.running])
        for sequence in self.running:
            needed = -(-len(sequence.tokens) // BLOCK_SIZE)
            assert len(sequence.table.blocks) == needed, "a table holds more or less than it needs"

    @invariant()
    def contents_equal_the_naive_cache(self):
        for sequence in self.running:
            slots = torch.tensor(sequence.table.slots(0, len(sequence.tokens)))
            for layer, naive in enumerate(sequence.naive.layers):
                for paged, plain in zip(self.store.gather(layer, slots), naive, strict=True):
                    assert torch.equal(paged, plain), "the pages differ from the naive cache"

    def teardown(self):
        for sequence in self.running:
            sequence.table.release()
        self.pool.check([])
        assert self.pool.free == NUM_BLOCKS


def explore(examples):
    run_state_machine_as_test(
        CacheMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            report_multiple_bugs=False,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


def test_the_paged_cache_equals_a_naive_one():
    explore(80)


def move_row_by_row(store, src, dst):
    for stack in store._stacks.values():
        for source, target in reversed(list(zip(src.tolist(), dst.tolist(), strict=True))):
            stack[:, target] = stack[:, source]


def hash_each_block_alone(tokens, block_size):
    full = range(0, len(tokens) - block_size + 1, block_size)
    return [blocks.block_hashes(tokens[i : i + block_size], block_size)[0] for i in full]


def lose_blocks(table, n):
    del table.blocks[-(-n // BLOCK_SIZE) :]


def match_without_counting(pool, hashes):
    sealed = [pool._sealed[digest] for digest in hashes if digest in pool._sealed]
    return [block for block in sealed if pool.refcount(block) > 0]


def write_in_place(table, lo, hi):
    for block in table.blocks[lo // BLOCK_SIZE : -(-hi // BLOCK_SIZE)]:
        table._pool.unseal(block)
    return []


CONTENT = "the pages differ from the naive cache"
COUNTS = "reference counts differ"
# What goes wrong -> (owner, its method, the faulty one), how the machine notices.
FAULTS = {
    "no copy on write": ((BlockTable, "writable", write_in_place), CONTENT),
    "copying no content": ((KVStore, "copy_blocks", lambda store, pairs: None), CONTENT),
    "moving without regard to overlap": ((KVStore, "move", move_row_by_row), CONTENT),
    "not moving": ((KVStore, "move", lambda store, src, dst: None), CONTENT),
    "rolling back without releasing": (
        (BlockTable, "shrink", lambda table, n: None),
        f"more or less than it needs|{COUNTS}",
    ),
    "rolling back and losing blocks": ((BlockTable, "shrink", lose_blocks), COUNTS),
    "hashing each block alone": (
        (sys.modules[__name__], "block_hashes", hash_each_block_alone),
        CONTENT,
    ),
    "matching without counting": (
        (BlockPool, "match", match_without_counting),
        f"already free|{COUNTS}",
    ),
    "a seal that outlives its content": (
        (BlockPool, "unseal", lambda pool, block: None),
        f"sealed as something else|{CONTENT}",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_machine_notices(fault, monkeypatch):
    patch, symptom = FAULTS[fault]
    monkeypatch.setattr(*patch)
    with pytest.raises(AssertionError, match=symptom):
        explore(400)  # far more than it takes
