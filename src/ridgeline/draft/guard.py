"""Whatever a drafter does wrong becomes a DraftError that names it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ridgeline.core.tree import DraftProposal, TokenTree, graft
from ridgeline.draft.base import Drafter, DraftRequest, Observation
from ridgeline.errors import DraftError, RidgelineError, reason


class Guard:
    """A drafter as the engine calls it."""

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self._drafter = drafter
        self._vocab_size = vocab_size

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[DraftProposal]:
        """The drafter's proposals, one a request."""
        with self._blamed():
            proposals = self._drafter.propose(requests)
        if not isinstance(proposals, Sequence) or len(proposals) != len(requests):
            count = len(proposals) if isinstance(proposals, Sequence) else type(proposals).__name__
            raise DraftError(
                f"drafter {self._drafter.name} returned {count} for {len(requests)} requests; it "
                "must return a list of one DraftProposal a request"
            )
        return proposals

    def graft(
        self, trunk: Sequence[int], proposal: DraftProposal, nodes: int, depth: int
    ) -> TokenTree:
        """The proposal below its trunk, within the limits that it was asked to keep."""
        try:
            tree = graft(trunk, proposal, self._vocab_size)
            deepest = int(tree.depth.max()) - tree.root
            if tree.drafted > nodes or deepest > depth:
                raise ValueError(
                    f"{tree.drafted} nodes, {deepest} deep, where {nodes} nodes, {depth} deep, "
                    "were allowed"
                )
        except (ValueError, TypeError, AttributeError, IndexError) as error:
            raise DraftError(f"drafter {self._drafter.name}: {reason(error)}") from error
        return tree

    def observe(self, observations: Sequence[Observation]) -> None:
        """Hands on what a step did."""
        with self._blamed():
            self._drafter.observe(observations)

    def forget(self, sequence_id: int) -> None:
        """Hands on that a sequence has ended."""
        with self._blamed():
            self._drafter.forget(sequence_id)

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        try:
            yield
        except RidgelineError:
            raise
        except Exception as error:
            raise DraftError(
                f"drafter {self._drafter.name} failed: {type(error).__name__}: {reason(error)}"
            ) from error
