"""A token tree that grows level by level towards the likeliest continuations.

Source: EAGLE-2 (Li et al., arXiv 2406.16858): at each level the likeliest nodes are expanded, and
of all nodes the likeliest are kept; how likely a node is to be accepted is estimated by the product
of the drafter's own probabilities along its path.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ridgeline.core.batch import Entry
from ridgeline.core.sampling import Rows
from ridgeline.core.tree import DraftProposal, TokenTree
from ridgeline.draft.base import DraftRequest
from ridgeline.draft.candidates import SIBLINGS

ROOT = -1


class Growth:
    """The tree of one request, from its root to a proposal.

    Nodes that have been expanded have their keys and values at the sequence's slots from
    len(tokens) on, in the order of expansion; whatever lies there is given up afterwards.
    """

    def __init__(self, request: DraftRequest, confidence: float, width: int | None = None) -> None:
        """`width` nodes of a level are expanded at most; None: as many as leave all levels some."""
        self.sequence = request.sequence
        self.nodes = request.nodes
        self._depth = request.depth
        self._width = width or max(1, request.nodes // max(request.depth, 1))
        self._least = math.log(confidence) if confidence else -math.inf
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._scores: list[float] = []
        self._depths: list[int] = []
        self._expanded: dict[int, int] = {}  # node: its place among the expanded ones
        self.frontier: list[int] = [ROOT]
        """nodes whose children are asked for next"""
        self._hidden: dict[int, Tensor] = {}  # [H] of the root and of expanded nodes

    def add(self, tokens: Seq[Seq[int]], scores: Seq[Seq[float]]) -> None:
        """Hangs candidates below the frontier's nodes, in order, and chooses the next frontier.

        Scores are log-probabilities given the parent.
        """
        level = []
        for parent, ids, logprobs in zip(self.frontier, tokens, scores, strict=True):
            above = self._scores[parent] if parent != ROOT else 0.0
            depth = self._depths[parent] + 1 if parent != ROOT else 1
            for token, logprob in zip(ids, logprobs, strict=True):
                if above + logprob >= self._least + math.log(SIBLINGS):
                    level.append(len(self.tokens))
                    self.tokens.append(token)
                    self.parents.append(parent)
                    self._scores.append(above + logprob)
                    self._depths.append(depth)
        ends = self.sequence.end_tokens
        worth = [
            node
            for node in level
            if self._scores[node] >= self._least
            and self._depths[node] < self._depth
            and self.tokens[node] not in ends
        ]
        worth.sort(key=self._scores.__getitem__, reverse=True)
        self.frontier = worth[: self._width]
        for node in self.frontier:
            self._expanded[node] = len(self._expanded)

    def keep_hidden(self, nodes: Seq[int], hidden: Tensor) -> None:
        """Keeps [F,H], the hidden states that these nodes hand to their children."""
        self._hidden.update(zip(nodes, hidden, strict=True))

    def parents_hidden(self) -> list[Tensor]:
        """[H] of the parent of each node of the frontier."""
        return [self._hidden[self.parents[node]] for node in self.frontier]

    def rows(self) -> Rows:
        """The rows that predict what follows the frontier's nodes."""
        nodes = list(self._expanded)
        place = {node: i + 1 for i, node in enumerate(nodes)} | {ROOT: 0}
        tokens = [self.sequence.tokens[-1], *(self.tokens[node] for node in nodes)]
        parents = [-1, *(place[self.parents[node]] for node in nodes)]
        tree = TokenTree(np.array(tokens, np.int64), np.array(parents, np.int32), trunk=1)
        return self.sequence.rows(tree, np.array([place[node] for node in self.frontier]))

    def entries(self, slots: NDArray[np.int64]) -> list[Entry]:
        """One for each node of the frontier, after its own ancestors.

        Args:
            slots: i64[L + nodes], of the L keys that the root's children see, then of the drafted
                nodes.
        """
        committed = len(slots) - self.nodes
        entries = []
        for node in self.frontier:
            places, at = [], node
            while at != ROOT:
                places.append(self._expanded[at])
                at = self.parents[at]
            path = slots[committed + np.array(places[::-1])]
            entries.append(
                Entry(
                    TokenTree.plain([self.tokens[node]]),
                    committed + len(path) - 1,
                    np.concatenate([slots[:committed], path]),
                    np.zeros(1, np.int64),
                )
            )
        return entries

    def proposal(self) -> DraftProposal:
        """The likeliest nodes; a parent is at least as likely as its children, and comes first."""
        order = sorted(range(len(self.tokens)), key=lambda n: (-self._scores[n], self._depths[n]))
        kept = sorted(order[: self.nodes])
        place = {node: i for i, node in enumerate(kept)} | {ROOT: -1}
        return DraftProposal(
            np.array([self.tokens[node] for node in kept], np.int64),
            np.array([place[self.parents[node]] for node in kept], np.int32),
        )
