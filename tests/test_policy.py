"""Policies: what they allot, with simulated times and acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from ridgeline.config import EngineConfig
from ridgeline.errors import ConfigError
from ridgeline.schedule.choice import create_policy
from ridgeline.schedule.goodput import PROBE_SHARE
from ridgeline.schedule.policy import Budget, FixedPolicy, TablePolicy
from tests.policies import DEPTH, GUESS, Machine, bound_by_memory, bound_by_rows, goodput, sequences

STEPS = 600


def budgets(policy: FixedPolicy | TablePolicy, count: int, left: int = 512) -> list[Budget]:
    return policy.budget(sequences(count), count, left)


# Without learning


def test_fixed_is_cut_evenly_where_tokens_are_short() -> None:
    policy = FixedPolicy(12, 4)
    assert budgets(policy, 3) == [Budget(12, 4)] * 3
    assert budgets(policy, 3, left=10) == [Budget(3, 3)] * 3
    assert budgets(policy, 0) == []


def test_the_table_goes_by_the_number_of_sequences() -> None:
    policy = create_policy("table", 5, 5, GUESS, draft_layers=False)
    assert isinstance(policy, TablePolicy)
    depths = {count: budgets(policy, count)[0].depth for count in (1, 8, 9, 32, 33, 64)}
    assert depths == {1: 5, 8: 5, 9: 2, 32: 2, 33: 0, 64: 0}
    assert budgets(policy, 33) == [Budget(0, 0)] * 33


def test_a_table_of_ones_own_within_depth_and_nodes() -> None:
    policy = create_policy("table:1=9,4=2,6=0", 12, 6, GUESS, draft_layers=False)
    assert isinstance(policy, TablePolicy)
    assert budgets(policy, 1) == [Budget(12, 6)]
    assert budgets(policy, 4)[0] == Budget(4, 2), "a tree of the same width"
    assert budgets(policy, 5)[0] == budgets(policy, 7)[0] == Budget(0, 0)


def test_the_default_is_reproducible_where_budgets_change_the_text() -> None:
    assert EngineConfig().chosen_policy == "goodput"
    assert EngineConfig(verify="rejection").chosen_policy == "fixed"
    assert EngineConfig(verify="block").chosen_policy == "fixed"
    assert EngineConfig(verify="block", policy="goodput").chosen_policy == "goodput"


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "none",
        "fixed:",
        "goodput:3",
        "table:",
        "table:8=",
        "table:8=5,8=2",
        "table:-1=2",
        f"table:{'9' * 5000}=1",
    ],
)
def test_what_is_no_policy(spec: str) -> None:
    with pytest.raises(ConfigError, match=f"policy is '{spec}'"):
        EngineConfig(policy=spec)


def test_a_policy_that_is_no_text() -> None:
    with pytest.raises(ConfigError, match="policy is 5; it must be one of"):
        EngineConfig(policy=5)  # type: ignore[arg-type]


# Goodput on a simulated machine


def plain(machine: Machine, acceptance: Sequence[float]) -> float:
    return machine.run(FixedPolicy(0, 0), acceptance, STEPS).rate


def fixed(machine: Machine, acceptance: Sequence[float]) -> float:
    return machine.run(FixedPolicy(DEPTH, DEPTH), acceptance, STEPS).rate


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("times", [bound_by_rows, bound_by_memory])
@pytest.mark.parametrize("count", [1, 4, 16, 64])
@pytest.mark.parametrize("chance", [0.02, 0.5, 0.9])
def test_as_fast_as_the_better_of_plain_and_fixed(
    chance: float, count: int, times: object, noise: float
) -> None:
    machine = Machine(times, noise=noise)  # type: ignore[arg-type]
    chances = [chance] * count
    best = max(plain(machine, chances), fixed(machine, chances))
    least = 0.97 if noise == 0 else 0.93
    assert machine.run(goodput(), chances, STEPS).rate > least * best


@pytest.mark.parametrize("count", [1, 8, 64])
def test_without_acceptance_drafting_stops_but_for_probes(count: int) -> None:
    machine = Machine(level=0.0002)
    run = machine.run(goodput(), [0.0] * count, 2 * STEPS)
    later = np.array(run.depths[STEPS:])
    assert later.max() == 1, "a probe is one level"
    assert later.any(), "a probe now and then"
    nothing = Machine(level=0.0002).run(FixedPolicy(0, 0), [0.0] * count, 2 * STEPS)
    assert run.rate > (1 - 2 * PROBE_SHARE) * nothing.rate


def test_with_high_acceptance_all_is_drafted() -> None:
    run = Machine(bound_by_memory).run(goodput(), [0.95] * 4, STEPS)
    assert np.mean(run.depths[100:]) > 0.95 * DEPTH


def test_the_larger_the_batch_the_less_is_drafted() -> None:
    means = [
        np.mean(Machine().run(goodput(), [0.7] * count, STEPS).depths[100:])
        for count in (1, 2, 4, 8, 16, 32)
    ]
    assert all(few >= more - 0.2 for few, more in pairwise(means))
    assert means[0] > 2.5
    assert means[-1] < 0.7


def test_drafts_go_to_the_requests_that_accept_them() -> None:
    chances = [0.9, 0.05] * 4
    run = Machine().run(goodput(), chances, STEPS)
    depths = np.mean(run.depths[100:], axis=0)
    assert depths[::2].min() > 1.5
    assert depths[1::2].max() < 0.5
    assert run.rate > 1.05 * max(plain(Machine(), chances), fixed(Machine(), chances))


def test_a_request_that_becomes_predictable_is_found() -> None:
    machine, policy = Machine(), goodput()
    before = machine.run(policy, [0.0], STEPS)
    after = machine.run(policy, [0.95], STEPS)
    assert np.mean(before.depths[100:]) < 0.3
    assert np.mean(after.depths[100:]) > 4


def test_an_expensive_drafter_is_left_alone() -> None:
    dear = Machine(level=0.01)
    run = dear.run(goodput(), [0.6] * 4, STEPS)
    assert np.mean(run.depths[100:]) < 0.05
    cheap = Machine(level=0.0002)
    assert np.mean(cheap.run(goodput(), [0.6] * 4, STEPS).depths[100:]) > 0.5


def test_probes_are_not_spent_on_catching_up() -> None:
    """A draft model that must read all it missed: its time is counted before it is asked again."""
    machine = Machine(level=0.002, lag=0.001)
    run = machine.run(goodput(draft_layers=True), [0.0] * 4, 2 * STEPS)
    assert run.rate > 0.97 * plain(machine, [0.0] * 4)
    assert np.count_nonzero(run.depths[100:]) < 20


def test_a_drafter_that_catches_up_cheaply_comes_back() -> None:
    machine, policy = Machine(bound_by_memory, lag=1e-6), goodput(draft_layers=True)
    machine.run(policy, [0.0], STEPS)
    assert np.mean(machine.run(policy, [0.95], STEPS).depths[100:]) > 4


def test_no_more_nodes_than_the_step_has_room_for() -> None:
    policy = goodput()
    run = Machine(bound_by_memory).run(policy, [0.95] * 4, STEPS)
    assert sum(run.depths[-1]) == 4 * DEPTH
    for left in (0, 1, 7):
        given = policy.budget(sequences(4), 4, left)
        assert sum(nodes for nodes, _ in given) <= left


def test_a_plan_is_for_the_sequences_that_it_was_made_for() -> None:
    policy = goodput()
    Machine().run(policy, [0.97, 0.0], STEPS)
    both = sequences(2)
    depths = [depth for _, depth in policy.budget(both, 2, 500)]
    assert depths[0] > 2 > depths[1]
    assert policy.budget(both[::-1], 2, 500)[1].depth == depths[0]
