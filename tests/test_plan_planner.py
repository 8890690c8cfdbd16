"""The planner: speed-ups by hand, and when not to speculate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ridgeline.core.theory import speedup
from ridgeline.plan import plot
from ridgeline.plan.acceptance import Acceptance, Range, constant
from ridgeline.plan.cost import CostCurve
from ridgeline.plan.drafters import Method, Planned
from ridgeline.plan.hardware import Hardware, hardware
from ridgeline.plan.planner import (
    Choice,
    Contender,
    Memory,
    Planner,
    best_of,
    memory,
    stops_paying,
)
from ridgeline.plan.result import Plan, make_plan, verdict
from ridgeline.plan.shape import read_shape
from tests.plan_models import LLAMA_3_70B, TARGET, write_config

SMALL = replace(TARGET, name="small", attention=TARGET.attention[:1])
FREE = Planned("free", Method("free", "nothing", "made up"), None)
PAID = Planned("paid", Method("paid", "recurrent", "made up", inputs=2), SMALL)


@dataclass(frozen=True)
class Flat:
    """As long as this, whatever the rows."""

    each: float

    def seconds(self, tokens: int, sequences: int, context: int) -> float:
        return self.each


def always(rate: float, nodes: float = 1.0) -> Range:
    return Range(constant(rate, nodes), constant(rate, nodes), "made up")


def planner(target: Any, drafter: float = 0.0) -> Planner:
    return Planner(target, lambda shape: Flat(drafter), context=100)


def best(p: Planner, contender: Contender, *batches: int) -> list[Choice]:
    return [best_of(p.choices(contender, batch, 8)) for batch in batches]


def test_the_article_s_speed_up() -> None:
    """a = 0.8, g = 5, c = 0.05, and a pass over 6 rows as long as one over 1: 3.69, 2.95x."""
    choice = planner(Flat(1.0), drafter=0.05).choice(Contender(PAID, always(0.8)), 5, 1)
    assert choice.tokens == pytest.approx((3.69, 3.69), abs=0.005)
    assert choice.speed_up == pytest.approx((2.95, 2.95), abs=0.005)
    assert choice.middle == pytest.approx(speedup(0.8, 5, 0.05))
    assert (choice.rows, choice.verify_seconds) == (6, 1.0)
    assert choice.draft_seconds == pytest.approx(0.25)


def test_a_pass_that_grows_with_its_rows() -> None:
    """T = 10 + rows: at batch 4, depth 2, four plain rows cost 14 and twelve cost 22."""
    curve = CostCurve(rows=(1, 1000), row_seconds=(11.0, 1010.0))
    choice = planner(curve).choice(Contender(FREE, always(0.5)), 2, 4)
    assert choice.verify_seconds == pytest.approx(22)
    assert choice.speed_up[0] == pytest.approx(1.75 * 14 / 22)


def test_a_range_gives_a_range() -> None:
    unsure = Range(constant(0.5), constant(0.9), "made up")
    choice = planner(Flat(1.0)).choice(Contender(FREE, unsure), 1, 1)
    assert choice.tokens == (1.5, 1.9)
    assert choice.speed_up == (1.5, 1.9)
    assert choice.middle == pytest.approx(1.7)


def test_trees_cost_rows() -> None:
    """Ten nodes a level: 21 rows at depth 2, and a drafting pass over ten rows after the first."""
    curve = CostCurve(rows=(1, 100), row_seconds=(1.0, 100.0))
    p = Planner(curve, lambda shape: curve, context=0)
    choice = p.choice(Contender(PAID, always(0.8, nodes=10)), 2, 1)
    assert choice.rows == 21
    assert choice.verify_seconds == pytest.approx(21)
    assert choice.draft_seconds == pytest.approx(1 + 10)


def test_drafts_that_are_not_always_there() -> None:
    """One step in four drafts five tokens: passes over 1 and 6 rows, never over 2.25."""
    step = CostCurve(rows=(1, 2, 3, 6), row_seconds=(10.0, 10.0, 18.0, 18.0))
    choice = planner(step).choice(Contender(FREE, always(0.5, nodes=0.25)), 5, 1)
    assert choice.verify_seconds == pytest.approx(0.75 * 10 + 0.25 * 18)


def test_rows_are_those_of_the_levels_considered() -> None:
    """Chains of which few get to level 3: at depth 1, 8 sequences have 8 drafts all the same."""
    curve = CostCurve(rows=(1, 100), row_seconds=(1.0, 100.0))
    chains = Acceptance((0.5, 0.1, 0.0), 0.5, (1.0, 0.25, 0.0))
    found = planner(curve).choices(Contender(FREE, Range(chains, chains, "made up")), 8, 3)
    assert [choice.rows for choice in found] == [8, 16, 18, 18]
    assert [choice.verify_seconds for choice in found] == pytest.approx([8, 16, 18, 18])


@pytest.mark.parametrize(
    ("batch", "passes"), [(1, (0, 1, 2, 2.25)), (2, (0, 1, 2, 2.4375)), (99, (0, 1, 2, 3))]
)
def test_a_drafter_stops_where_all_chains_have_ended(batch: int, passes: tuple[float, ...]) -> None:
    """A quarter of them gets to level 2, below which a third one is looked for."""
    chains = Acceptance((0.5, 0.1, 0.0), 0.5, (1.0, 0.25, 0.0))
    contender = Contender(PAID, Range(chains, chains, "made up"))
    found = planner(Flat(1.0), drafter=0.1).choices(contender, batch, 3)
    assert [choice.draft_seconds for choice in found] == pytest.approx([0.1 * n for n in passes])


def test_nothing_is_never_worse() -> None:
    hopeless = Contender(PAID, always(0.0))
    (choice,) = best(planner(Flat(1.0), drafter=0.01), hopeless, 1)
    assert (choice.depth, choice.speed_up, choice.draft_seconds) == (0, (1.0, 1.0), 0.0)
    (free,) = best(planner(Flat(1.0)), Contender(FREE, always(0.0)), 1)
    assert free.depth == 0, "of equal ones the smallest"
    (sure,) = best(planner(Flat(1.0)), Contender(FREE, always(1.0)), 1)
    assert (sure.depth, sure.middle) == (8, 9.0)


def test_it_stops_paying_at_the_ridge() -> None:
    """Flat up to 16 rows, then in proportion: what memory gave away has to be paid for."""
    curve = CostCurve(rows=(16, 17), row_seconds=(16.0, 17.0))
    found = best(planner(curve), Contender(FREE, always(0.6)), 1, 2, 4, 8, 16, 32)
    assert [choice.depth for choice in found] == [8, 7, 3, 1, 0, 0]
    assert stops_paying(found) == 16
    assert stops_paying(found[:3]) is None
    assert stops_paying(found[4:]) == 16
    assert stops_paying([*found[4:5], replace(found[0], batch=64)]) is None, "not from there on"


def test_memory_by_hand() -> None:
    choice = planner(Flat(1.0)).choice(Contender(PAID, always(0.5)), 3, 2)
    found = memory(TARGET, SMALL, choice, context=100, available=9000)
    assert found == Memory(
        weights=280.0,
        drafter=280.0,
        cache=2 * (100 + 4) * (2 * 8 + 8) * 2,
        logits=4 * 8 * 10,
        available=9000,
    )
    assert found.total == 280 + 280 + 9984 + 320
    assert not found.fits
    assert replace(found, available=found.total).fits


# The verdict


def plan_of(curve: CostCurve, acceptance: Range, memory: float = 1e6) -> Plan:
    slow = Hardware("slow", "a slow machine", memory, 100.0, {"bf16": 1000.0}, "made up")
    contenders = [Contender(FREE, acceptance)]
    return make_plan(planner(curve), contenders, TARGET, slow, "made up", [1, 8, 32], 4)


RIDGE_AT_16 = CostCurve(rows=(16, 17), row_seconds=(16.0, 17.0))
LINEAR = CostCurve(rows=(1,), row_seconds=(1.0,))


def test_the_verdict_is_plain() -> None:
    assert verdict(plan_of(LINEAR, always(0.9))) == [
        "Do not speculate here: at no batch size above is a gain expected."
    ]
    assert verdict(plan_of(RIDGE_AT_16, always(0.6))) == [
        "Do not speculate here from batch 32 on: no gain is expected there."
    ]
    flat = CostCurve(rows=(1, 1000), row_seconds=(1.0, 1.0))
    assert verdict(plan_of(flat, always(0.6))) == [
        "Speculation is expected to pay at every batch size above."
    ]


def test_a_gain_at_large_batches_alone_is_told() -> None:
    """Beside experts, say, where few rows read few of them."""
    flat = CostCurve(rows=(1, 1000), row_seconds=(1.0, 1.0))
    plan = plan_of(flat, always(0.6))
    one, eight, many = plan.batches
    none = [planner(flat).choice(plan.contenders[0], 0, 1)]
    late = replace(plan, batches=[replace(one, drafts={"free": none}), eight, many])
    assert verdict(late) == ["Do not speculate here at batch 1: no gain is expected there."]
    last = [replace(none[0], batch=32)]
    ends = replace(late, batches=[*late.batches[:2], replace(many, drafts={"free": last})])
    assert verdict(ends) == [
        "Do not speculate here at batch 1 and from batch 32 on: no gain is expected there."
    ]


def test_a_gain_that_hangs_on_acceptance_is_told() -> None:
    half_free = CostCurve(rows=(1, 1000), row_seconds=(2.0, 1001.0))
    unsure = Range(constant(0.3), constant(0.9), "made up")
    lines = verdict(plan_of(half_free, unsure))
    assert any("At batch 1 the low end of the acceptance assumed is a loss" in x for x in lines)


def test_what_does_not_fit_is_told() -> None:
    lines = verdict(plan_of(RIDGE_AT_16, always(0.6), memory=20_000))
    assert lines[-1].startswith("From batch 8 on it does not fit: ")
    assert "a slow machine has 20.0 kB" in lines[-1]


def test_drafts_that_do_not_fit_are_left_out() -> None:
    """Every draft takes rows of the cache and of the logits."""
    flat = CostCurve(rows=(1, 1000), row_seconds=(1.0, 1.0))
    whole = plan_of(flat, always(0.6)).batches[-1]
    plain = memory(TARGET, None, whole.drafts["free"][0], context=100, available=0).total
    drafted = memory(TARGET, None, whole.drafts["free"][2], context=100, available=0).total
    assert whole.best.depth == 4
    for available, depth in ((drafted, 2), (drafted - 1, 1), (plain, 0)):
        plan = plan_of(flat, always(0.6), memory=available)
        assert plan.batches[-1].best.depth == depth
        assert plan.batches[-1].memory.fits
        assert plan.batches[-1].choices["free"] == whole.best, "told all the same"
    assert verdict(plan) == [
        "Do not speculate here at batch 32: drafts would pay, but there is no memory left for them."
    ]
    nothing = plan_of(flat, always(0.6), memory=plain - 1).batches[-1]
    assert (nothing.best.depth, nothing.memory.fits, nothing.crowded) == (4, False, False)


def test_a_pass_over_several_tokens_of_each_text() -> None:
    curve = CostCurve(rows=(1, 1000), row_seconds=(11.0, 1010.0))
    one, eight, _ = plan_of(curve, always(0.6)).batches
    assert one.passes == pytest.approx((11, 12, 13, 14, 15))
    assert eight.passes == pytest.approx((18, 26, 34, 42, 50))
    assert eight.plain_seconds == eight.passes[0]


def test_points_of_a_picture_that_coincide_share_a_label() -> None:
    found = plot._together([1, 10, 11, 11], [1, 10, 11, 50], ["1", "2", "4", "8"])
    assert found == [((1, 1), "1"), ((10, 10), "2, 4"), ((11, 50), "8")]


def test_figures_of_a_plan(tmp_path: Path) -> None:
    plan = plan_of(RIDGE_AT_16, always(0.6))
    assert (plan.kind, plan.ridge) == ("bf16", 10)
    assert plan.ridge_tokens == pytest.approx(10)
    work = plan.batches[0].work
    assert plan.batches[0].intensity == sum(w.flops for w in work.values()) / sum(
        w.bytes for w in work.values()
    )
    four = replace(plan, shape=TARGET.in_format("int4"))
    assert four.ridge_tokens == pytest.approx(10 * 4.5 / 16)


def test_drafts_pay_longer_on_faster_arithmetic(tmp_path: Path) -> None:
    """The same model on H100 (ridge 295) and L40S (419): the batch where drafting ends."""
    from ridgeline.plan.roofline import Roofline

    shape = read_shape(write_config(LLAMA_3_70B, tmp_path))
    stops = []
    for name in ("h100-sxm", "l40s"):
        p = planner(Roofline(shape, hardware(name)))
        found = best(p, Contender(FREE, always(0.7)), *range(32, 1025, 32))
        stops.append(stops_paying(found))
    assert stops[0]
    assert stops[1]
    assert stops[0] < stops[1]
