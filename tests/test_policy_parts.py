"""What goodput is made of: the allotment, estimates of acceptance, learned costs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from ridgeline.schedule.acceptance import PRIOR, Acceptance
from ridgeline.schedule.allocation import Prospect
from ridgeline.schedule.cost import KEPT, LIFETIME, Curve, DraftCost, LearnedCost, Pace, bucket
from tests.policies import GUESS


def prospect(gain: list[list[float]], seconds: Sequence[float], **rest: object) -> Prospect:
    depth = len(gain[0])
    defaults = {
        "gain": np.array(gain),
        "nodes": np.ones(depth),
        "sizes": np.arange(depth + 1),
        "catch_up": np.zeros(len(gain)),
        "rows": np.arange(len(seconds)),
        "seconds": np.array(seconds),
        "draft": DraftCost(),
        "now": 0,
    }
    return Prospect(**{**defaults, **rest})  # type: ignore[arg-type]


def test_the_best_allotment_by_hand() -> None:
    # The likeliest first: 2 / 1.0, 2.9 / 1.2, 3.7 / 1.4, 4.2 / 1.6, 4.3 / 1.8 tokens a second.
    offer = prospect([[0.9, 0.5], [0.8, 0.1]], [1.0, 1.2, 1.4, 1.6, 1.8])
    assert offer.best(64).tolist() == [1, 1]
    assert offer.best(1).tolist() == [1, 0]
    assert offer.best(0).tolist() == [0, 0]


def test_a_step_of_the_curve_is_seen_across() -> None:
    """The second row costs much, the third and fourth nothing: all or none."""
    offer = prospect([[0.9, 0.8, 0.7, 0.6]], [1.0, 2.0, 2.0, 2.0, 2.0])
    assert offer.best(64).tolist() == [4]
    assert offer.best(2).tolist() == [2]
    assert prospect([[0.5, 0.25, 0.1, 0.05]], [1.0, 2.0, 2.0, 2.0, 2.0]).best(64).tolist() == [0]


def test_ties_go_to_shallow_drafts_and_earlier_sequences() -> None:
    same = prospect([[0.9, 0.9], [0.9, 0.9], [0.9, 0.9]], [1.0] * 7)
    assert same.best(2).tolist() == [1, 1, 0]
    assert same.best(4).tolist() == [2, 1, 1]
    nothing = prospect([[0.0, 0.0]], [1.0] * 3)
    assert nothing.best(64).tolist() == [0], "what brings nothing is not drafted, even for free"


def test_catching_up_is_charged_once_a_sequence() -> None:
    costs = {"catch_up": np.array([0.0, 5.0])}
    offer = prospect([[0.9, 0.9], [0.9, 0.9]], [1.0] * 5, **costs)
    assert offer.best(64).tolist() == [2, 0]


def test_all_or_nothing_offers_cost_what_they_cost_on_average() -> None:
    """Half the time 4 nodes, else none: the mean of both times, not the time of two rows."""
    offer = prospect([[0.4] * 4], [1.0, 1.0, 1.0, 1.0, 3.0], nodes=np.full(4, 0.5))
    assert offer.times(np.array([4])) == pytest.approx(2.0)
    assert offer.times(np.array([0])) == 1.0


def test_acceptance_by_depth_from_those_at_risk() -> None:
    known = Acceptance([1, 1, 1])
    for _ in range(2000):
        known.add(0, 3, 3, 3, [1, 1, 1])
        known.add(1, 3, 1, 0, [1, 1, 1])
    gain = known.survival([99]).gain[0]
    assert gain == pytest.approx([0.5, 0.5, 0.5], abs=0.05), "none at risk failed at depth 2 or 3"


def test_a_window_that_was_accepted_whole_says_nothing_beyond_it() -> None:
    known = Acceptance([1, 1])
    for _ in range(500):
        known.add(0, 1, 1, 1, [1])
    first, second = known.survival([0]).gain[0]
    assert first > 0.95
    assert second / first == pytest.approx(first, abs=0.03), "as above it, until tried"
    for _ in range(500):
        known.add(0, 2, 2, 1, [1, 1])
    assert known.survival([0]).gain[0][1] < 0.1


def test_new_requests_start_from_the_pool_and_part_from_it() -> None:
    known = Acceptance([1, 1])
    assert known.survival([0]).gain[0] == pytest.approx([PRIOR, PRIOR**2])
    for _ in range(100):
        known.add(0, 1, 1, 0, [1])
        known.add(1, 1, 1, 1, [1])
    bad, good, new = known.survival([0, 1, 2]).gain[:, 0]
    assert bad < 0.15
    assert good > 0.85
    assert new == pytest.approx(0.5, abs=0.1)
    known.forget(1)
    assert known.survival([1]).gain[0, 0] == pytest.approx(new)


def test_what_is_offered_is_counted() -> None:
    known = Acceptance([2, 2])
    assert known.survival([0]).nodes == pytest.approx([2, 2])
    for _ in range(500):
        known.add(0, 2, 0, 0, [])
        known.add(0, 2, 1, 1, [2])
    estimate = known.survival([0])
    assert estimate.nodes == pytest.approx([1, 0], abs=0.05)
    assert estimate.gain[0] == pytest.approx([0.5, 0], abs=0.05)


def test_a_curve_is_interpolated_and_forgets() -> None:
    curve = Curve()
    curve.add(2, 1.0, 0)
    curve.add(4, 2.0, 0)
    assert curve.at([1, 2, 3, 4, 9], 0) == pytest.approx([1, 1, 1.5, 2, 2])
    for value in (9.0, 0.9, 1.1, 1.0, 1.0):  # one bad moment
        curve.add(2, value, 1)
    assert curve.at([2], 1) == pytest.approx([1.0])
    for _ in range(KEPT):
        curve.add(2, 3.0, LIFETIME + 9)
    assert curve.count(4, LIFETIME + 9) == 0
    assert curve.at([2, 4], LIFETIME + 9) == pytest.approx([3.0, 2.0]), "old but promising"
    for _ in range(KEPT):
        curve.add(2, 0.5, LIFETIME + 10)
    assert curve.at([2, 4], LIFETIME + 10) == pytest.approx([0.5, 0.5]), "old and forbidding"


def test_sizes_are_told_apart_to_an_eighth() -> None:
    assert [bucket(size) for size in range(1, 17)] == list(range(1, 17))
    assert all(abs(bucket(size) - size) <= size / 16 for size in range(1, 2000))


def test_costs_before_and_after_something_was_measured() -> None:
    cost = LearnedCost(GUESS)
    rows, seconds = cost.between(4, 12, 4, 100, 0)
    assert seconds == pytest.approx([GUESS.seconds(int(r), 4, 100) for r in rows])
    assert (rows[0], rows[-1]) == (4, 12)
    for now in range(5):
        cost.add(4, 4, 100, 0.010, now)
        cost.add(8, 4, 100, 0.011, now)
    rows, seconds = cost.between(4, 12, 4, 100, 5)
    found = dict(zip(rows.tolist(), seconds.tolist(), strict=True))
    assert found[4] == pytest.approx(0.010)
    assert found[8] == pytest.approx(0.011)
    assert all(a <= b for a, b in pairwise(seconds))
    longer = cost.between(4, 12, 4, 4000, 5)[1]
    assert longer[0] > seconds[0], "a longer context costs more"


def test_a_steady_machine_keeps_its_pace_and_one_that_slows_down_does_not() -> None:
    """Times have a tail on one side. A pace that followed their mean would drift (a hundredfold
    here): it is what they are divided by before the next ones are compared with them."""
    noise = np.random.default_rng(0).lognormal(0.0, 0.02, 4000)
    noise[::10] *= 1.15
    slower = np.append(np.ones(3600), np.linspace(1, 2, 400))
    cost, paces = LearnedCost(GUESS), []
    pace = Pace()
    for now, seconds in enumerate(noise * slower):
        if cost.count(1, 1, now):
            pace.follow(float(seconds), cost.usual(1, 1, 0))
        cost.add(1, 1, 0, float(seconds) / pace.value, now)
        paces.append(pace.value)
    assert paces[3600] == pytest.approx(1, rel=0.1)
    assert paces[-1] > 1.4 * paces[3600], "the rest is in the median of the size itself"


def test_draft_costs_by_levels_and_sequences() -> None:
    cost = DraftCost()
    assert cost.seconds(3, np.array([3]), 0) == pytest.approx([0])
    cost.add(4, 4, 0, 0.008, 1)
    assert cost.seconds(2, np.array([2]), 1) == pytest.approx([0.004]), "in proportion"
    cost.add(1, 1, 0, 0.005, 2)
    assert cost.seconds(1, np.array([1]), 2) == pytest.approx([0.005])
    assert cost.seconds(2, np.array([2]), 2) == pytest.approx([0.006]), "between the two"
    cost.add(1, 1, 100, 0.105, 3)
    assert cost.catching_up(3) == pytest.approx(0.001)
