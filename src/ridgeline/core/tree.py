"""The token tree: what one sequence brings to a forward pass.

A tree is a *trunk* (committed tokens whose keys and values are not in the cache yet) and, below
the trunk's last node (the *root*), the drafted nodes. A trunk of one without drafts is plain
decoding; a long trunk is prefill; a tree of width one is a chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

MAX_DRAFTED = 64
"""Drafted nodes per sequence: a node's drafted ancestors fit one 64-bit word."""

MOST_ERROR = 1e-3
"""By which the probabilities of a drafter may miss the sum of 1: fp32 over a large vocabulary."""


@dataclass(frozen=True, eq=False)
class DraftProposal:
    """What a drafter proposes for one sequence: M nodes below the root.

    `q`, if given, holds the exact distributions that the tokens were drawn from: row 0 the one of
    the root's children, row i+1 the one of node i's children. None means point masses; a method
    that prunes or re-ranks by what it drew must give None.
    """

    tokens: NDArray[np.int64]
    """i64[M]"""
    parents: NDArray[np.int32]
    """i32[M]; -1 is the root, otherwise parents[i] < i"""
    q: Tensor | None = None
    """f32[R,V], R at least 1 + the last node that has children"""

    @staticmethod
    def empty() -> DraftProposal:
        """No drafts: the sequence decodes plainly in this step."""
        return DraftProposal(np.empty(0, np.int64), np.empty(0, np.int32))

    @staticmethod
    def chain(tokens: Sequence[int] | NDArray[np.int64], q: Tensor | None = None) -> DraftProposal:
        """A tree of width one."""
        ids = np.asarray(tokens, dtype=np.int64)
        return DraftProposal(ids, np.arange(-1, len(ids) - 1, dtype=np.int32), q)

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, eq=False)
class TokenTree:
    """N nodes in an order in which parents precede children; node 0 is the first trunk node."""

    tokens: NDArray[np.int64]
    """i64[N]"""
    parents: NDArray[np.int32]
    """i32[N]; parents[0] == -1, parents[i] < i, parents[i] == i-1 within the trunk"""
    trunk: int
    """number of trunk nodes, at least 1"""

    @staticmethod
    def plain(trunk_tokens: Sequence[int] | NDArray[np.int64]) -> TokenTree:
        """A trunk without drafts."""
        ids = np.asarray(trunk_tokens, dtype=np.int64)
        return TokenTree(ids, np.arange(-1, len(ids) - 1, dtype=np.int32), len(ids))

    @property
    def size(self) -> int:
        """Number of nodes, N."""
        return len(self.tokens)

    @property
    def root(self) -> int:
        """Index of the trunk's last node."""
        return self.trunk - 1

    @property
    def drafted(self) -> int:
        """Number of drafted nodes."""
        return self.size - self.trunk

    @cached_property
    def depth(self) -> NDArray[np.int32]:
        """i32[N]: edges from node 0; a node's position is kv_len + depth."""
        depth = np.arange(self.size, dtype=np.int32)
        for node in range(self.trunk, self.size):
            depth[node] = depth[self.parents[node]] + 1
        return depth

    @cached_property
    def words(self) -> NDArray[np.uint64]:
        """u64[N]: bit j set if drafted node trunk+j is the node itself or an ancestor of it."""
        words = [0] * self.size
        for node in range(self.trunk, self.size):
            words[node] = words[self.parents[node]] | 1 << (node - self.trunk)
        return np.array(words, dtype=np.uint64)

    @cached_property
    def ancestors(self) -> NDArray[np.bool_]:
        """bool[N,N]: row i marks the nodes that node i sees, itself included."""
        seen = np.tri(self.size, dtype=np.bool_)
        seen[self.trunk :, self.trunk :] = self.drafted_ancestors
        return seen

    @property
    def drafted_ancestors(self) -> NDArray[np.bool_]:
        """bool[D,D] of the D drafted nodes among themselves, each node included."""
        bits = np.arange(self.drafted, dtype=np.uint64)
        return (self.words[self.trunk :, None] >> bits & np.uint64(1)).astype(np.bool_)

    @cached_property
    def _children(self) -> list[list[int]]:
        children: list[list[int]] = [[] for _ in range(self.size)]
        for node in range(1, self.size):
            children[self.parents[node]].append(node)
        return children

    def children(self, node: int) -> list[int]:
        """Indices of the node's children, in sibling (proposal) order."""
        return self._children[node]

    def path(self, node: int) -> list[int]:
        """Drafted nodes from the root's child down to `node`; empty for the root itself."""
        path = []
        while node >= self.trunk:
            path.append(node)
            node = int(self.parents[node])
        return path[::-1]


def graft(
    trunk_tokens: Sequence[int] | NDArray[np.int64], proposal: DraftProposal, vocab_size: int
) -> TokenTree:
    """Hangs a proposal below a trunk, checking it first.

    Raises:
        ValueError: the proposal is malformed; the message says how.
    """
    trunk = np.asarray(trunk_tokens, dtype=np.int64)
    if not len(proposal):
        return TokenTree.plain(trunk)
    _check(proposal, vocab_size)
    parents = np.where(proposal.parents < 0, 0, proposal.parents + 1) + (len(trunk) - 1)
    return TokenTree(
        np.concatenate([trunk, proposal.tokens]),
        np.concatenate([np.arange(-1, len(trunk) - 1), parents]).astype(np.int32),
        len(trunk),
    )


def _check(proposal: DraftProposal, vocab_size: int) -> None:
    tokens, parents = proposal.tokens, proposal.parents
    for name, ids in (("tokens", tokens), ("parents", parents)):
        if ids.dtype.kind not in "iu" or ids.ndim != 1:
            raise ValueError(f"{name} are {ids.dtype}{list(ids.shape)}; they must be integers [M]")
    if len(tokens) != len(parents):
        raise ValueError(f"{len(tokens)} tokens but {len(parents)} parents")
    if len(tokens) > MAX_DRAFTED:
        raise ValueError(f"{len(tokens)} nodes; at most {MAX_DRAFTED} are allowed")
    wrong = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if len(wrong):
        node = wrong[0]
        raise ValueError(f"node {node}: token {tokens[node]} is outside 0..{vocab_size - 1}")
    wrong = np.flatnonzero((parents < -1) | (parents >= np.arange(len(parents))))
    if len(wrong):
        node = wrong[0]
        raise ValueError(f"node {node}: parent {parents[node]} is not an earlier node or -1")
    if len(set(zip(parents.tolist(), tokens.tolist(), strict=True))) != len(tokens):
        raise ValueError("two siblings bear the same token")
    if proposal.q is not None:
        needed = 2 + int(parents.max())
        rows, width = proposal.q.shape
        if rows < needed or width != vocab_size:
            raise ValueError(
                f"q is [{rows}, {width}]; at least {needed} rows of {vocab_size} are needed"
            )
        _check_distributions(proposal.q, np.unique(parents).astype(np.int64) + 1)


def _check_distributions(q: Tensor, rows: NDArray[np.int64]) -> None:
    """Refuses what no token can have been drawn from: `block` would emit what p excludes."""
    if str(q.dtype) != "torch.float32":
        raise ValueError(f"q is of {q.dtype}; it must be torch.float32")
    smallest, totals = q.amin(1).tolist(), q.sum(1).tolist()
    for row in rows.tolist():
        if not (smallest[row] >= 0 and abs(totals[row] - 1) < MOST_ERROR):
            raise ValueError(
                f"row {row} of q has the smallest value {smallest[row]:g} and the sum "
                f"{totals[row]:g}; it must be a distribution"
            )
