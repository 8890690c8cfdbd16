"""What an engine does with its drafts, seen from outside, and what theory says that it should."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.batch import Batch
from ridgeline.core.sampling import process
from ridgeline.core.theory import expected_tokens
from ridgeline.core.tree import DraftProposal
from ridgeline.draft.base import DraftRequest, Observation
from ridgeline.engine import Engine
from ridgeline.prove.statistics import Tally

RATINGS = (0.25, 1.0)
"""Where classes of tokens by q / p begin and end."""


@dataclass
class Watch:
    """Sums over the steps of an engine in which something was drafted."""

    steps: int = 0
    drafted: int = 0
    """nodes"""
    accepted: int = 0
    depth: int = 0
    """of the deepest tree"""
    branching: int = 0
    """trees with siblings"""
    drawn: int = 0
    """trees that came with the distributions that they were drawn from"""
    ratings: Tally = field(default_factory=lambda: Tally(len(RATINGS) + 1))
    """tokens emitted at nodes that had drawn children, by what the drafter held of them"""
    first_drafts: Tally = field(default_factory=lambda: Tally(2))
    """of those nodes: whether the first child was rejected, or accepted"""
    _proposals: dict[int, DraftProposal] = field(default_factory=dict)
    _logits: Tensor | None = None

    @property
    def tokens_per_step(self) -> float | None:
        """Mean over the steps in which something was drafted."""
        return 1 + self.accepted / self.steps if self.steps else None

    @property
    def theory(self) -> float | None:
        """Tokens a step of a chain as deep, by the formula for drafts accepted independently."""
        first = self.first_drafts
        if not first.trials:
            return None
        return expected_tokens(float(first.expected[1]) / first.trials, self.depth)

    def note(self, observations: Sequence[Observation], rule: str) -> None:
        """Counts a step under a rule."""
        drawn: list[tuple[Observation, list[int], Tensor]] = []
        at: list[int] = []
        row = 0  # of the logits: the present root's
        for seen in observations:
            if seen.check is None:
                continue
            tree = seen.tree
            if tree.drafted:
                self.steps += 1
                self.drafted += tree.drafted
                self.accepted += seen.check.accepted
                self.depth = max(self.depth, int(tree.depth.max()) - tree.root)
                self.branching += any(len(tree.children(node)) > 1 for node in range(tree.size))
                q = self._proposals[seen.sequence.id].q
                if q is not None:
                    nodes = [node for node in seen.check.path.tolist() if tree.children(node)]
                    own = [node - tree.root for node in nodes]
                    drawn.append((seen, nodes, q[own]))
                    at += [row + node for node in own]
            row += 1 + tree.drafted
        if drawn:
            self.drawn += len(drawn)
            self._compare(drawn, at, rule)

    def _compare(
        self, drawn: Sequence[tuple[Observation, list[int], Tensor]], at: list[int], rule: str
    ) -> None:
        """Counts what came of drawn drafts.

        Whatever was drafted, the token emitted at a node is one of p, so it falls into each class
        of tokens with the probability that p gives the class. By `rejection` the first child x ~ q
        is accepted with probability sum min(p, q) (Leviathan et al., arXiv 2211.17192, theorem
        3.5).

        Args:
            drawn: observations, their accepted paths' nodes that have children, and the rows
                f32[nodes,V] of q that these were drawn from.
            at: rows of the logits that belong to the nodes.
            rule: that verified them.
        """
        assert self._logits is not None
        rows, tokens, passed = [], [], []
        for seen, nodes, _ in drawn:
            assert seen.check is not None
            before = seen.sequence.tokens[: seen.start + seen.tree.trunk]
            rows.append(replace(seen.sequence.rows(seen.tree, np.array(nodes)), tokens=before))
            tokens += seen.check.tokens[: len(nodes)]
            path = set(seen.check.path.tolist())
            passed += [int(seen.tree.children(node)[0] in path) for node in nodes]
        p, q = process(self._logits[at], rows).softmax(1), torch.cat([part for *_, part in drawn])
        edges = torch.tensor(RATINGS, device=q.device)
        rating = torch.bucketize(torch.where(p > 0, q / p, 0.0), edges, right=True)
        share = p.new_zeros(len(p), len(RATINGS) + 1).scatter_add_(1, rating, p)
        emitted = torch.tensor(tokens, device=q.device)[:, None]
        self.ratings.add(rating.gather(1, emitted)[:, 0], share)
        if rule == "rejection":
            accepted = torch.minimum(p, q).sum(1).clamp_max(1.0)
            self.first_drafts.add(torch.tensor(passed), torch.stack([1 - accepted, accepted], 1))


@contextmanager
def watched(engine: Engine) -> Iterator[Watch]:
    """Watches the engine's target and drafter as long as this lasts."""
    watch, target, drafter = Watch(), engine.target, engine.drafter
    assert drafter is not None
    forward, propose, observe = target.forward, drafter.propose, drafter.observe

    def watched_forward(batch: Batch, *rest: Any) -> Any:
        output = forward(batch, *rest)
        watch._logits = output.logits
        return output

    def watched_propose(requests: Sequence[DraftRequest]) -> list[DraftProposal]:
        proposals = propose(requests)
        ids = (request.sequence.id for request in requests)
        watch._proposals = dict(zip(ids, proposals, strict=True))
        return proposals

    def watched_observe(observations: Sequence[Observation]) -> None:
        watch.note(observations, engine.config.verify)
        observe(observations)

    with (
        patch.object(target, "forward", watched_forward),
        patch.object(drafter, "propose", watched_propose),
        patch.object(drafter, "observe", watched_observe),
    ):
        yield watch
