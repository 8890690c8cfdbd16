"""Which drafts of a step are worth their time: the arithmetic behind `GoodputPolicy`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ridgeline.schedule.cost import DraftCost

MARGIN = 0.05
"""By how much drafts must promise to beat none: the best of many estimates is a flattering one."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Prospect:
    """What drafting for n decoding sequences may bring and cost in one step."""

    gain: Floats
    """f64[n,D]: chance that a draft of depth 1..D is made and accepted"""
    nodes: Floats
    """f64[D]: nodes expected at each depth"""
    sizes: Ints
    """i64[D+1]: nodes that a tree of depth 0..D may have"""
    catch_up: Floats
    """f64[n]: seconds charged for a sequence that is drafted for at all, whatever the depth"""
    rows: Ints
    """i64[S], ascending from 0: drafted nodes of the step ..."""
    seconds: Floats
    """f64[S]: ... and how long it then takes, drafting aside"""
    draft: DraftCost
    now: int

    @property
    def plain(self) -> float:
        """Seconds without drafts."""
        return float(self.seconds[0])

    def best(self, most: int) -> Ints:
        """i64[n]: depths of the highest expected rate, `most` nodes allowed in all.

        Drafts are taken in order of their survival for each row (with equal survival the shallow
        ones, and among those earlier sequences first), and the best beginning of that order wins;
        of equally good ones the shortest. Not the first that stops paying ends it: times grow in
        steps, and the first sequence to be drafted for pays for the drafter's pass.
        """
        n, depth = self.gain.shape
        row = self.plain / n  # what a charge in seconds weighs beside rows
        value = np.concatenate(
            [
                self.gain[:, :1] / (self.nodes[0] + self.catch_up[:, None] / row),
                self.gain[:, 1:] / self.nodes[1:],
            ],
            axis=1,
        )
        value = np.minimum.accumulate(value, axis=1)  # a draft comes with those above it
        order = np.argsort(-value.T, axis=None, kind="stable")
        level, sequence = np.divmod(order, n)
        allowed = np.cumsum(np.diff(self.sizes)[level])
        count = int(np.searchsorted(allowed, most, side="right"))
        level, sequence = level[:count], sequence[:count]
        expected = np.cumsum(self.nodes)
        spread = np.diff(expected * (self.sizes[1:] - expected), prepend=0.0)
        tokens = n + np.cumsum(self.gain[sequence, level])
        seconds = self._target(np.cumsum(self.nodes[level]), np.cumsum(spread[level]))
        seconds += np.cumsum(np.where(level == 0, self.catch_up[sequence], 0.0))
        deepest = np.maximum.accumulate(level) + 1
        for levels in range(1, depth + 1):
            lo, hi = np.searchsorted(deepest, [levels, levels + 1])
            if lo < hi:
                seconds[lo:hi] += self.draft.seconds(levels, np.arange(lo, hi) + 1, self.now)
        plain = (1 + MARGIN) * n / self.plain
        taken = int(np.argmax(np.append(plain, tokens / seconds)))
        return np.bincount(sequence[:taken], minlength=n)

    def times(self, depths: Ints, more: int = 0) -> Floats:
        """f64[more+1]: expected seconds of a step, catching up aside.

        With these depths i64[n], then with one, two, ... `more` further sequences of depth 1.
        """
        expected = np.append(0.0, np.cumsum(self.nodes))
        nodes, allowed = expected[depths], self.sizes[depths]
        extra = np.arange(more + 1)
        spread = (nodes * (allowed - nodes)).sum() + extra * expected[1] * (
            self.sizes[1] - expected[1]
        )
        seconds = self._target(nodes.sum() + extra * expected[1], spread)
        asked, levels = depths.sum() + extra, max(int(depths.max()), 1)
        return np.where(asked, seconds + self.draft.seconds(levels, asked, self.now), self.plain)

    def _target(self, nodes: Floats, spread: Floats) -> Floats:
        """Expected seconds where so many nodes are expected.

        A drafter may offer all that it is allowed or nothing, and times are no straight line: the
        mean is between none and the number that, drafted with a probability, has the same mean and
        variance as the sum of the sequences' trees.
        """
        some = np.maximum(nodes, 1e-9)
        most = some + np.maximum(spread, 0.0) / some
        return np.asarray(
            self.plain + some / most * (np.interp(most, self.rows, self.seconds) - self.plain)
        )
