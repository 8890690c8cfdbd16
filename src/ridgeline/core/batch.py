"""Trees packed into the flat tensors of one forward pass.

Position and slot are two things: a node's *position* (what RoPE sees) is kv_len + depth, its *slot*
(where its key and value lie) is the table's entry for kv_len + index. Off a chain they differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ridgeline.core.tree import TokenTree

SHORT_SPAN = 64
"""Spans of at most this many rows share an attention group; a longer one gets its own."""


@dataclass(frozen=True)
class Entry:
    """One sequence's part of a forward pass."""

    tree: TokenTree
    kv_len: int
    """committed tokens whose keys and values are in the cache"""
    slots: NDArray[np.int64]
    """i64[kv_len + N]: the slot of every key, the committed ones first, then the tree's nodes"""
    keep: NDArray[np.int64]
    """tree nodes whose logits are wanted; may be empty"""


@dataclass(frozen=True)
class Group:
    """Sequences whose attention is computed together: B sequences, N query rows, L keys, padded."""

    rows: Tensor
    """i64[B,N] packed row of each query; padding repeats the sequence's first row"""
    slots: Tensor
    """i64[B,L] slot of each key; padding repeats the sequence's first slot"""
    query_positions: Tensor
    """i64[B,N]"""
    key_positions: Tensor
    """i64[B,L]"""
    visible: Tensor
    """bool[B,N,L]: causal trunk and tree mask; a padded row sees the first key only"""
    packed: Tensor
    """i64[R] packed rows of this group, in order"""
    select: Tensor
    """i64[R] where those rows lie in the flattened [B*N]"""


@dataclass(frozen=True)
class Batch:
    """T tokens of all sequences, flat."""

    tokens: Tensor
    """i64[T]"""
    positions: Tensor
    """i64[T]"""
    slots: Tensor
    """i64[T] where each token's key and value are written"""
    keep: Tensor
    """i64[K] packed rows that need logits, sequence by sequence"""
    entries: tuple[Entry, ...]
    """what was packed, in order"""

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """What attention in plain torch reads; made on first use, on the batch's device."""
        starts = np.cumsum([0, *(entry.tree.size for entry in self.entries)])
        device = self.tokens.device
        return tuple(_group(members, device) for members in _partition(self.entries, starts))


def pack(entries: Sequence[Entry], device: torch.device | str = "cpu") -> Batch:
    """Packs the sequences' trees, in order, into one batch."""
    starts = np.cumsum([0, *(entry.tree.size for entry in entries)])
    device = torch.device(device)
    return Batch(
        tokens=_tensor(np.concatenate([e.tree.tokens for e in entries]), device),
        positions=_tensor(
            np.concatenate([e.kv_len + e.tree.depth.astype(np.int64) for e in entries]), device
        ),
        slots=_tensor(np.concatenate([e.slots[e.kv_len :] for e in entries]), device),
        keep=_tensor(
            np.concatenate([s + e.keep for s, e in zip(starts[:-1], entries, strict=True)]), device
        ),
        entries=tuple(entries),
    )


def _partition(
    entries: Sequence[Entry], starts: NDArray[np.int64]
) -> Iterable[list[tuple[int, Entry]]]:
    """Short spans together, longest context at most about twice the shortest; long ones alone."""
    short = []
    for start, entry in zip(starts.tolist(), entries, strict=False):
        if entry.tree.size > SHORT_SPAN:
            yield [(start, entry)]
        else:
            short.append((start, entry))
    short.sort(key=lambda member: len(member[1].slots))
    group: list[tuple[int, Entry]] = []
    for member in short:
        if group and len(member[1].slots) > 2 * len(group[0][1].slots) + SHORT_SPAN:
            yield group
            group = []
        group.append(member)
    if group:
        yield group


def _group(members: list[tuple[int, Entry]], device: torch.device) -> Group:
    b = len(members)
    n = max(entry.tree.size for _, entry in members)
    length = max(len(entry.slots) for _, entry in members)
    rows = np.empty((b, n), np.int64)
    slots = np.empty((b, length), np.int64)
    query_positions = np.zeros((b, n), np.int64)
    key_positions = np.zeros((b, length), np.int64)
    visible = np.zeros((b, n, length), np.bool_)
    packed, select = [], []
    for i, (start, entry) in enumerate(members):
        tree, kv_len, size = entry.tree, entry.kv_len, entry.tree.size
        rows[i] = start
        rows[i, :size] += np.arange(size)
        slots[i, : len(entry.slots)] = entry.slots
        slots[i, len(entry.slots) :] = entry.slots[0]
        query_positions[i, :size] = kv_len + tree.depth
        key_positions[i, :kv_len] = np.arange(kv_len)
        key_positions[i, kv_len : kv_len + size] = kv_len + tree.depth
        visible[i, size:, 0] = True
        visible[i, : tree.trunk, : kv_len + tree.trunk] = np.tri(
            tree.trunk, kv_len + tree.trunk, kv_len, dtype=np.bool_
        )
        visible[i, tree.trunk : size, : kv_len + tree.trunk] = True
        visible[i, tree.trunk : size, kv_len + tree.trunk : kv_len + size] = tree.drafted_ancestors
        packed.append(rows[i, :size])
        select.append(i * n + np.arange(size))
    return Group(
        rows=_tensor(rows, device),
        slots=_tensor(slots, device),
        query_positions=_tensor(query_positions, device),
        key_positions=_tensor(key_positions, device),
        visible=_tensor(visible, device),
        packed=_tensor(np.concatenate(packed), device),
        select=_tensor(np.concatenate(select), device),
    )


def _tensor(array: NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
