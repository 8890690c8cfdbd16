"""How much each sequence may draft in a step: the protocol, and the policies that never learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ridgeline.core.sequence import Sequence as TokenSequence
from ridgeline.core.tree import TokenTree
from ridgeline.core.verify import Verification


class Budget(NamedTuple):
    """Limits of one sequence's tree; zero nodes is plain decoding."""

    nodes: int
    depth: int


NOTHING = Budget(0, 0)


@dataclass(frozen=True)
class Outcome:
    """What came of one sequence's drafts, or of its having none."""

    sequence: TokenSequence
    start: int
    """kv_len before the step"""
    depth: int
    """longest path that the drafter was allowed; 0: it was not asked"""
    tree: TokenTree
    check: Verification


@dataclass(frozen=True)
class Step:
    """One step of the engine, after it: what was verified, and how long it took."""

    outcomes: Sequence[Outcome]
    """one for each sequence that decoded, or read the end of its prompt"""
    rows: int
    """tokens of the target's pass, trunks and drafts"""
    decodes: bool
    """whether every trunk was a single token: no prompt was read"""
    draft_seconds: float
    """in the drafter's `propose`"""
    seconds: float
    """of the whole step"""


class Policy(Protocol):
    """Spreads a step's draft nodes over the decoding sequences."""

    def budget(
        self, sequences: Sequence[TokenSequence], trunks: int, tokens_left: int
    ) -> list[Budget]:
        """One budget a sequence, in order, at most `tokens_left` nodes in all.

        `trunks` are the tokens that the step computes without any draft, prompts included.
        """
        ...

    def observe(self, step: Step) -> None:
        """Learns from a step."""

    def forget(self, sequence_id: int) -> None:
        """Drops what it keeps for a sequence that has ended."""


class FixedPolicy:
    """The same budget for every sequence, cut evenly where the step's tokens do not suffice."""

    def __init__(self, nodes: int, depth: int) -> None:
        self._nodes = nodes
        self._depth = depth

    def budget(
        self, sequences: Sequence[TokenSequence], trunks: int, tokens_left: int
    ) -> list[Budget]:
        """See `Policy.budget`."""
        nodes = min(self._nodes, tokens_left // max(len(sequences), 1))
        return [Budget(nodes, min(self._depth, nodes))] * len(sequences)

    def observe(self, step: Step) -> None:
        """Nothing to learn."""

    def forget(self, sequence_id: int) -> None:
        """Nothing is kept."""


class TablePolicy:
    """A depth that the number of decoding sequences decides; otherwise as `FixedPolicy`."""

    def __init__(self, nodes: int, depth: int, table: Sequence[tuple[int, int]]) -> None:
        """`table` pairs a number of sequences with the depth up to it, ascending; above: 0.

        `nodes` and `depth` are the most that a row may give; a shallower tree has fewer nodes in
        proportion.
        """
        self._rows = [
            (most, FixedPolicy(nodes_for(nodes, depth, min(row, depth)), min(row, depth)))
            for most, row in table
        ]

    def budget(
        self, sequences: Sequence[TokenSequence], trunks: int, tokens_left: int
    ) -> list[Budget]:
        """See `Policy.budget`."""
        for most, policy in self._rows:
            if len(sequences) <= most:
                return policy.budget(sequences, trunks, tokens_left)
        return [NOTHING] * len(sequences)

    def observe(self, step: Step) -> None:
        """Nothing to learn."""

    def forget(self, sequence_id: int) -> None:
        """Nothing is kept."""


def nodes_for(nodes: int, full: int, depth: int) -> int:
    """Nodes of a tree of `depth` where one of depth `full` has `nodes`: the same width."""
    return -(-nodes * depth // full)
