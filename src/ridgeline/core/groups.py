"""Finding the few tokens that matter in a row of logits, without sorting or copying the row.

A row is read once, for the largest logit of each group of 32 consecutive tokens. That is enough to
tell which groups can hold the argmax, the winner of a Gumbel draw or the k largest logits; only
those groups are looked into. Every function is exact: where the groups looked into turn out not to
be enough, more of them are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.core.noise import GROUP, gumbel, gumbel_ceiling

FIRST_LOOK = 32
"""Groups of each row that are looked into at first."""


def grouped(scores: Tensor) -> Tensor:
    """Views f32[K,V] as f32[K,G,32]; a short last group is filled up with -inf (a copy, then)."""
    short = -scores.shape[1] % GROUP
    if short:
        scores = F.pad(scores, (0, short), value=-torch.inf)
    return scores.reshape(len(scores), scores.shape[1] // GROUP, GROUP)


def look_into(groups: Tensor, chosen: Tensor) -> Tensor:
    """Members f32[K,w,32] of the chosen groups i64[K,w] of f32[K,G,32]."""
    return groups.gather(1, chosen[..., None].expand(-1, -1, GROUP))


def first_look(groups: Tensor, at_least: int = FIRST_LOOK) -> int:
    """How many groups to look into at first.

    On an accelerator all of them: there, asking whether more are needed costs more than looking.
    """
    count = groups.shape[1]
    return count if groups.device.type != "cpu" else min(max(at_least, FIRST_LOOK), count)


def argmax(scores: Tensor) -> Tensor:
    """The first of the largest in each row: i64[K] of f32[K,V]."""
    groups = grouped(scores)
    best = groups.amax(2).argmax(1, keepdim=True)
    return best[:, 0] * GROUP + look_into(groups, best)[:, 0].argmax(1)


def gumbel_argmax(scores: Tensor, keys: Tensor) -> Tensor:
    """One draw from softmax(scores) per row: the argmax of score + Gumbel noise.

    Source: Maddison, Tarlow, Minka: A* Sampling (arXiv 1411.0030), whose bound on a region (its
    largest score plus its largest noise) decides here which groups can hold the winner.

    Args:
        scores: f32[K,V], unnormalised log-probabilities; -inf excludes a token.
        keys: i64[K], the rows' noise keys (`noise.keys`).

    Returns:
        i64[K]
    """
    groups, keys = grouped(scores), keys[:, None]
    count, look = groups.shape[1], first_look(groups)
    ids = torch.arange(count, device=scores.device)
    ceilings = groups.amax(2) + gumbel_ceiling(keys, ids)
    lanes = torch.arange(GROUP, device=scores.device)
    while True:
        highest = ceilings.topk(min(look + 1, count))
        chosen = highest.indices[:, :look]
        tokens = (chosen[..., None] * GROUP + lanes).flatten(1)
        best = (look_into(groups, chosen).flatten(1) + gumbel(keys, tokens)).max(1)
        if look == count or bool((best.values >= highest.values[:, look]).all()):
            return tokens.gather(1, best.indices[:, None])[:, 0]
        look = min(8 * look, count)
