"""T(N, B, S): how long a forward pass takes, as a calibrated curve.

A pass reads every weight once whatever the number of rows, until arithmetic is the limit; kernels
take rows in groups, so time grows in steps. Attention reads the keys of a sequence once for all its
rows and works on each pair of a row and a key. Nothing here knows where the figures come from.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls


class Sample(NamedTuple):
    """One pass and what it took."""

    tokens: int
    sequences: int
    context: int
    seconds: float


@dataclass(frozen=True)
class CostCurve:
    """T(N, B, S) = rows(N) + B * `sequence` + B * S * `key` + N * S * `pair`.

    rows(N) is linear between the measured numbers of rows, flat below them and goes on beyond them
    with the slope from the origin to the last.
    """

    rows: tuple[int, ...]
    """ascending"""
    row_seconds: tuple[float, ...]
    """of passes over so many rows, attention aside"""
    key: float = 0.0
    """of reading one cached token of one sequence, in all layers"""
    pair: float = 0.0
    """of one row attending to one cached token, in all layers"""
    sequence: float = 0.0
    """of one sequence"""
    windows: tuple[int | None, ...] = ()
    """tokens that each layer sees; None: all. Empty: every layer sees all"""

    def seconds(self, tokens: int, sequences: int, context: int) -> float:
        """See `schedule.cost.Cost`."""
        seen = self.seen(context)
        attention = sequences * seen * self.key + tokens * seen * self.pair
        return self.of_rows(tokens) + sequences * self.sequence + attention

    def of_rows(self, tokens: int) -> float:
        """rows(N)."""
        if tokens > self.rows[-1]:
            return self.row_seconds[-1] * tokens / self.rows[-1]
        return float(np.interp(tokens, self.rows, self.row_seconds))

    def seen(self, context: int) -> float:
        """Tokens that a layer sees, on average over the layers."""
        if not self.windows:
            return context
        return sum(context if w is None else min(context, w) for w in self.windows) / len(
            self.windows
        )


def fit(samples: Sequence[Sample], windows: tuple[int | None, ...] = ()) -> CostCurve:
    """The curve nearest to measured passes, by least squares of relative errors.

    No part of it is negative, and rows(N) never falls: what is fitted are its increments.

    Args:
        samples: at least one; every number of tokens among them becomes a point of the curve. To
            tell keys from pairs, some need long contexts with one row and with several.
        windows: as in `CostCurve`.
    """
    grid = sorted({sample.tokens for sample in samples})
    curve = CostCurve(tuple(grid), (0.0,) * len(grid), windows=windows)
    system: NDArray[np.float64] = np.zeros((len(samples), len(grid) + 3))
    for line, sample in zip(system, samples, strict=True):
        seen = curve.seen(sample.context)
        line[: bisect_left(grid, sample.tokens) + 1] = 1
        line[len(grid) :] = sample.sequences, sample.sequences * seen, sample.tokens * seen
        line /= sample.seconds
    # Columns of very different size would stop the solver early.
    scale = np.where(np.any(system, axis=0), np.linalg.norm(system, axis=0), 1.0)
    found, _ = nnls(system / scale, np.ones(len(samples)))
    found /= scale
    rows = np.cumsum(found[: len(grid)])
    sequence, key, pair = found[len(grid) :].tolist()
    return CostCurve(tuple(grid), tuple(rows.tolist()), key, pair, sequence, windows)
