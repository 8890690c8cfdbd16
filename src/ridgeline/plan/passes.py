"""Timing forward passes of a model over a cache whose contents do not matter."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from ridgeline.bench.clock import Clock
from ridgeline.core.batch import Entry, pack
from ridgeline.core.tree import TokenTree
from ridgeline.engine import BLOCK_SIZE
from ridgeline.kv.store import KVStore
from ridgeline.model.target import Model
from ridgeline.plan.cost import Sample

MOST_LOGITS = 320
"""Rows of a sequence that give logits; of longer prompts only the last does."""
_TOKENS = 256
"""Ids that occur; any will do."""


class Pass(NamedTuple):
    """So many sequences, each with so many new tokens after so many cached ones."""

    sequences: int
    rows: int
    context: int


class Passes:
    """A model over a cache of random keys and values.

    Sequences have contexts of their own as far as the cache goes, and share them beyond that.
    """

    def __init__(self, model: Model, slots: int) -> None:
        """`slots` is the capacity of the cache in tokens, at least those of the largest pass."""
        blocks = -(-slots // BLOCK_SIZE)
        store = KVStore(model.layers, blocks, BLOCK_SIZE, model.device)
        for side in (*store.keys, *store.values):
            side.normal_()  # fresh memory may hold numbers that processors are slow at
        self._target = model.bind(store)
        self._device = model.device
        self._clock = Clock(model.device)
        shuffled = np.random.default_rng(1).permutation(blocks)
        self._slots = (shuffled[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).ravel()

    def seconds(self, size: Pass) -> float:
        """Of one pass."""
        own = size.sequences * size.rows
        cached, fresh = self._slots[:-own], self._slots[-own:]
        tree = TokenTree.plain(np.arange(size.rows) % _TOKENS)
        keep = np.arange(tree.size) if size.rows <= MOST_LOGITS else np.array([tree.root])
        entries = []
        for number in range(size.sequences):
            places = np.arange(number * size.context, (number + 1) * size.context) % len(cached)
            new = fresh[number * size.rows : (number + 1) * size.rows]
            entries.append(Entry(tree, size.context, np.append(cached[places], new), keep))
        batch = pack(entries, self._device)
        _, seconds = self._clock.timed(lambda: self._target.forward(batch))
        return seconds

    def samples(self, sizes: Sequence[Pass], rounds: int) -> list[Sample]:
        """The median of each, in turns, so that a busy moment of the machine hits all of them."""
        spent: list[list[float]] = [[] for _ in sizes]
        for number in range(rounds + 1):
            for size, times in zip(sizes, spent, strict=True):
                once = self.seconds(size)
                if number:  # the first round allocates
                    times.append(once)
        return [
            Sample(size.sequences * size.rows, size.sequences, size.context, median(times))
            for size, times in zip(sizes, spent, strict=True)
        ]
