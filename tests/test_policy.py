"""Policies: what they allot, with simulated times and acceptance, and in the engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, count, pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from ridgeline import SamplingParams
from ridgeline.config import EngineConfig
from ridgeline.core.tree import DraftProposal
from ridgeline.draft.base import DraftContext, DraftRequest, Needs, Observation, register
from ridgeline.errors import ConfigError
from ridgeline.kv.store import KVStore
from ridgeline.schedule.acceptance import PRIOR, Acceptance
from ridgeline.schedule.allocation import Prospect
from ridgeline.schedule.choice import create_policy
from ridgeline.schedule.cost import KEPT, LIFETIME, Curve, DraftCost, Guess, LearnedCost, bucket
from ridgeline.schedule.goodput import PROBE_SHARE
from ridgeline.schedule.policy import Budget, FixedPolicy, TablePolicy
from tests.draft_models import GREEDY, SAMPLED, finish, run, start
from tests.engines import tiny_llm
from tests.policies import DEPTH, Machine, bound_by_memory, bound_by_rows, goodput, sequences

GUESS = Guess(10**8, 10**4)
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
    "spec", ["", "none", "fixed:", "goodput:3", "table:", "table:8=", "table:8=5,8=2", "table:-1=2"]
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


# The parts of it


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
    assert offer.time(np.array([4])) == pytest.approx(2.0)
    assert offer.time(np.array([0])) == 1.0


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


# In the engine


class CountingDrafter:
    """Drafts what is never right, and counts what it is asked."""

    name = "counting"
    needs = Needs()

    def __init__(self) -> None:
        self.asked: list[int] = []

    def bind(self, store: KVStore, first_layer: int) -> None:
        pass

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftProposal]:
        self.asked.append(len(requests))
        return [DraftProposal.chain([3] * request.depth) for request in requests]

    def observe(self, observations: Sequence[Observation]) -> None:
        pass

    def forget(self, sequence_id: int) -> None:
        pass


@register("counting")
def _counting(argument: str, context: DraftContext) -> CountingDrafter:
    return CountingDrafter()


LONG = SamplingParams(max_tokens=200, ignore_eos=True, bad_words=((3,),))
PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [20, 21, 22, 23, 24]]


def test_where_nothing_may_be_drafted_the_drafter_is_not_asked() -> None:
    llm = tiny_llm("llama", "counting", policy="table:1=0")
    texts = [output.token_ids for output in llm.generate(PROMPTS, LONG)]
    assert llm.drafter.asked == []  # type: ignore[union-attr]
    assert texts == [output.token_ids for output in tiny_llm().generate(PROMPTS, LONG)]


def test_a_drafter_that_is_never_right_is_hardly_asked() -> None:
    llm = tiny_llm("llama", "counting", policy="goodput")
    llm.generate(PROMPTS, LONG)
    asked = llm.drafter.asked  # type: ignore[union-attr]
    assert asked
    figures = [llm.generate([p], LONG)[0].completions[0].speculation for p in PROMPTS]
    for found in figures:
        assert found.accepted == 0
        assert found.drafted_steps < found.steps / 2


@pytest.mark.parametrize("policy", ["table:1=4,2=1", "goodput"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_policy_changes_the_text(policy: str, temperature: float) -> None:
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=5, ignore_eos=True)
    alone = [output.token_ids for output in tiny_llm().generate(PROMPTS, params)]
    llm = tiny_llm("llama", "ngram:min=1", policy=policy, max_batch=2)
    assert [output.token_ids for output in llm.generate(PROMPTS, params)] == alone
    assert llm.engine.policy is not None


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_seeded_texts_do_not_depend_on_the_clock(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for seed in (0, 1):
        ticks = accumulate(random.Random(seed).choice([1e-3, 1.0]) for _ in count())
        monkeypatch.setattr("ridgeline.engine.time", SimpleNamespace(perf_counter=ticks.__next__))
        engine, drafter = start(verify=rule, policy=None)
        long = replace(SAMPLED, max_tokens=60)
        texts.append([s.output for s in run(engine, PROMPTS, long)])
        assert sum(drafter.accepted) > 20
    assert texts[0] == texts[1]


def test_a_draft_model_catches_up_after_a_pause() -> None:
    """Every draft is compared with the draft model's own over the whole text."""
    engine, drafter = start(policy="table:1=4")
    lengths = zip(PROMPTS, (20, 20, 40), strict=True)
    requests = [engine.add(prompt, replace(GREEDY, max_tokens=most)) for prompt, most in lengths]
    plain = tiny_llm().generate(PROMPTS, replace(GREEDY, max_tokens=40))
    finish(engine)
    fed = [len(positions) for positions in drafter.fed]
    assert 20 in fed, "all that it missed, in one pass"
    assert sum(drafter.accepted) > 5
    for (sequence,), output in zip(requests, plain, strict=True):
        assert sequence.output == output.token_ids[: sequence.output_len]
