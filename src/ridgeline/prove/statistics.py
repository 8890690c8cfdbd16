"""Tests of counts against known probabilities, and what they could have found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats
from torch import Tensor

LEAST_EXPECTED = 5.0
"""Cells that expect fewer samples are merged: only large counts make the statistic chi-square."""
SUSPECT, BEYOND_DOUBT = 2e-3, 1e-12
"""Between the two a p-value is simulated: where cells expect few samples, statistics far out come
several times as often as chi-square says."""
SIMULATIONS, AT_ONCE, ENOUGH = 200_000, 5_000, 100
"""At most, and at a time; it ends when so many were as extreme."""
POWER = 0.9
"""With which probability the smallest drift that a test states would have been found."""
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Counts:
    """Outcomes of one known distribution, in C cells."""

    observed: NDArray[np.int64]
    """i64[C]"""
    p: NDArray[np.float64]
    """f64[C], summing to 1"""

    @property
    def samples(self) -> int:
        """Number of samples."""
        return int(self.observed.sum())

    @property
    def impossible(self) -> int:
        """Samples in cells that the distribution excludes."""
        return int(self.observed[self.p == 0].sum())

    def merged(self) -> Counts:
        """The same with every cell that expects too few samples in one, which may take others in.

        Which cells these are depends on `p` and the number of samples alone, never on the outcome.
        """
        order = np.argsort(-self.p, kind="stable")
        expected = self.p[order] * self.samples
        kept = int((expected >= LEAST_EXPECTED).sum())
        while 0 < kept < len(order) and expected[kept:].sum() < LEAST_EXPECTED:
            kept -= 1
        if kept == len(order):
            return self
        return Counts(
            np.append(self.observed[order[:kept]], self.observed[order[kept:]].sum()),
            np.append(self.p[order[:kept]], self.p[order[kept:]].sum()),
        )


@dataclass(frozen=True)
class Comparison:
    """What a test of counts says."""

    p_value: float
    samples: int
    cells: int
    """outcomes told apart, after merging"""
    df: int
    """degrees of freedom"""
    distance: float
    """total variation between the frequencies and the probabilities, over the merged cells"""
    low: float
    high: float
    """the true total variation over these cells lies between, with `CONFIDENCE`"""
    impossible: int
    """samples that the target excludes"""

    def smallest_drift(self, alpha: float) -> float:
        """The total variation from which on a drift is found with probability `POWER` or more.

        Pearson's statistic of n samples of a distribution r is noncentral chi-square with
        n sum (r - p)^2 / p, which is at least n (2 TV(r, p))^2 by Cauchy and Schwarz.

        Args:
            alpha: p-values of at most this count as found.
        """
        if not self.df:
            return 1.0
        return min(1.0, math.sqrt(_noncentrality(self.df, alpha) / self.samples) / 2)


def compare(parts: Sequence[Counts], exact: bool = True) -> Comparison:
    """Pearson's chi-square test of several distributions at once: statistics and df add up.

    A small p-value is the share of simulated outcomes that are as extreme (Besag and Clifford,
    "Sequential Monte Carlo p-values", Biometrika 78, 1991).

    Args:
        parts: one for each distribution; cells with few samples are merged first.
        exact: whether one excluded outcome decides; where rounding may let one in, it counts among
            the merged cells instead.
    """
    merged = [part.merged() for part in parts]
    statistic = sum(_pearson(part) for part in merged)
    df = sum(len(part.p) - 1 for part in merged)
    impossible = sum(part.impossible for part in parts)
    samples = sum(part.samples for part in parts)
    p_value = float(stats.chi2.sf(statistic, df)) if df else 1.0
    if BEYOND_DOUBT < p_value <= SUSPECT:
        p_value = _simulated(merged, statistic)
    distance, spread = 0.0, math.sqrt(math.log(1 / (1 - CONFIDENCE)) / (2 * samples))
    for part in merged:
        share = part.samples / samples
        distance += share * float(np.abs(part.observed / part.samples - part.p).sum()) / 2
        spread += share * math.sqrt((len(part.p) - 1) / part.samples) / 2
    return Comparison(
        0.0 if exact and impossible else p_value,
        samples,
        sum(len(part.p) for part in merged),
        df,
        distance,
        max(0.0, distance - spread),
        min(1.0, distance + spread),
        impossible,
    )


def holm(p_values: Sequence[float], alpha: float) -> list[bool]:
    """Which of several hypotheses fall, so that a true one falls with probability alpha at most.

    Source: Holm, "A simple sequentially rejective multiple test procedure" (Scandinavian Journal of
    Statistics 6, 1979).
    """
    fallen = [False] * len(p_values)
    for rank, index in enumerate(np.argsort(p_values, kind="stable").tolist()):
        if p_values[index] > alpha / (len(p_values) - rank):
            break
        fallen[index] = True
    return fallen


class Tally:
    """Trials that end in one of C classes, with known probabilities, each trial with its own.

    They may depend on what was before: the sums are martingales, normal for many trials.
    """

    def __init__(self, classes: int) -> None:
        self.trials = 0
        self.seen = np.zeros(classes)
        """f64[C]: how often each class came"""
        self.expected = np.zeros(classes)
        """f64[C]: how often it should have"""
        self.covariance = np.zeros((classes, classes))
        """f64[C,C], of `seen`"""

    def add(self, outcomes: Tensor, p: Tensor) -> None:
        """Counts N trials: the classes i64[N] that they ended in, of probabilities p f[N,C]."""
        share = p.double().cpu().numpy()
        share /= share.sum(1, keepdims=True)
        self.trials += len(share)
        self.seen += np.bincount(outcomes.cpu().numpy(), minlength=len(self.seen))
        self.expected += share.sum(0)
        self.covariance += np.diag(share.sum(0)) - share.T @ share

    @property
    def df(self) -> int:
        """Degrees of freedom."""
        return int(np.linalg.matrix_rank(self.covariance)) if self.trials else 0

    @property
    def p_value(self) -> float:
        """Of the hypothesis that every trial had its probabilities."""
        if not self.df:
            return 1.0
        excess = self.seen - self.expected
        statistic = excess @ np.linalg.pinv(self.covariance, hermitian=True) @ excess
        return float(stats.chi2.sf(statistic, self.df))

    def smallest_drift(self, alpha: float) -> float:
        """The change of any class's mean probability that is found with probability `POWER`.

        A change d of one class, whatever the others do, has noncentrality d^2 trials^2 / variance
        at least, by Cauchy and Schwarz.
        """
        if not self.df:
            return 1.0
        variance = float(np.diag(self.covariance).max())
        return min(1.0, math.sqrt(_noncentrality(self.df, alpha) * variance) / self.trials)


def _noncentrality(df: int, alpha: float) -> float:
    """At which chi-square of `df` exceeds its quantile of 1 - `alpha` with probability `POWER`."""
    limit = float(stats.chi2.isf(alpha, df))

    def missed(noncentrality: float) -> float:
        return float(stats.ncx2.cdf(limit, df, noncentrality)) - (1 - POWER)

    return float(optimize.brentq(missed, 1e-9, 2 * limit + 50))


def _pearson(part: Counts) -> float:
    expected = part.p * part.samples
    return float(((part.observed - expected) ** 2 / expected).sum())


def _simulated(parts: Sequence[Counts], statistic: float) -> float:
    rng = np.random.default_rng(0)
    done = extreme = 0
    while done < SIMULATIONS and extreme < ENOUGH:
        sums = np.zeros(AT_ONCE)
        for part in parts:
            expected = part.p * part.samples
            drawn = rng.multinomial(part.samples, part.p / part.p.sum(), AT_ONCE)
            sums += ((drawn - expected) ** 2 / expected).sum(1)
        done += AT_ONCE
        extreme += int((sums >= statistic).sum())
    return (extreme + 1) / (done + 1)
