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


Visited = tuple[Observation, list[int]]
"""What was seen of a tree, and the nodes of its accepted path that have children."""


@dataclass
class Watch:
    """Sums over the steps of an engine in which something was drafted."""

    draws: bool = True
    """see `Subject`"""
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
    broken: int = 0
    """distributions p that do not sum to 1, or hold NaN; such a q the engine refuses"""
    ratings: Tally = field(default_factory=lambda: Tally(len(RATINGS) + 1))
    """tokens emitted at nodes that had drawn children, by what the drafter held of them"""
    acceptance: Tally = field(default_factory=lambda: Tally(2))
    """whether drafts were rejected or accepted: by `rejection` the first child of those nodes; by
    `match`, if the drafter does not draw, any child of a node"""
    _overlap: float = 0.0
    """sum over those nodes of sum min(p, q)"""
    _proposals: dict[int, DraftProposal] = field(default_factory=dict)
    _logits: Tensor | None = None

    @property
    def tokens_per_step(self) -> float | None:
        """Mean over the steps in which something was drafted."""
        return 1 + self.accepted / self.steps if self.steps else None

    @property
    def theory(self) -> float | None:
        """What the tokens per step should be, from p and from what was drafted.

        Of drawn drafts: those of a chain as deep, verified token by token, by the formula for
        drafts accepted independently, with the mean of sum min(p, q). Else the expectation itself,
        given the trees.
        """
        if self.ratings.trials:
            return expected_tokens(self._overlap / self.ratings.trials, self.depth)
        if self.acceptance.trials:
            return 1 + float(self.acceptance.expected[1]) / self.steps
        return None

    def note(self, observations: Sequence[Observation], rule: str) -> None:
        """Counts a step under a rule."""
        visited: list[Visited] = []
        at: list[int] = []
        q: list[Tensor] = []
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
                own = self._proposals[seen.sequence.id].q
                self.drawn += own is not None
                if own is not None or not self.draws:
                    nodes = [node for node in seen.check.path.tolist() if tree.children(node)]
                    visited.append((seen, nodes))
                    at += [row + node - tree.root for node in nodes]
                    if own is not None:
                        q.append(own[[node - tree.root for node in nodes]])
            row += 1 + tree.drafted
        if not visited:
            return
        p = self._probabilities(visited, at)
        if q:
            self._compare(visited, p, torch.cat(q), rule)
        elif rule == "match":
            self._foresee(visited, p)

    def _probabilities(self, visited: Sequence[Visited], at: list[int]) -> Tensor:
        """f32[nodes,V]: p at the nodes, whose logits are the rows `at`."""
        assert self._logits is not None
        rows = []
        for seen, nodes in visited:
            before = seen.sequence.tokens[: seen.start + seen.tree.trunk]
            rows.append(replace(seen.sequence.rows(seen.tree, np.array(nodes)), tokens=before))
        p = process(self._logits[at], rows).softmax(1)
        self.broken += int((~((p.sum(1) - 1).abs() < 1e-3)).sum())
        return p

    def _compare(self, visited: Sequence[Visited], p: Tensor, q: Tensor, rule: str) -> None:
        """Counts what came of drawn drafts.

        Whatever was drafted, the token emitted at a node is one of p, so it falls into each class
        of tokens with the probability that p gives the class. By `rejection` the first child x ~ q
        is accepted with probability sum min(p, q) (Leviathan et al., arXiv 2211.17192, theorem
        3.5).

        Args:
            visited: N nodes in all.
            p: f32[N,V].
            q: f32[N,V], which the nodes' children were drawn from.
            rule: that verified them.
        """
        tokens: list[int] = []
        passed: list[int] = []
        for seen, nodes in visited:
            assert seen.check is not None
            tokens += seen.check.tokens[: len(nodes)]
            path = set(seen.check.path.tolist())
            passed += [int(seen.tree.children(node)[0] in path) for node in nodes]
        edges = torch.tensor(RATINGS, device=q.device)
        rating = torch.bucketize(torch.where(p > 0, q / p, 0.0), edges, right=True)
        share = p.new_zeros(len(p), len(RATINGS) + 1).scatter_add_(1, rating, p)
        emitted = torch.tensor(tokens, device=q.device)[:, None]
        self.ratings.add(rating.gather(1, emitted)[:, 0], share)
        accepted = torch.minimum(p, q).sum(1).clamp_max(1.0)
        self._overlap += float(accepted.sum())
        if rule == "rejection":
            self.acceptance.add(torch.tensor(passed), torch.stack([1 - accepted, accepted], 1))

    def _foresee(self, visited: Sequence[Visited], p: Tensor) -> None:
        """Counts which drafts were accepted that do not depend on what the target will draw.

        One is accepted if it is what the target draws: with the probabilities p of the children.
        """
        passed: list[int] = []
        expected = p.new_zeros(len(p))
        for seen, nodes in visited:
            assert seen.check is not None
            for i, node in enumerate(nodes):
                children = seen.tree.tokens[seen.tree.children(node)]
                expected[len(passed)] = p[len(passed), torch.from_numpy(children)].sum()
                passed.append(int(i < seen.check.accepted))
        expected.clamp_(max=1.0)
        self.acceptance.add(torch.tensor(passed), torch.stack([1 - expected, expected], 1))


@contextmanager
def watched(engine: Engine, draws: bool = True) -> Iterator[Watch]:
    """Watches the engine's target and drafter, which `draws` or not, as long as this lasts."""
    watch, target, drafter = Watch(draws), engine.target, engine.drafter
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
