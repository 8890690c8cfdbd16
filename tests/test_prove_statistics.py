"""The statistics of `ridgeline prove`: they err as often as they say, and find what they say."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from ridgeline.prove import statistics
from ridgeline.prove.statistics import POWER, Counts, Tally, compare, holm

TRIALS = 2_000
ALPHA = 0.01
P = np.array([0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.01, 0.004, 0.003, 0.003])


def runs(p: NDArray[np.float64], samples: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).multinomial(samples, p, TRIALS)


def close(count: int, share: float) -> bool:
    """Whether so many of TRIALS are no more than chance away from a share."""
    return abs(count - share * TRIALS) < 4 * math.sqrt(share * (1 - share) * TRIALS) + 1


def test_false_alarms_are_as_frequent_as_stated() -> None:
    """Two distributions at once, with rare outcomes."""
    pairs = zip(runs(P, 300, 0), runs(P[::-1], 500, 1), strict=True)
    values = [compare([Counts(one, P), Counts(two, P[::-1])]).p_value for one, two in pairs]
    assert close(sum(value <= ALPHA for value in values), ALPHA)
    assert close(sum(value <= 0.5 for value in values), 0.5)


def test_false_alarms_far_out_are_as_frequent_as_stated() -> None:
    """Where cells expect few, chi-square says 0.00025 of what happens in one of 1,000 runs."""
    p = np.array([0.9, *[0.01] * 10])
    outcomes = np.random.default_rng(3).multinomial(500, p, 1_000_000)
    pearson = ((outcomes - 500 * p) ** 2 / (500 * p)).sum(1)
    extreme = outcomes[np.argsort(-pearson, kind="stable")[1_000]]
    assert stats.chi2.sf(np.sort(pearson)[-1_001], 10) < 0.3e-3
    assert compare([Counts(extreme, p)]).p_value == pytest.approx(1e-3, rel=0.3)


@pytest.mark.parametrize("samples", [200, 2_000])
def test_the_smallest_drift_is_found_as_often_as_stated(
    samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Cauchy and Schwarz are tight: half of equally likely outcomes gain what others lose."""
    monkeypatch.setattr(statistics, "SIMULATIONS", 500)  # enough for ALPHA, and quicker
    monkeypatch.setattr(statistics, "AT_ONCE", 500)
    p = np.full(8, 1 / 8)
    drift = compare([Counts(runs(p, samples, 0)[0], p)]).smallest_drift(ALPHA)
    drifted = p * (1 + 2 * drift * np.array([1, -1] * 4))
    assert np.abs(drifted - p).sum() / 2 == pytest.approx(drift)
    found = sum(compare([Counts(c, p)]).p_value <= ALPHA for c in runs(drifted, samples, 1))
    assert found / TRIALS == pytest.approx(POWER, abs=0.03)


def test_the_interval_holds_the_true_distance() -> None:
    true = 0.8 * P + 0.2 * P[::-1]
    outcomes = [compare([Counts(counts, P)]) for counts in runs(true, 400, 0)]
    merged = Counts(np.array([400] + [0] * 9), P).merged()
    kept = len(merged.p) - 1
    pooled = np.append(true[:kept], true[kept:].sum())
    distance = np.abs(pooled - merged.p).sum() / 2
    assert sum(o.low <= distance <= o.high for o in outcomes) >= 0.95 * TRIALS
    assert all(o.high < 1 for o in outcomes)


def test_merging_keeps_samples_and_looks_at_p_alone() -> None:
    for counts in runs(P, 300, 0)[:20]:
        merged = Counts(counts, P).merged()
        assert merged.samples == 300
        assert merged.p.sum() == pytest.approx(1)
        assert (merged.p * 300 >= 5).all()
        assert merged.p.tolist() == Counts(counts[::-1], P).merged().p.tolist()
    few = Counts(np.array([2, 1]), np.array([0.6, 0.4])).merged()
    assert few.p.tolist() == [1.0]
    assert compare([few]).p_value == 1.0
    assert compare([few]).smallest_drift(ALPHA) == 1.0


def test_an_impossible_outcome_decides_if_bits_are_exact() -> None:
    counts = Counts(np.array([499, 500, 1]), np.array([0.5, 0.5, 0.0]))
    assert compare([counts]).p_value == 0.0
    assert compare([counts], exact=False).p_value > 0.5
    assert compare([counts]).impossible == 1


def test_holm() -> None:
    """Of 0.005, 0.01, 0.03, 0.04 at 0.05: 0.005 <= 0.05/4, 0.01 <= 0.05/3, 0.03 > 0.05/2."""
    assert holm([0.01, 0.04, 0.03, 0.005], 0.05) == [True, False, False, True]
    assert holm([], 0.05) == []
    values = np.random.default_rng(0).random((TRIALS, 11))
    assert sum(any(holm(row.tolist(), 0.05)) for row in values) <= 0.05 * TRIALS * 1.3


def tallies(shift: float, trials: int, runs: int) -> list[Tally]:
    """Classes of probabilities that differ from trial to trial; the first gains `shift`."""
    rng = np.random.default_rng(0)
    result = []
    for _ in range(runs):
        tally = Tally(3)
        p = rng.dirichlet([4, 3, 2], trials)
        wrong = p + shift * np.array([1, -0.5, -0.5])
        u = rng.random((trials, 1))
        outcomes = (u > wrong.cumsum(1)[:, :2]).sum(1)
        tally.add(torch.from_numpy(outcomes), torch.from_numpy(p))
        result.append(tally)
    return result


def test_tallies_err_as_often_as_stated_and_find_what_they_state() -> None:
    honest = tallies(0.0, 400, TRIALS)
    assert close(sum(tally.p_value <= ALPHA for tally in honest), ALPHA)
    assert honest[0].df == 2
    drift = honest[0].smallest_drift(ALPHA)
    found = sum(tally.p_value <= ALPHA for tally in tallies(drift, 400, 500))
    assert found / 500 >= POWER - 0.05
    assert sum(t.p_value <= ALPHA for t in tallies(drift / 4, 400, 500)) / 500 < POWER / 2
    assert Tally(2).p_value == Tally(2).smallest_drift(ALPHA) == 1.0
