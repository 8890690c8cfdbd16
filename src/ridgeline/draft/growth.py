"""A token tree that grows level by level, whatever decides which nodes it gets.

Every drafter with distributions of its own (a draft model, the heads) grows its trees so: it
computes the logits of the frontier's nodes, and what may follow is hung below them (`levels.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ridgeline.core.batch import Entry
from ridgeline.core.sampling import Rows
from ridgeline.core.tree import DraftProposal, TokenTree
from ridgeline.draft.base import DraftRequest

ROOT = -1


@dataclass(frozen=True, eq=False)
class Successors:
    """What may follow one node."""

    tokens: list[int]
    """the likeliest first; drawn ones in draw order"""
    scores: list[float]
    """their log-probabilities given the node"""
    q: Tensor | None
    """f32[V], what they were drawn from; None: point masses"""


class Growth(ABC):
    """The tree of one request, from its root to a proposal.

    Nodes that have been expanded have their keys and values in the drafter's own layers, at the
    sequence's slots from len(tokens) on.
    """

    sampled: bool
    """whether children are drawn, and the proposal states from what"""
    successors: int
    """most successors of one node that it can use"""

    def __init__(self, request: DraftRequest) -> None:
        self.sequence = request.sequence
        self.nodes = request.nodes
        self.depth = request.depth
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.frontier: list[int] = [ROOT]
        """nodes whose children are asked for next"""
        self._places: dict[int, int] = {}  # of expanded nodes: their slots, from len(tokens)
        self._hidden: dict[int, Tensor] = {}  # [H] of the root and of expanded nodes

    @abstractmethod
    def hang(self, successors: Seq[Successors]) -> None:
        """Hangs children below the frontier's nodes, in order, and chooses the next frontier."""

    @abstractmethod
    def proposal(self) -> DraftProposal:
        """The tree. Its siblings are in draw order, if they were drawn."""

    @abstractmethod
    def held(self) -> frozenset[int]:
        """The proposal's nodes whose keys and values lie where `DraftRequest` says."""

    def keep_hidden(self, nodes: Seq[int], hidden: Tensor) -> None:
        """Keeps [F,H], the hidden states that these nodes hand to their children."""
        self._hidden.update(zip(nodes, hidden, strict=True))

    def parents_hidden(self) -> list[Tensor]:
        """[H] of the parent of each node of the frontier."""
        return [self._hidden[self.parents[node]] for node in self.frontier]

    def rows(self) -> Rows:
        """The rows that predict what follows the frontier's nodes."""
        nodes = list(self._places)
        index = {node: i + 1 for i, node in enumerate(nodes)} | {ROOT: 0}
        tokens = [self.sequence.tokens[-1], *(self.tokens[node] for node in nodes)]
        parents = [-1, *(index[self.parents[node]] for node in nodes)]
        tree = TokenTree(np.array(tokens, np.int64), np.array(parents, np.int32), trunk=1)
        return self.sequence.rows(tree, np.array([index[node] for node in self.frontier]))

    def entries(self, first: int = 0) -> list[Entry]:
        """One for each node of the frontier, after its own ancestors.

        `first` is the first token that has keys and values in the drafter's own layers.
        """
        slots = self.sequence.table.slots(first, len(self.sequence.tokens) + self.nodes)
        committed = len(slots) - self.nodes
        entries = []
        for node in self.frontier:
            places, at = [], node
            while at != ROOT:
                places.append(self._places[at])
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

    def _ends(self, node: int) -> bool:
        return self.tokens[node] in self.sequence.end_tokens
