"""Paged tree attention in plain torch, on any device: the truth that faster kernels are held to.

Keys and values are read through slots, so a sequence may lie anywhere in the pool; the mask of the
group says which of them a query sees, and a sliding window counts positions, never slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeline.core.batch import Batch, Group
from ridgeline.kv.store import KVStore

SCORES = 1 << 25
"""Scores held at a time (128 MiB in fp32): longer spans of queries are taken in tiles of rows."""


def compute_dtype(query: Tensor) -> torch.dtype:
    """fp32 on a CPU, where half precision is emulated or slow; the query's own dtype elsewhere."""
    return torch.float32 if query.device.type == "cpu" else query.dtype


def mask_bias(group: Group, window: int | None, dtype: torch.dtype) -> Tensor:
    """[B,1,1,N,L], 0 where a query sees a key and -inf elsewhere.

    A window of w admits keys of query_position - key_position < w.
    """
    seen = group.visible
    if window is not None:
        distance = group.query_positions[:, :, None] - group.key_positions[:, None, :]
        seen = seen & (distance < window)
    bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return bias.masked_fill_(~seen, -torch.inf)[:, None, None]


def tree_attention(
    query: Tensor,
    store: KVStore,
    layer: int,
    batch: Batch,
    biases: Sequence[Tensor],
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Attention of every packed query over the keys that its sequence has in the store.

    Args:
        query: [1,H,T,D], as models hand it over; H is a multiple of the layer's Hkv key heads.
        store, layer: where the keys and values lie, those of this batch already written. A layer
            without values (dimension 0) attends over its keys as values.
        batch: the T packed rows and their groups.
        biases: `mask_bias` of each group; their dtype is the one computed in.
        scale, softcap: scores are softcap * tanh(scale * q.k / softcap), or scale * q.k.

    Returns:
        [1,T,H,Dv] in the dtype of the query.
    """
    if len(batch.groups) == 1 and len(batch.groups[0].rows) == 1:
        # One sequence: its rows are the packed rows, nothing to reorder.
        return _attend(query, store, layer, batch.groups[0], biases[0], scale, softcap)
    _, heads, total, dim = query.shape
    packed = query[0].transpose(0, 1)
    output = None
    for group, bias in zip(batch.groups, biases, strict=True):
        b, n = group.rows.shape
        rows = packed.index_select(0, group.rows.flatten()).view(b, n, heads, dim)
        result = _attend(rows.transpose(1, 2), store, layer, group, bias, scale, softcap)
        result = result.flatten(0, 1).index_select(0, group.select)
        if output is None:
            output = result.new_empty(total, *result.shape[1:])
        output.index_copy_(0, group.packed, result)
    assert output is not None, "a batch has at least one group"
    return output[None]


def _attend(
    query: Tensor,
    store: KVStore,
    layer: int,
    group: Group,
    bias: Tensor,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """[B,N,H,Dv] for query [B,H,N,D] of one group."""
    b, heads, n, dim = query.shape
    dtype = bias.dtype
    key, value = store.gather(layer, group.slots)
    length, kv_heads = key.shape[1:3]
    if value.shape[-1] == 0:
        value = key
    # The G query heads that share a key head become rows of one product: no head is repeated.
    rows = (query.to(dtype) * scale).reshape(b * kv_heads, -1, n, dim)
    key = key.to(dtype).transpose(1, 2).reshape(b * kv_heads, length, dim).transpose(1, 2)
    value = value.to(dtype).transpose(1, 2).reshape(b * kv_heads, length, -1)
    tile = max(1, SCORES // (b * heads * length))
    if n <= tile:
        result = _tile(rows, key, value, bias, softcap)
    else:
        tiles = zip(torch.split(rows, tile, 2), torch.split(bias, tile, 3), strict=True)
        result = torch.cat([_tile(r, key, value, m, softcap) for r, m in tiles], dim=2)
    return result.view(b, heads, n, -1).transpose(1, 2).to(query.dtype)


def _tile(rows: Tensor, key: Tensor, value: Tensor, bias: Tensor, softcap: float | None) -> Tensor:
    """[P,G,N,Dv] for rows [P,G,N,D], key [P,D,L], value [P,L,Dv], bias [B,1,1,N,L], P = B*Hkv."""
    pairs, share, n, _ = rows.shape
    scores = torch.bmm(rows.flatten(1, 2), key)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores.view(len(bias), -1, share, n, key.shape[-1]).add_(bias)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    return torch.bmm(weights, value).view(pairs, share, n, -1)
