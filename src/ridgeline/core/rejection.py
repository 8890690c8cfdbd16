"""Verification of sampled drafts: accept by the ratio of two distributions, correct the rest.

Both rules see the *inner* nodes (those with children) of the trees whose drafts were sampled, and
answer for each which child is accepted, and from what to draw where none is. Proofs in short:
docs/verification.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ridgeline.errors import ConfigError

NO_CHILD = -1
LEAST_MASS = 1e-30
"""What q has left counts as nothing below this: fp32 holds too few digits of such probabilities."""


@dataclass(frozen=True)
class Inner:
    """The inner nodes of a batch of trees: I nodes, each tree's in order, root first."""

    p: Tensor
    """f32[I,V]: target distribution of what follows the node"""
    q: Tensor
    """f32[I,V]: distribution that the node's children were drawn from"""
    children: Tensor
    """i64[I,C]: tokens of the children in draw order, filled up with NO_CHILD"""
    u: Tensor
    """f64[I,C]: uniform numbers that decide upon the children"""
    lengths: NDArray[np.int64]
    """number of inner nodes of each tree"""


Residual = Callable[[Tensor], Tensor]
"""From indices i64[S] of inner nodes, none of whose children was accepted, to weights f32[S,V]
(not normalised) to draw their successor from."""

Rule = Callable[[Inner], tuple[Tensor, Residual]]
"""Returns the token of the accepted child of every inner node, i64[I], or NO_CHILD, given that the
node itself is reached, and the residual."""


def rejection(inner: Inner) -> tuple[Tensor, Residual]:
    """Token-wise rejection; siblings one after another, without replacement.

    Accept child x with probability min(1, p(x)/q(x)). If it is rejected, p becomes the normalised
    (p - q)+, q loses x and is normalised again, and the next child is tried.

    Sources: Leviathan et al. (arXiv 2211.17192) and Chen et al. (2302.01318) for one child,
    Sequoia (2402.12374, Algorithm 2) for several.
    """
    p, q, children = inner.p, inner.q, inner.children
    choices = torch.full_like(children[:, 0], NO_CHILD)
    for sibling in range(children.shape[1]):
        if sibling:
            p, q = _reject(p, q, children[:, sibling - 1])
        child = children[:, sibling]
        p_child, q_child = _probability(p, child), _probability(q, child)
        accepted = (q_child > 0) & (inner.u[:, sibling] * q_child < p_child)
        choices = torch.where(accepted & (choices == NO_CHILD), child, choices)

    def residual(stops: Tensor) -> Tensor:
        p, q = inner.p[stops], inner.q[stops]
        for sibling in range(children.shape[1]):
            p, q = _reject(p, q, children[stops, sibling])
        return p

    return choices, residual


def block(inner: Inner) -> tuple[Tensor, Residual]:
    """Block verification: chains are accepted or cut as a whole.

    With rho_0 = 1 and rho_i = min(1, rho_{i-1} p(x_i)/q(x_i)), the first i tokens pass with
    probability h_i = M_i / (M_i + 1 - rho_i), M_i the mass of (rho_i p - q)+ after them, and all of
    them with rho; the longest prefix that passes is kept.

    Source: Sun et al. (arXiv 2403.10444, Algorithm 2).

    Raises:
        ConfigError: a node has several children.
    """
    if inner.children.shape[1] > 1:
        raise ConfigError(
            "the rule 'block' verifies sampled chains only; use 'rejection' or 'match' for trees"
        )
    child, device = inner.children[:, 0], inner.p.device
    # chain[b, i]: inner node i of tree b; where the chain is shorter, one past the last node
    lengths = inner.lengths
    column = np.arange(lengths.max())
    real = column < lengths[:, None]
    chain = np.where(real, np.cumsum(lengths)[:, None] - lengths[:, None] + column, lengths.sum())
    node = torch.from_numpy(chain).to(device)
    back = torch.from_numpy(np.flatnonzero(real)).to(device)  # from [B,L] back to inner nodes

    q_child = _probability(inner.q, child)
    ratio = torch.where(q_child > 0, _probability(inner.p, child) / q_child, 0.0)
    rho = torch.ones_like(node[:, 0], dtype=torch.float64)
    before, after = [], []  # rho on both sides of each drafted token
    for step in _at(ratio, node).unbind(1):
        before.append(rho)
        rho = (rho * step).clamp_max(1.0)
        after.append(rho)
    rho = torch.stack(after, 1)
    rho_at = torch.stack(before, 1).flatten()[back, None].float()

    mass = _excess(rho_at * inner.p, inner.q).sum(1).double()
    ahead = torch.cat([_at(mass, node)[:, 1:], torch.zeros_like(rho[:, :1])], 1)
    h = torch.where(ahead + 1 - rho > 0, ahead / (ahead + 1 - rho), 1.0)
    last = torch.from_numpy(column == lengths[:, None] - 1).to(device)
    passed = _at(inner.u[:, 0], node) < torch.where(last, rho, h)
    order = torch.arange(1, len(column) + 1, device=device)
    kept = (order * passed).amax(1, keepdim=True)

    def residual(stops: Tensor) -> Tensor:
        p = inner.p[stops]
        excess = _excess(rho_at[stops] * p, inner.q[stops])
        return torch.where(excess.sum(1, keepdim=True) > 0, excess, p)

    return torch.where((order <= kept).flatten()[back], child, NO_CHILD), residual


def _reject(p: Tensor, q: Tensor, child: Tensor) -> tuple[Tensor, Tensor]:
    """p and q, f32[I,V] each, once the child i64[I] was rejected.

    Where there is no child, or q could not have drawn it, nothing was learnt and nothing changes.
    A residual without mass can only come of rounding: p stays. Where q has next to nothing left it
    becomes 0, which passes over all further children whichever they are.
    """
    drawn = ((child != NO_CHILD) & (_probability(q, child) > 0))[:, None]
    excess = _excess(p, q)
    mass = excess.sum(1, keepdim=True)
    rest = q.scatter(1, child.clamp_min(0)[:, None], 0.0)
    left = rest.sum(1, keepdim=True)
    rest = torch.where(left > LEAST_MASS, rest / left, 0.0)
    return torch.where(drawn & (mass > 0), excess / mass, p), torch.where(drawn, rest, q)


def _excess(p: Tensor, q: Tensor) -> Tensor:
    return (p - q).clamp_min_(0.0)


def _probability(p: Tensor, tokens: Tensor) -> Tensor:
    """f64[I]: probability of each node's token under p f32[I,V]; of NO_CHILD: 0."""
    found = p.gather(1, tokens.clamp_min(0)[:, None])[:, 0].double()
    return found.masked_fill_(tokens == NO_CHILD, 0.0)


def _at(values: Tensor, nodes: Tensor) -> Tensor:
    """Values f64[I] of nodes i64[B,L]; 0 one past the last node."""
    return torch.cat([values, values.new_zeros(1)])[nodes]
