"""A recurrent head trained on its own predictions, several steps deep.

Source: EAGLE-3 (Li et al., arXiv 2503.01840, "training-time test"). In the first step an entry
reads the target's true hidden state, in step k the one that the head itself gave in step k-1 one
token earlier: what it meets when it drafts. An entry of step k sees the first step's entries up to
where its draft began, and its own draft's entries after that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.draft.network import RecurrentHead

DECAY = 0.8
"""Weight of a step's loss against that of the step before."""


@dataclass(frozen=True)
class Batch:
    """B texts of L tokens, padded."""

    tokens: Tensor
    """i64[B,L]"""
    embedding: Tensor
    """f32[B,L,H]"""
    features: Tensor
    """f32[B,L,F]: the target's hidden states that the head reads"""
    final: Tensor
    """f32[B,L,H]: the target's final hidden states, from which its distributions follow"""
    weight: Tensor
    """f32[B,L]: 1 where the distribution after a token is to be learned"""
    likeliest: Tensor | None = None
    """i64[B,L]: the place among the draft ids of the target's likeliest token after each; -1 where
    it cannot be drafted; None where acceptance is not asked for"""


@dataclass(frozen=True)
class Losses:
    """What one batch gives; acceptance only where the batch says what is likeliest."""

    total: Tensor
    passed: list[int]
    """per step: positions at which this and all earlier drafts were the target's likeliest token"""
    reached: list[int]
    """per step: positions at which all earlier ones were"""


def unrolled(
    network: RecurrentHead, head: Tensor, batch: Batch, steps: int, feature_weight: float
) -> Losses:
    """The losses of `steps` drafting steps.

    Args:
        network: the head.
        head: f32[Vd,H], the target's LM head for the ids that can be drafted.
        batch: B texts.
        steps: how deep to draft.
        feature_weight: weight of EAGLE's loss between hidden states (arXiv 2401.15077, section
            4.2), which only makes sense where the head extrapolates the final ones.
    """
    b, length = batch.tokens.shape[0], batch.tokens.shape[1] - 1
    embedding = batch.embedding[:, 1:].flatten(0, 1)
    hidden = network.hidden_from(batch.features[:, :-1].flatten(0, 1))
    rows = batch.weight[:, 1:].flatten().nonzero().squeeze(1)  # what the LM head is run for
    final = batch.final[:, 1:].flatten(0, 1)[rows]
    with torch.no_grad():
        target = (final @ head.T).softmax(-1)
    device = batch.tokens.device
    positions = torch.arange(length, device=device).repeat(b)
    own_head = head if network.head is None else network.head.weight
    keys: list[Tensor] = []
    values: list[Tensor] = []
    total = embedding.new_zeros(())
    alive = torch.ones(b, length, dtype=torch.bool, device=device)
    passed, reached = [], []
    for step in range(steps):

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            q, k, v = (x.view(b, length, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
            keys.append(k)
            values.append(v)
            return _attention(q, keys, values).transpose(1, 2).flatten(0, 1)

        carried = network(embedding, hidden, positions, attend)
        written = carried[rows]
        logits = network.normed(written) @ own_head.T
        counted = rows % length >= step  # not drafts that would begin before the text
        count = counted.sum().clamp(min=1)
        cross = -(target * logits.log_softmax(-1)).sum(-1)
        loss = (cross * counted).sum() / count
        if feature_weight:
            apart = F.smooth_l1_loss(written, final, reduction="none").mean(-1)
            loss = loss + feature_weight * (apart * counted).sum() / count
        total = total + DECAY**step * loss
        if batch.likeliest is not None:
            best = batch.likeliest[:, 1:].flatten()[rows]
            right = torch.zeros(b * length, dtype=torch.bool, device=device)
            right[rows] = logits.argmax(-1) == best
            before = alive.flatten()[rows] & counted
            reached.append(int(before.sum()))
            alive = alive & right.view(b, length)
            passed.append(int((alive.flatten()[rows] & counted).sum()))
            alive = _later(alive.unsqueeze(-1)).squeeze(-1)
        hidden = _later(network.next_hidden(carried).view(b, length, -1)).flatten(0, 1)
    return Losses(total, passed, reached)


def _later(x: Tensor) -> Tensor:
    """[B,L,...] moved one token on; the first one's place is empty."""
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)


def _attention(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """[B,heads,L,D]: step k = len(keys) of a draft that began k-1 tokens before each query.

    Args:
        query: [B,heads,L,D].
        keys, values: [B,kv_heads,L,D] of every step so far.
    """
    share = query.shape[1] // keys[0].shape[1]
    back = len(keys) - 1
    length = query.shape[2]
    first_keys, first_values = (x[0].repeat_interleave(share, 1) for x in (keys, values))
    scale = query.shape[-1] ** -0.5
    scores = query @ first_keys.transpose(-1, -2) * scale
    at = torch.arange(length, device=query.device)
    hidden = at[None, :] > at[:, None] - back
    # Where the draft began before the text nothing is seen; such positions carry no loss.
    hidden[:back, 0] = False
    scores = scores.masked_fill(hidden, -torch.inf)
    own = []
    for step in range(1, len(keys)):
        key = keys[step].repeat_interleave(share, 1)
        own.append((query * _shifted(key, back - step)).sum(-1, keepdim=True) * scale)
    weights = torch.cat([scores, *own], -1).softmax(-1)
    result = weights[..., :length] @ first_values
    for step in range(1, len(keys)):
        value = values[step].repeat_interleave(share, 1)
        result = result + weights[..., length + step - 1, None] * _shifted(value, back - step)
    return result


def _shifted(x: Tensor, by: int) -> Tensor:
    """[B,heads,L,D] with each position's entry of `by` tokens before."""
    return x if by == 0 else F.pad(x, (0, 0, by, 0))[:, :, :-by]
