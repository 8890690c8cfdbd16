"""The calibrated cost curve: it finds what made the measurements."""

from __future__ import annotations

import numpy as np
import pytest

from ridgeline.plan.cost import CostCurve, Sample, fit

STEPS = CostCurve(
    rows=(1, 4, 5, 8, 16),
    row_seconds=(10e-3, 10e-3, 14e-3, 14e-3, 22e-3),
    key=2e-6,
    pair=5e-7,
    sequence=1e-4,
)


def samples(curve: CostCurve) -> list[Sample]:
    sizes = [(1, rows, 64) for rows in curve.rows]
    sizes += [(b, b * n, s) for b in (1, 4) for n in (1, 4) for s in (64, 1024, 4096)]
    return [Sample(n, b, s, curve.seconds(n, b, s)) for b, n, s in sizes]


def test_the_formula() -> None:
    assert STEPS.seconds(4, 2, 100) == pytest.approx(10e-3 + 2e-4 + 2 * 100 * 2e-6 + 4 * 100 * 5e-7)
    assert STEPS.of_rows(3) == 10e-3
    assert STEPS.of_rows(12) == pytest.approx(18e-3)
    assert STEPS.of_rows(32) == pytest.approx(44e-3), "beyond, as from the origin"


def test_windows() -> None:
    curve = CostCurve((1,), (1.0,), key=1.0, windows=(10, None))
    assert curve.seen(4) == 4
    assert curve.seen(100) == 55
    assert curve.seconds(1, 2, 100) == 1 + 2 * 55


def test_a_curve_is_found_again() -> None:
    found = fit(samples(STEPS))
    assert found.rows == STEPS.rows
    for rows, sequences, context in [(1, 1, 512), (5, 5, 2048), (8, 2, 3000), (16, 1, 10)]:
        there = STEPS.seconds(rows, sequences, context)
        assert found.seconds(rows, sequences, context) == pytest.approx(there, rel=1e-3)
    assert found.key == pytest.approx(STEPS.key, rel=0.01)
    assert found.pair == pytest.approx(STEPS.pair, rel=0.01)


def test_noise_makes_no_part_negative_and_no_curve_fall() -> None:
    random = np.random.default_rng(3)
    noisy = [s._replace(seconds=s.seconds * random.normal(1, 0.1)) for s in samples(STEPS)]
    found = fit(noisy)
    assert min(found.key, found.pair, found.sequence, *found.row_seconds) >= 0
    assert [*found.row_seconds] == sorted(found.row_seconds)
    errors = [abs(found.seconds(*s[:3]) / STEPS.seconds(*s[:3]) - 1) for s in noisy]
    assert np.median(errors) < 0.1


def test_one_measurement() -> None:
    assert fit([Sample(2, 1, 0, 0.5)]).seconds(2, 1, 0) == pytest.approx(0.5)
