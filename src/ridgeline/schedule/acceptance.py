"""How far drafts survive verification: estimated for each request, at each depth.

A draft of depth j is at risk only if all before it on its path were accepted, so acceptance at each
depth is estimated from those alone and survival is their product (Kaplan and Meier, 1958). A window
that was accepted whole is thereby censored: it says nothing against the depths beyond it.

A request differs from the others by one number, a shift of the log-odds of acceptance at every
depth (the model of Rasch, 1960), so that what is seen of it at shallow depths counts for the deep.
Without drafts of its own its estimate is that of all requests of the drafter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PRIOR = 0.6
"""Acceptance at depth 1 before anything was seen; at a deeper one it is that of the one above."""
PRIOR_WEIGHT = 12.0
"""Drafts that a prior counts for: that of all requests, and that of one, which is theirs."""
OFFER_WEIGHT = 4.0
"""Requests for drafts that full offers count for before any was made."""
FADE = 255 / 256
"""Of what is known of all requests, at each draft more of the same depth."""
MEMORY = 32.0
"""Drafts of one request, whatever their depth, after which one counts 1/e."""
SURE = 0.99
"""No acceptance is estimated above it, or below the rest."""


@dataclass(frozen=True)
class Survival:
    """What drafts of n sequences are expected to bring, by depth 1 to D."""

    gain: NDArray[np.float64]
    """f64[n,D]: chance that a draft of this depth is made and accepted"""
    nodes: NDArray[np.float64]
    """f64[D]: nodes that are drafted at this depth"""


class _Depth:
    """What is seen at one depth, of all requests together; later events count more."""

    def __init__(self, width: float) -> None:
        self._width = width
        self._asked = self._nodes = 0.0  # times that it was allowed; nodes drafted in these
        self._open = self._reached = self._passed = 0.0  # of those below an accepted path

    def add(self, is_open: bool, reached: bool, passed: bool, nodes: int) -> None:
        self._asked = self._asked * FADE + 1
        self._nodes = self._nodes * FADE + nodes
        if is_open:
            self._open = self._open * FADE + 1
            self._reached = self._reached * FADE + reached
            self._passed = self._passed * FADE + passed

    def acceptance(self, prior: float) -> float:
        return (self._passed + PRIOR_WEIGHT * prior) / (self._reached + PRIOR_WEIGHT)

    @property
    def offered(self) -> float:
        """Share of cases in which the drafter has a draft where it might have one."""
        return (self._reached + OFFER_WEIGHT) / (self._open + OFFER_WEIGHT)

    @property
    def drafted(self) -> float:
        return (self._nodes + OFFER_WEIGHT * self._width) / (self._asked + OFFER_WEIGHT)


class _Request:
    """What is seen of one request, at all depths together."""

    def __init__(self) -> None:
        self.reached = self.passed = 0.0
        self.expected = 0.0
        """drafts that would have been accepted, were it as all requests are"""

    def add(self, reached: int, passed: int, expected: float) -> None:
        fade = math.exp(-reached / MEMORY)
        self.reached = self.reached * fade + reached
        self.passed = self.passed * fade + passed
        self.expected = self.expected * fade + expected


class Acceptance:
    """Moving estimates, of all requests together and of each."""

    def __init__(self, widths: Sequence[int]) -> None:
        """`widths` are the nodes that a tree may have at depth 1, 2, ..., expected until seen."""
        self._pool = [_Depth(float(width)) for width in widths]
        self._requests: dict[int, _Request] = {}
        self._pooled: list[float] = []
        self._update()

    def add(
        self, sequence_id: int, asked: int, reached: int, passed: int, nodes: Sequence[int]
    ) -> None:
        """One sequence's drafts of one step.

        Args:
            sequence_id: whose they are.
            asked: the depth allowed.
            reached: depths at which a draft hung below an accepted path.
            passed: depths accepted: as many as reached, or one less.
            nodes: counts at depth 1, 2, ..., none of them zero.
        """
        for level, depth in enumerate(self._pool[:asked]):
            depth.add(
                level <= passed,
                level < reached,
                level < passed,
                nodes[level] if level < len(nodes) else 0,
            )
        if reached:
            request = self._requests.setdefault(sequence_id, _Request())
            request.add(reached, passed, sum(self._pooled[:reached]))
            self._update()

    def survival(self, ids: Sequence[int]) -> Survival:
        """The present estimate for these sequences."""
        pooled = np.array(self._pooled)
        nobody = _Request()
        requests = [self._requests.get(i, nobody) for i in ids]
        reached, passed, expected = np.array(
            [(r.reached, r.passed, r.expected) for r in requests]
        ).T
        prior, weight = PRIOR_WEIGHT * pooled[0], reached + PRIOR_WEIGHT
        shift = _log_odds((passed + prior) / weight) - _log_odds((expected + prior) / weight)
        acceptance = 1 / (1 + np.exp(-(_log_odds(pooled) + shift[:, None])))
        offered = np.array([depth.offered for depth in self._pool])
        gain = np.cumprod(acceptance * offered, 1, dtype=np.float64)
        return Survival(gain, np.array([depth.drafted for depth in self._pool]))

    def forget(self, sequence_id: int) -> None:
        """Drops a request's own estimate; what it taught about all stays."""
        self._requests.pop(sequence_id, None)

    def _update(self) -> None:
        above = PRIOR
        self._pooled = [above := depth.acceptance(above) for depth in self._pool]


def _log_odds(p: NDArray[np.float64]) -> NDArray[np.float64]:
    clipped = np.clip(p, 1 - SURE, SURE)
    return np.asarray(np.log(clipped / (1 - clipped)))
