"""What steps cost, learnt from the engine's own steps.

A curve is a guess of its shape times what was measured over that guess. So a size that was never
tried is told from its neighbours, and one that was tried from itself.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

KEPT = 8
"""Latest measurements of a size; what counts is the lower median, which a busy moment or a first
pass that allocates hardly moves."""
LIFETIME = 256
"""Steps after which a measurement is old: machines and loads change."""
ROWS_PER_PASS = 16
"""Guess: so many more rows cost as much again as the weights' being read. CPUs 4 to 30."""
PACE_STEP = 0.01
"""By how much, of its logarithm, one step can change the machine's present pace."""
EXACT = 16
"""Sizes up to this one are told apart, larger ones to within an eighth."""


class Cost(Protocol):
    """The duration of a step, drafting aside: learnt here, calibrated or on paper in `plan`."""

    def seconds(self, tokens: int, sequences: int, context: int) -> float:
        """Of `tokens` rows of `sequences` sequences, each after `context` cached tokens."""
        ...


class Guess:
    """A cost of the right shape, in units of one reading of the weights.

    Weights are read once a step, keys and values once a sequence; the rest grows with the rows. The
    roofline of Williams et al. (CACM 2009) takes the larger of the two; their sum is closer to what
    CPUs do.
    """

    def __init__(self, weights: int, kv_per_token: int) -> None:
        """Bytes of the weights, and of one token's keys and values."""
        self._cached = kv_per_token / weights

    def seconds(self, tokens: int, sequences: int, context: int) -> float:
        """See `Cost.seconds`."""
        cached = context * self._cached * (sequences + tokens) / 2
        return 1 + tokens / ROWS_PER_PASS + cached


