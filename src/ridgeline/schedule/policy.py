"""How much each sequence may draft in a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ridgeline.core.sequence import Sequence as TokenSequence


class Budget(NamedTuple):
    """Limits of one sequence's tree; zero nodes is plain decoding."""

    nodes: int
    depth: int


class Policy(Protocol):
    """Spreads a step's draft nodes over the decoding sequences."""

    def budget(self, sequences: Sequence[TokenSequence], tokens_left: int) -> list[Budget]:
        """One budget a sequence, in order, at most `tokens_left` nodes in all."""
        ...


class FixedPolicy:
    """The same budget for every sequence, cut evenly where the step's tokens do not suffice."""

    def __init__(self, nodes: int, depth: int) -> None:
        self._nodes = nodes
        self._depth = depth

    def budget(self, sequences: Sequence[TokenSequence], tokens_left: int) -> list[Budget]:
        """See `Policy.budget`."""
        nodes = min(self._nodes, tokens_left // max(len(sequences), 1))
        return [Budget(nodes, min(self._depth, nodes))] * len(sequences)
