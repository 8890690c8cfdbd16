"""Whatever the rule and the drafter, the output is distributed as the target's.

The same check runs on rules with a planted fault, and must catch each of them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from ridgeline.core import noise, rejection
from ridgeline.core.groups import gumbel_top
from ridgeline.core.noise import Stream
from ridgeline.core.sampling import SamplingParams
from ridgeline.core.theory import expected_tokens
from ridgeline.prove.faults import wrong_residual
from tests.simulation import Simulation, assert_counts, assert_distributed, chain

RULES = ("match", "rejection", "block")
BY_RATIO = ("rejection", "block")
SIBLINGS = (-1, -1, -1, 0, 0, 1, 3)  # three drawn below the root, two below its first child
COUPLED = {"match": Stream.TARGET, "rejection": Stream.DRAFT, "block": Stream.DRAFT}


def table(p: list[float]) -> Tensor:
    """The same distribution after every token."""
    return torch.tensor(p).expand(len(p), -1)


def random_table(size: int, seed: int, scale: float) -> Tensor:
    """f32[size,size]: logits that differ after every token."""
    return torch.randn(size, size, generator=torch.Generator().manual_seed(seed)) * scale


def adversarial(logits: Tensor) -> Tensor:
    """A drafter that thinks the opposite of the target."""
    return (-logits).softmax(1)


SMALL = random_table(5, 0, 1.0)


@pytest.mark.parametrize("rule", RULES)
def test_every_position_of_a_chain(rule: str) -> None:
    """Case 1: V = 3, depth 3, 131,072 trials, each emitted position and each pair of neighbours."""
    target, draft = table([0.10, 0.60, 0.30]).log(), table([0.30, 0.30, 0.40])
    simulation = Simulation(rule, target, draft, chain(3), stream=COUPLED[rule])
    assert_distributed(simulation, trials=131_072, length=4)


WIDE, NARROW = (4096, 0.1, 40_960, 256), (16, 1.0, 200_000, 1 << 13)


@pytest.mark.parametrize(
    ("rule", "size", "scale", "trials", "batch"),
    [
        ("match", *WIDE),
        ("rejection", *NARROW),
        pytest.param("match", *NARROW, marks=pytest.mark.slow),
        pytest.param("rejection", *WIDE, marks=pytest.mark.slow),
        pytest.param("block", *NARROW, marks=pytest.mark.slow),
        pytest.param("block", *WIDE, marks=pytest.mark.slow),
    ],
)
def test_wide_and_narrow(rule: str, size: int, scale: float, trials: int, batch: int) -> None:
    """Case 6: a wide, nearly flat vocabulary, and a narrow one with more trials."""
    logits = random_table(size, 1, scale)[:1].expand(size, -1)
    draft = random_table(size, 2, scale)[:1].softmax(1).expand(size, -1)
    simulation = Simulation(rule, logits, draft, stream=COUPLED[rule])
    assert_distributed(simulation, trials, length=1, batch=batch)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("parents", [chain(2), SIBLINGS])
@pytest.mark.parametrize("kind", ["adversarial", "unlike", "disjoint"])
def test_joint_of_two_positions(rule: str, parents: tuple[int, ...], kind: str) -> None:
    """Chains and trees, drafts from distributions that depend on the token before."""
    draft = {
        "adversarial": adversarial(SMALL),
        "unlike": random_table(5, 3, 2.0).softmax(1),
        "disjoint": SMALL.softmax(1),
    }[kind]
    target = SMALL
    if kind == "disjoint":  # the target can say but two of the five tokens
        target = SMALL.masked_fill(torch.tensor([False, True, True, False, True]), -torch.inf)
    if rule == "block" and parents == SIBLINGS:
        pytest.skip("block verifies chains")
    simulation = Simulation(rule, target, draft, parents, stream=COUPLED[rule])
    assert_distributed(simulation, trials=8_000, length=3)


@pytest.mark.parametrize("rule", RULES)
def test_point_masses(rule: str) -> None:
    """Trees of most probable tokens without q, and argmax chains with a one-hot q."""
    draft = random_table(5, 3, 2.0).softmax(1)
    trees = Simulation(rule, SMALL, draft, SIBLINGS, argmax_drafts=True, point_mass=True)
    assert_distributed(trees, trials=8_000, length=3)
    one_hot = torch.eye(5)[draft.argmax(1)]
    chains = Simulation(rule, SMALL, draft, chain(2), argmax_drafts=True, handed=one_hot)
    assert_distributed(chains, trials=8_000, length=3)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 0.05])
def test_low_temperatures_with_large_logits(rule: str, temperature: float) -> None:
    """Case 4: no NaN and no draw without mass where nearly all probabilities underflow."""
    logits = random_table(5, 4, 30.0).clamp(-80, 80)
    logits[:, 0], logits[:, 1] = 80.0, 79.95
    params = SamplingParams(temperature=temperature)
    drafts = {"own": (logits / max(temperature, 1e-5)).softmax(1), "flat": torch.full((5, 5), 0.2)}
    for draft in drafts.values():
        simulation = Simulation(rule, logits, draft, chain(3), params, stream=COUPLED[rule])
        if params.greedy:
            output, _ = simulation.run(1000, 3)
            assert not output.any()  # token 0 has the largest logit
        else:
            assert_distributed(simulation, trials=4_000, length=2)


@pytest.mark.parametrize("rule", BY_RATIO)
def test_equal_distributions_are_always_accepted(rule: str) -> None:
    _, first_step = Simulation(rule, SMALL, SMALL.softmax(1), chain(4)).run(2000, 1)
    assert first_step == 5


def test_block_accepts_what_its_paper_says() -> None:
    """Sun et al., section 2: 10/9 tokens of two by tokens, 11/9 by blocks."""
    target, draft = table([1 / 3, 2 / 3]).log(), table([2 / 3, 1 / 3])
    for rule, expected in (("rejection", 10 / 9), ("block", 11 / 9)):
        _, first_step = Simulation(rule, target, draft, chain(2)).run(20_000, 1)
        assert first_step == pytest.approx(expected + 1, abs=0.02)


@pytest.mark.parametrize("rule", RULES)
def test_the_article_s_own_check(rule: str) -> None:
    """V = 8, four drafts, 10,000 trials: TV of the first token, and tokens per step."""
    p = [0.32, 0.24, 0.16, 0.10, 0.08, 0.05, 0.03, 0.02]
    q = [0.15, 0.30, 0.20, 0.15, 0.05, 0.05, 0.05, 0.05]
    simulation = Simulation(rule, table(p).log(), table(q), chain(4), stream=COUPLED[rule])
    output, first_step = simulation.run(10_000, 1)
    frequencies = np.bincount(output[:, 0], minlength=8) / 10_000
    assert np.abs(frequencies - p).sum() / 2 < 0.015
    formula = expected_tokens(np.minimum(p, q).sum(), 4)  # acceptance is 1 - TV(p, q)
    if rule == "rejection":
        assert first_step == pytest.approx(formula, abs=0.05)
    elif rule == "block":
        assert first_step > formula
    else:
        assert 0.8 * formula < first_step < formula


@pytest.mark.parametrize("gap", [40.0, 68.0, 72.0, 88.0, 95.0, 103.0, 110.0])
def test_siblings_where_the_rest_of_q_underflows(gap: float) -> None:
    """A low temperature leaves the second sibling a probability that fp32 cannot hold."""
    draft = torch.tensor([0.0, -gap, -gap - 1.5])

    class Drawn(Simulation):  # from logits, as a drafter does: its table has lost the digits
        def _draft(self, last: Tensor, lengths: NDArray[np.int64], seeds: list[int]) -> Tensor:
            words = noise.keys(np.array(seeds, np.uint64), lengths, self.stream, lengths)
            return gumbel_top(draft.expand(len(last), -1), torch.from_numpy(words), 2)[0]

    target = table([0.2, 0.2, 0.6]).log()
    simulation = Drawn("rejection", target, draft.softmax(0).expand(3, -1), (-1, -1))
    assert_distributed(simulation, trials=8_000, length=1)


FAULT = Simulation("rejection", SMALL, adversarial(SMALL), chain(2))


def fails(simulation: Simulation) -> None:
    with pytest.raises(AssertionError):
        assert_distributed(simulation, trials=8_000, length=2)


@pytest.mark.parametrize("rule", BY_RATIO)
@pytest.mark.parametrize("stream", [Stream.CORRECT, Stream.ACCEPT])
def test_fault_shared_random_stream(rule: str, stream: Stream) -> None:
    target, draft = table([0.02, 0.58, 0.40]).log(), table([0.50, 0.48, 0.02])
    right = Simulation(rule, target, draft, chain(2))
    assert_distributed(right, trials=8_000, length=2)
    fails(replace(right, stream=stream))


@pytest.mark.parametrize("rule", BY_RATIO)
def test_fault_wrong_residual(rule: str) -> None:
    right = replace(FAULT, rule=rule)
    assert_distributed(right, trials=8_000, length=2)
    with wrong_residual():
        fails(right)


@pytest.mark.parametrize("rule", BY_RATIO)
def test_fault_softmax_for_argmax_drafts(rule: str) -> None:
    """Case 3: an argmax is a point mass, whatever the softmax says."""
    draft = random_table(5, 3, 1.0).softmax(1)
    right = Simulation(rule, SMALL, draft, chain(2), argmax_drafts=True, point_mass=True)
    assert_distributed(right, trials=8_000, length=2)
    fails(replace(right, point_mass=False))


@pytest.mark.parametrize("rule", BY_RATIO)
def test_fault_raw_logits_for_processed_drafts(rule: str) -> None:
    """Case 2: q is what the tokens were drawn from, temperature and truncation included."""
    logits = random_table(5, 3, 1.0)
    drawn_from = logits.masked_fill(logits < logits.topk(3).values[:, 2:], -torch.inf) / 0.8
    right = Simulation(rule, SMALL, drawn_from.softmax(1), chain(2))
    assert_distributed(right, trials=8_000, length=2)
    fails(replace(right, handed=logits.softmax(1)))


def test_fault_siblings_drawn_with_replacement_in_mind(monkeypatch: pytest.MonkeyPatch) -> None:
    """q must lose a rejected sibling before the next one is tried."""
    right = replace(FAULT, parents=SIBLINGS)
    assert_distributed(right, trials=8_000, length=2)
    reject = rejection._reject
    monkeypatch.setattr(rejection, "_reject", lambda p, q, child: (reject(p, q, child)[0], q))
    fails(right)


def test_fault_siblings_out_of_draw_order() -> None:
    """Re-ranking sampled siblings by score makes them something else than a sample."""
    target, draft = table([0.2, 0.5, 0.3]).log(), table([0.5, 0.3, 0.2])
    right = Simulation("rejection", target, draft, (-1, -1))

    class Reranked(Simulation):
        def _draft(self, *args: object) -> Tensor:
            return super()._draft(*args).sort(1, descending=True).values  # type: ignore[arg-type]

    assert_distributed(right, trials=8_000, length=1)
    fails(Reranked("rejection", target, draft, (-1, -1)))


def test_the_check_itself_can_fail() -> None:
    p = np.array([0.10, 0.60, 0.30])
    tokens = np.random.default_rng(0).choice(3, 131_072, p=p)
    assert_counts(tokens, p)
    with pytest.raises(AssertionError):
        assert_counts(tokens, np.array([0.10, 0.61, 0.29]))
