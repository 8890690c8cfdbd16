"""top_k, top_p and min_p: each is a threshold on the logits of a row, found without sorting it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ridgeline.core.groups import first_look, grouped, look_into

NUCLEUS = 48
"""Tokens of each row among which the limits are sought at first."""


def truncate(
    logits: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64], min_p: NDArray[np.float64]
) -> Tensor:
    """Excludes (-inf) what top_k, then top_p, then min_p leave out.

    Each works on what the one before left. A token that equals the last one kept is kept too, so
    that the result is a function of the logits alone and not of an order among equals.

    Args:
        logits: f32[K,V], divided by the temperature.
        top_k: [K]; 0 or V and more: off.
        top_p: [K], in (0, 1]; 1: off.
        min_p: [K], in [0, 1]; 0: off.

    Returns:
        f32[K,V]; `logits` itself where nothing applies.
    """
    top_k = np.where(top_k < logits.shape[1], top_k, 0)
    active = np.flatnonzero((top_k > 0) | (top_p < 1) | (min_p > 0))
    if not len(active):
        return logits
    if len(active) == len(logits):
        return _truncate_all(logits, top_k, top_p, min_p)
    rows = torch.from_numpy(active).to(logits.device)
    kept = _truncate_all(logits[rows], top_k[active], top_p[active], min_p[active])
    return logits.index_copy(0, rows, kept)


class _Rows(NamedTuple):
    """Rows to truncate; columns are [K,1]."""

    groups: Tensor
    """f32[K,G,32]"""
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    mass: Tensor
    """f64: sum of the row's probabilities in units of the largest; used where top_k is off"""


def _truncate_all(
    logits: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64], min_p: NDArray[np.float64]
) -> Tensor:
    def column(values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values)[:, None].to(logits.device)

    if ((top_p < 1) & (top_k == 0)).any():
        # softmax adds a row up in the same order whatever the number of rows; sum does not
        mass = 1 / logits.softmax(1).amax(1, keepdim=True).double()
    else:
        mass = column(np.ones(len(top_k)))
    groups = grouped(logits)
    rows = _Rows(groups, column(top_k), column(top_p), column(min_p).log().float(), mass)
    look = first_look(groups, max(int(top_k.max()), NUCLEUS))
    kept = _keep(rows, look, int(top_k.max()), bool((top_p < 1).any()))
    return kept.flatten(1)[:, : logits.shape[1]]


def _keep(rows: _Rows, look: int, largest_k: int, has_top_p: bool) -> Tensor:
    """Looks into the `look` groups with the largest logits, and into more where that is too few.

    Returns:
        f32[K,G,32]
    """
    count = rows.groups.shape[1]
    highest = rows.groups.amax(2).topk(min(look + 1, count))
    chosen = highest.indices[:, :look]
    members = look_into(rows.groups, chosen)
    # each chosen group has a member as large as anything outside, so the `look` largest members
    # are the row's largest
    sure = look if look < count else members[0].numel()
    limit, lowest = _limit(rows, members.flatten(1), sure if has_top_p else max(largest_k, 1))
    kept = torch.full_like(rows.groups, -torch.inf)
    kept.scatter_(
        1,
        chosen[..., None].expand_as(members),
        members.masked_fill(members < limit[..., None], -torch.inf),
    )
    if look < count:
        open_ = (lowest <= highest.values[:, look:]).nonzero()[:, 0]
        if len(open_):
            few = _Rows(*(column[open_] for column in rows))
            kept[open_] = _keep(few, min(8 * look, count), largest_k, has_top_p)
    return kept


def _limit(rows: _Rows, members: Tensor, sure: int) -> tuple[Tensor, Tensor]:
    """The smallest logit kept, -inf where the members do not decide it, and what it rests on.

    Args:
        rows: the rows.
        members: f32[K,M], logits of each row, its `sure` largest among them.
        sure: at least 1 and every top_k.

    Returns:
        The limit f32[K,1], and the smallest logit that went into it: the limit holds if every
        logit of the row down to that one is among the members.
    """
    if sure < members.shape[1]:
        largest = members.topk(sure).values
    else:
        largest = members.sort(descending=True).values
    top = largest[:, :1]
    kth = largest.gather(1, (rows.top_k - 1).clamp_min(0)).masked_fill(rows.top_k == 0, -torch.inf)

    def probabilities(logits: Tensor) -> Tensor:
        return torch.exp(logits - top).masked_fill(logits < kth, 0.0).double()

    mass = torch.where(rows.top_k > 0, probabilities(members).sum(1, keepdim=True), rows.mass)
    before = (probabilities(largest).cumsum(1) < rows.top_p * mass).sum(1, keepdim=True)
    nucleus = torch.cat([largest, torch.full_like(top, -torch.inf)], 1).gather(1, before)
    nucleus = nucleus.masked_fill(rows.top_p == 1, -torch.inf)
    limit = (top + rows.log_min_p).maximum(kth).maximum(nucleus)
    return limit, torch.where(rows.top_k > 0, kth, limit)
