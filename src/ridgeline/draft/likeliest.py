"""A tree of the likeliest nodes, for drafts that are point masses."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import numpy as np

from ridgeline.core.tree import DraftProposal
from ridgeline.draft.base import DraftRequest
from ridgeline.draft.growth import ROOT, Growth, Successors

CANDIDATES = 32
"""Likeliest tokens of a draft's distribution among which nodes are looked for."""
SIBLINGS = 1 / 3
"""Side branches are drafted down to this share of the confidence at which a path ends."""


class Likeliest(Growth):
    """The likeliest nodes are expanded, and of all nodes the likeliest are kept.

    How likely a node is to be accepted is estimated by the product of the drafter's own
    probabilities along its path.

    Source: EAGLE-2 (Li et al., arXiv 2406.16858).
    """

    sampled = False
    successors = CANDIDATES

    def __init__(self, request: DraftRequest, confidence: float, width: int | None = None) -> None:
        """`width` nodes of a level are expanded at most; None: as many as leave all levels some."""
        super().__init__(request)
        self._width = width or max(1, request.nodes // max(request.depth, 1))
        self._least = math.log(confidence) if confidence else -math.inf
        self._scores: list[float] = []
        self._depths: list[int] = []

    def hang(self, successors: Seq[Successors]) -> None:
        """See `Growth.hang`."""
        before = len(self.tokens)
        for parent, found in zip(self.frontier, successors, strict=True):
            above = self._scores[parent] if parent != ROOT else 0.0
            depth = self._depths[parent] + 1 if parent != ROOT else 1
            most = self.nodes  # so many siblings fill the tree
            for token, logprob in zip(found.tokens[:most], found.scores[:most], strict=True):
                if above + logprob >= self._least + math.log(SIBLINGS):
                    self.tokens.append(token)
                    self.parents.append(parent)
                    self._scores.append(above + logprob)
                    self._depths.append(depth)
        worth = [
            node
            for node in range(before, len(self.tokens))
            if self._scores[node] >= self._least
            and self._depths[node] < self.depth
            and not self._ends(node)
        ]
        worth.sort(key=self._scores.__getitem__, reverse=True)
        self.frontier = worth[: self._width]
        for node in self.frontier:
            self._places[node] = len(self._places)

    def proposal(self) -> DraftProposal:
        """See `Growth.proposal`."""
        kept = self._kept()
        index = {node: i for i, node in enumerate(kept)} | {ROOT: -1}
        return DraftProposal(
            np.array([self.tokens[node] for node in kept], np.int64),
            np.array([index[self.parents[node]] for node in kept], np.int32),
        )

    def held(self) -> frozenset[int]:
        """See `Growth.held`; behind an expanded node that was not kept there are none."""
        return frozenset(i for i, node in enumerate(self._kept()) if self._places.get(node) == i)

    def _kept(self) -> list[int]:
        """The likeliest nodes, the expanded ones in the order of their slots before the others.

        A parent is at least as likely as its children, and was expanded before them.
        """
        order = sorted(range(len(self.tokens)), key=lambda n: (-self._scores[n], self._depths[n]))
        return sorted(order[: self.nodes], key=lambda n: (self._places.get(n, len(order)), n))
