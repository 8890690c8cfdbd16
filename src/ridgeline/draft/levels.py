"""From the logits of trees' frontiers to the trees' next levels."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.sampling import Rows, draw_drafts
from ridgeline.draft.base import DraftContext, DraftRequest
from ridgeline.draft.growth import Growth, Successors
from ridgeline.draft.likeliest import Likeliest
from ridgeline.draft.sampled import Sampled


def growth_for(request: DraftRequest, context: DraftContext, width: int | None = None) -> Growth:
    """The tree that the engine's rule can verify best; `width` as for `Likeliest`."""
    if context.coupled or request.sequence.params.greedy:
        return Likeliest(request, context.confidence, width)
    return Sampled(request, chain=not context.sampled_siblings)


def grow(growths: Seq[Growth], logits: Tensor, vocab_size: int, ids: Tensor | None = None) -> None:
    """Grows trees by a level; logits f32[F,W] of all their frontiers' nodes, else as for `find`."""
    rows = [growth.rows() for growth in growths]
    for growth, successors in zip(
        growths, find(growths, rows, logits, vocab_size, ids), strict=True
    ):
        growth.hang(successors)


def find(
    growths: Seq[Growth],
    rows: Seq[Rows],
    logits: Tensor,
    vocab_size: int,
    ids: Tensor | None = None,
) -> list[list[Successors]]:
    """What may follow the nodes of `rows`, one for each tree; else as for `draw_drafts`."""
    ends = np.cumsum([len(r) for r in rows])
    result: list[list[Successors]] = [[] for _ in growths]
    for sampled in (False, True):
        members = [i for i, growth in enumerate(growths) if growth.sampled == sampled]
        if not members:
            continue
        at = np.concatenate([np.arange(ends[i] - len(rows[i]), ends[i]) for i in members])
        drafts = draw_drafts(
            logits if len(at) == len(logits) else logits[torch.from_numpy(at).to(logits.device)],
            [rows[i] for i in members],
            vocab_size,
            coupled=not sampled,
            count=max(growths[i].successors for i in members),
            ids=ids,
        )
        q = [None] * len(at) if drafts.q is None else list(drafts.q)
        found = map(_successors, drafts.tokens.tolist(), drafts.scores.tolist(), q)
        for i in members:
            result[i] = [next(found) for _ in range(len(rows[i]))]
    return result


def _successors(tokens: list[int], scores: list[float], q: Tensor | None) -> Successors:
    count = sum(score > -math.inf for score in scores)  # the excluded ones come last
    return Successors(tokens[:count], scores[:count], q)
