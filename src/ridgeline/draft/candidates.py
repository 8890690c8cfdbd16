"""Which tokens a drafter's logits make likely, as the target will draw them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeline.core.noise import GROUP, Stream, gumbel
from ridgeline.core.sampling import Rows, noise_keys

CANDIDATES = 32
"""Likeliest tokens of a draft's distribution among which nodes are looked for."""
SIBLINGS = 1 / 3
"""Side branches are drafted down to this share of the confidence at which a path ends."""


def candidates(
    logits: Tensor, rows: Sequence[Rows], ids: Tensor | None = None
) -> tuple[list[list[int]], list[list[float]]]:
    """The likeliest tokens of every row, best first but for noise.

    Args:
        logits: f32[A,V].
        rows: one for each sequence, in the order of the logits.
        ids: i64[V], the tokens that the columns stand for; None: their own numbers.

    Returns:
        Tokens and scores [A,CANDIDATES]. The scores are log-probabilities among these tokens; where
        a request samples, with the noise that the target will draw with.
    """
    top = logits.topk(min(CANDIDATES, logits.shape[1]))
    tokens = top.indices if ids is None else ids[top.indices]
    greedy = [r.params.greedy for r in rows for _ in range(len(r))]
    temperature = torch.tensor(
        [1.0 if r.params.greedy else r.params.temperature for r in rows for _ in range(len(r))],
        dtype=torch.float64,
        device=logits.device,
    )
    scores = top.values / temperature[:, None]
    if not all(greedy):
        keys = torch.from_numpy(noise_keys(rows, Stream.TARGET)).to(logits.device)
        groups, lanes = tokens // GROUP, tokens % GROUP
        noise = gumbel(keys[:, None], groups).gather(2, lanes[..., None])[..., 0]
        noise[torch.tensor(greedy, device=logits.device)] = 0.0
        scores += noise
    return tokens.tolist(), scores.log_softmax(1).tolist()
