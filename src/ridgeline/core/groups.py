"""Finding the few tokens that matter in a row of logits, without sorting or copying the row.

A row is read once, for the largest logit of each group of 32 consecutive tokens. That is enough to
tell which groups can hold the argmax, the winner of a Gumbel draw or the k largest logits; only
those groups are looked into. Every function is exact: where the groups looked into turn out not to
be enough for a row, more of them are, for that row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.core.noise import GROUP, gumbel, gumbel_ceiling

FIRST_LOOK = 16
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
    if scores.device.type == "cpu":  # numpy's is several times as fast as torch's
        return torch.from_numpy(scores.numpy().argmax(1))
    groups = grouped(scores)
    best = groups.amax(2).argmax(1, keepdim=True)
    return best[:, 0] * GROUP + look_into(groups, best)[:, 0].argmax(1)


def gumbel_argmax(scores: Tensor, keys: Tensor) -> Tensor:
    """One draw from softmax(scores) per row, i64[K]: the first of `gumbel_top`."""
    return gumbel_top(scores, keys, 1)[0][:, 0]


def gumbel_top(
    scores: Tensor, keys: Tensor, count: int, certain: int | None = None
) -> tuple[Tensor, Tensor]:
    """The tokens of each row with the largest score + Gumbel noise, largest first.

    They are draws from softmax(scores) without replacement, in draw order (Kool et al., arXiv
    1903.06059). Which groups can hold them follows from the bound on a region of A* Sampling
    (Maddison, Tarlow, Minka, arXiv 1411.0030): its largest score plus its largest noise.

    Args:
        scores: f32[K,V], unnormalised log-probabilities; -inf excludes a token.
        keys: i64[K], the rows' noise keys (`noise.keys`).
        count: how many, at most V.
        certain: how many of them must be the largest; the others are so among the tokens looked at.
            None: all.

    Returns:
        Tokens i64[K,count] and score + noise f64[K,count], -inf where there are no more tokens.
    """
    groups, keys = grouped(scores), keys[:, None]
    ids = torch.arange(groups.shape[1], device=scores.device)
    ceilings = groups.amax(2) + gumbel_ceiling(keys, ids)
    return _highest(groups, keys, ceilings, first_look(groups, count), count, certain or count)


def _highest(
    groups: Tensor, keys: Tensor, ceilings: Tensor, look: int, count: int, certain: int
) -> tuple[Tensor, Tensor]:
    """See `gumbel_top`; among the `look` groups with the highest ceilings, more if need be.

    Args:
        groups: f32[K,G,32].
        keys: i64[K,1].
        ceilings: f64[K,G], no score + noise of a group is above its ceiling.
        look: number of groups, at least `count` or all.
        count: number of tokens.
        certain: number of those that no other token may exceed.
    """
    total = groups.shape[1]
    order = ceilings.topk(min(look + 1, total))
    chosen = order.indices[:, :look]
    best = (look_into(groups, chosen) + gumbel(keys, chosen)).flatten(1).topk(count)
    member, values = best.indices, best.values
    tokens = chosen.gather(1, member // GROUP) * GROUP + member % GROUP
    if look < total:
        open_ = (values[:, certain - 1] < order.values[:, look]).nonzero()[:, 0]
        if len(open_):
            few = groups[open_], keys[open_], ceilings[open_]
            wider = _highest(*few, min(8 * look, total), count, certain)
            tokens[open_], values[open_] = wider
    return tokens, values