class Median:
    """The lower median of the latest values."""

    def __init__(self) -> None:
        self._values: deque[tuple[int, float]] = deque(maxlen=KEPT)
        self.value = 0.0
        self.middle = 0.0
        """the mean of the lower and the upper median"""
        self.newest = -LIFETIME

    def add(self, value: float, now: int) -> None:
        """`now` counts steps."""
        self._drop(now)
        self._values.append((now, value))
        ordered = sorted(value for _, value in self._values)
        self.value = ordered[(len(ordered) - 1) // 2]
        self.middle = (self.value + ordered[len(ordered) // 2]) / 2
        self.newest = now

    def count(self, now: int) -> int:
        """Values young enough to count."""
        self._drop(now)
        return len(self._values)

    def _drop(self, now: int) -> None:
        """Values that are too old go."""
        while self._values and self._values[0][0] < now - LIFETIME:
            self._values.popleft()


class Pace:
    """How long steps take now over how long they took before.

    Other programs and heat slow steps of every size alike. A size that was measured in a slow
    moment and one of a fast moment could not be compared: so times are kept as they would be at
    the pace of the first. It follows slowly and by bounded steps, as durations have a long tail on
    one side: steps are divided by the pace before the next are compared with them, so that a mean
    would run away.
    """

    def __init__(self) -> None:
        self.value = 1.0

    def follow(self, seconds: float, usual: float) -> None:
        """One step, and what its size has taken so far, at pace 1."""
        ratio = math.log(seconds / (usual * self.value))
        self.value *= math.exp(min(max(ratio, -PACE_STEP), PACE_STEP))


class Curve:
    """A ratio that depends on a size, measured at some sizes."""

    def __init__(self) -> None:
        self._medians: dict[int, Median] = {}

    def add(self, size: int, ratio: float, now: int) -> None:
        """One measurement at a size of 1 or more."""
        self._medians.setdefault(bucket(size), Median()).add(ratio, now)

    def count(self, size: int, now: int) -> int:
        """Measurements about this size."""
        median = self._medians.get(bucket(size))
        return median.count(now) if median else 0

    def usual(self, size: int) -> float:
        """What was measured at about this size; there must be something."""
        return self._medians[bucket(size)].middle

    def at(self, sizes: Sequence[int] | NDArray[np.float64], now: int) -> NDArray[np.float64]:
        """f64[S]: interpolated, constant beyond what was measured.

        Old measurements count where they promise more than the young ones: then they are soon
        young again, while those that promise less might keep a size from ever being tried.
        """
        young = self.young(now)
        ratios = self._between(sizes, sorted(self._medians))
        some_old = 0 < len(young) < len(self._medians)
        return np.minimum(ratios, self._between(sizes, young)) if some_old else ratios

    def young(self, now: int) -> list[int]:
        """Sizes that were measured lately, ascending."""
        oldest = now - LIFETIME
        return sorted(size for size, median in self._medians.items() if median.newest >= oldest)

    def _between(
        self, sizes: Sequence[int] | NDArray[np.float64], known: Sequence[int]
    ) -> NDArray[np.float64]:
        return np.interp(sizes, known, [self._medians[size].value for size in known])


def bucket(size: int) -> int:
    """The size that stands for this one."""
    step = _step(size)
    return (size + step // 2) // step * step


def _step(size: int) -> int:
    return max(1, 2 ** (size.bit_length() - 4)) if size > EXACT else 1


class LearnedCost:
    """A step's duration, drafting aside.

    A curve of rows for each power of two of sequences, as eight sequences of one row cost more than
    one of eight.
    """

    def __init__(self, guess: Cost) -> None:
        self._guess = guess
        self._curves: dict[int, Curve] = {}

    def add(self, tokens: int, sequences: int, context: int, seconds: float, now: int) -> None:
        """One measured step; `now` counts steps."""
        curve = self._curves.setdefault(sequences.bit_length(), Curve())
        curve.add(tokens, seconds / self._guess.seconds(tokens, sequences, context), now)

    def count(self, tokens: int, sequences: int, now: int) -> int:
        """Measurements of about this size."""
        curve = self._curves.get(sequences.bit_length())
        return curve.count(tokens, now) if curve else 0

    def usual(self, tokens: int, sequences: int, context: int) -> float:
        """Seconds of a step of a size that was measured."""
        ratio = self._curves[sequences.bit_length()].usual(tokens)
        return ratio * self._guess.seconds(tokens, sequences, context)

    def between(
        self, first: int, last: int, sequences: int, context: int, now: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Row counts from `first` to `last`, i64[S], and the seconds of each, f64[S]; ascending.

        In units of the guess before anything was measured. Beyond the largest size lately measured
        they grow as the guess does, or as they did from the smallest one to it: whichever is less,
        as what looks too dear is never tried and stays unknown.
        """
        sizes = [first]
        while sizes[-1] < last:
            sizes.append(min(last, sizes[-1] + _step(sizes[-1])))
        rows = np.array(sizes)
        seconds = self._guessed(rows, sequences, context)
        if self._curves:
            octave = sequences.bit_length()
            curve = self._curves[min(self._curves, key=lambda known: abs(known - octave))]
            seconds *= curve.at(rows, now)
            if len(young := curve.young(now)) > 1:
                ends = np.array([young[0], young[-1]])
                low, high = curve.at(ends, now) * self._guessed(ends, sequences, context)
                beyond = rows - ends[1]
                line = high + beyond * max((high - low) / (ends[1] - ends[0]), 0.0)
                seconds = np.where(beyond > 0, np.minimum(seconds, line), seconds)
        return rows, np.maximum.accumulate(seconds)

    def _guessed(
        self, sizes: NDArray[np.int64], sequences: int, context: int
    ) -> NDArray[np.float64]:
        return np.array([self._guess.seconds(int(size), sequences, context) for size in sizes])


class DraftCost:
    """The drafter's time: by the levels asked for, and by the sequences that take part in each.

    Apart from it the time to catch up with tokens that a pause left out of its own layers.
    """

    def __init__(self) -> None:
        self._curves: dict[int, Curve] = {}
        self._lag = Median()

    def add(self, levels: int, asked: int, lag: int, seconds: float, now: int) -> None:
        """One `propose` of so many levels, the sequences' depths being `asked` in sum.

        `lag`: tokens that it caught up with, beside those of the last step.
        """
        if lag > EXACT:  # else too few to be told from noise
            usual = float(self.seconds(levels, np.array([asked]), now)[0])
            self._lag.add(max(seconds - usual, 0.0) / lag, now)
        elif not lag:
            breadth = max(1, round(asked / levels))
            ratio = seconds / (1 + breadth / ROWS_PER_PASS)
            self._curves.setdefault(levels, Curve()).add(breadth, ratio, now)

    def seconds(self, levels: int, asked: NDArray[np.int64], now: int) -> NDArray[np.float64]:
        """f64[S] for `levels` levels and sums of depths i64[S]; 0 before anything was measured.

        Between two numbers of levels that were asked for it is interpolated, beyond them in
        proportion.
        """
        if not self._curves:
            return np.zeros(len(asked))
        breadth = asked / levels
        below = max((known for known in self._curves if known <= levels), default=0)
        above = min((known for known in self._curves if known >= levels), default=0)
        if below and above > below:
            share = (levels - below) / (above - below)
            low, high = (self._curves[known].at(breadth, now) for known in (below, above))
            ratio = low + share * (high - low)
        else:
            nearest = below or above
            ratio = self._curves[nearest].at(breadth, now) * (levels / nearest)
        return np.asarray(ratio * (1 + breadth / ROWS_PER_PASS))

    def catching_up(self, now: int) -> float:
        """Seconds for each token; as a row of a draft before any was measured."""
        if self._lag.newest > 0:
            return self._lag.value
        return float(self.seconds(1, np.array([1]), now)[0]) / ROWS_PER_PASS
