"""`ridgeline prove` on tiny models: the honest engine passes, and every planted fault is found."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import cache, partial
from itertools import product

import numpy as np
import pytest
import torch

from ridgeline import SamplingParams
from ridgeline.core.sampling import draw_drafts, process
from ridgeline.core.tree import TokenTree
from ridgeline.draft import levels
from ridgeline.draft.base import DraftContext, register
from ridgeline.draft.model import ModelDrafter
from ridgeline.errors import ConfigError
from ridgeline.llm import Request
from ridgeline.model.load import LoadedModel
from ridgeline.model.native import ModuleSource, NativeModel
from ridgeline.prove import faults, numerics, watch
from ridgeline.prove.allowance import Allowance
from ridgeline.prove.altered import altered, blurred
from ridgeline.prove.cells import OTHER, cells_of
from ridgeline.prove.distribution import ALPHA, sample
from ridgeline.prove.equality import compare_texts, few_words, requests_of
from ridgeline.prove.faults import FAULTS, Fault
from ridgeline.prove.power import Exam, detect
from ridgeline.prove.proof import Plan, Proof, check, prepare, prove, search, subjects_of
from ridgeline.prove.reference import Reference
from ridgeline.prove.report import findings, page, verdict
from ridgeline.prove.statistics import holm
from ridgeline.prove.subject import Options, Subject, hands_q, run
from ridgeline.schedule.policy import FixedPolicy
from tests.engines import random_prompts, tiny_loaded, torch_module
from tests.tiny import tiny_model

SIZE = 48
PROMPTS = [[token % SIZE for token in prompt] for prompt in random_prompts(4, seed=3, longest=20)]
RULES = ("match", "rejection", "block")
OPTIONS = Options(confidence=0.0)
SCALE = 0.5
PLAN = Plan(RULES, "blurred", OPTIONS, tokens=16, seed=0, rounds=3)


@cache
def in_torch() -> LoadedModel:
    """Rounds, if ever so little."""
    return replace(tiny_loaded(vocab_size=SIZE, head_dim=16), tokenizer=None)


@cache
def target() -> LoadedModel:
    """The same weights on the native decoder, which is exact, and fast; surprised less often."""
    module = tiny_model("llama", vocab_size=SIZE, head_dim=16)  # of its own: packing takes it apart
    native = NativeModel(module.config, ModuleSource(module), torch.float32)
    return altered(replace(in_torch(), model=native), lambda logits: logits * SCALE)


@register("blurred")
def blurred_drafter(argument: str, context: DraftContext) -> ModelDrafter:
    return ModelDrafter(blurred(context.target, 1.5, seed=1), context)


def subject(rule: str) -> Subject:
    return Subject(target(), rule, None, OPTIONS, longest=64)


@cache
def exam(seed: int = 0) -> Exam:
    return prepare(subject("match"), PROMPTS, replace(PLAN, seed=seed), 1, lambda part: None)


@pytest.fixture(scope="module")
def proof() -> Proof:
    return prove(target(), PROMPTS, replace(PLAN, rounds=8))


def honest_p_values(seed: int, plan: Plan) -> list[float]:
    """Those of part 2 for all rules; the other parts must find nothing."""
    p_values = []
    for tested in subjects_of(target(), PROMPTS, plan):
        equality, numerics_found = check(tested, exam(seed), lambda part: None)
        assert (equality.failed, numerics_found.failures) == (False, ()), tested.name
        distribution, _ = search(
            tested, exam(seed), replace(plan, seed=seed), None, lambda part: None
        )
        p_values += distribution.p_values.values()
    assert len(p_values) == 9
    assert not any(holm(p_values, ALPHA))
    return p_values


@pytest.mark.parametrize("seed", range(2))
def test_the_honest_engine_passes(seed: int) -> None:
    honest_p_values(seed, replace(PLAN, rounds=1))


@pytest.mark.slow
def test_the_honest_engine_passes_over_ten_seeds_at_the_stated_rate() -> None:
    """None fails at ALPHA; and of 90 p-values about as many lie below 0.1 as should."""
    p_values = [p for seed in range(10) for p in honest_p_values(seed, PLAN)]
    low = sum(p <= 0.1 for p in p_values)
    assert abs(low - 9) <= 4 * (90 * 0.1 * 0.9) ** 0.5


def assert_all_found(proof: Proof) -> None:
    assert proof.passed
    for result in proof.results:
        concerned = [f for f in FAULTS if not f.by_ratio or result.subject.rule != "match"]
        assert [d.fault for d in result.detections] == [fault.name for fault in concerned]
        missed = [d.fault for d in result.detections if not d.found_by]
        assert missed == [], result.subject.name


def test_every_planted_fault_is_found(proof: Proof) -> None:
    assert_all_found(proof)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 10))
def test_every_planted_fault_is_found_with_other_seeds(seed: int) -> None:
    assert_all_found(prove(target(), PROMPTS, replace(PLAN, rounds=8, seed=seed)))


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_faulty_engine_fails(rule: str) -> None:
    with faults.wrong_residual() as effect:
        equality, _ = check(subject(rule), exam(), lambda part: None)
        distribution, _ = search(subject(rule), exam(), PLAN, None, lambda part: None)
    assert effect.count > 0
    assert distribution.found(ALPHA / 9)
    assert not equality.failed  # greedy texts have no residual


def test_a_drafter_of_nonsense_passes_but_proves_nothing() -> None:
    """Nothing that it drafts is accepted, so no fault in what follows could show."""
    plan = replace(PLAN, drafter="fixed:7,7", rules=("match",), rounds=1, tokens=4)
    result = prove(target(), PROMPTS[:1], plan).results[0]
    assert not result.failed
    assert result.subject.drafter == "fixed:7,7"
    assert not result.could_fail


def test_a_fault_that_does_nothing_is_not_found() -> None:
    idle = Fault(
        "nothing", partial(faults.misreading, lookup=lambda tree, node: node), by_ratio=False
    )
    found = detect(subject("rejection"), exam(), idle, 1e-4, 96, Allowance(2))
    assert (found.found_by, found.effects, found.samples) == (None, 0, 96)


def test_what_is_misread_on_a_tree() -> None:
    """root -> (1 -> 3 -> 4, 2): parents by index, depths 0 1 1 2 3."""
    tree = TokenTree(np.arange(5), np.array([-1, 0, 0, 1, 3], np.int32), 1)
    assert [faults.mask_off_by_one(tree, node) for node in (1, 2, 3, 4)] == [0, 1, 2, 3]
    assert [faults.position_as_slot(tree, node) for node in (1, 2, 3, 4)] == [1, 1, 2, 3]


@pytest.mark.parametrize("loaded", [in_torch(), target()], ids=["torch", "native"])
def test_the_reference_is_the_model_run_plainly(loaded: LoadedModel) -> None:
    reference, module = Reference(loaded, 64, 8), torch_module(in_torch())
    scale = 1.0 if loaded is in_torch() else SCALE
    for prompt in PROMPTS:
        continuations = [[], [5], [6, 7], [8] * 8]
        logits = reference.logits(prompt, continuations)
        module.set_attn_implementation("eager")
        for row, continuation in zip(logits, continuations, strict=True):
            text = torch.tensor([[*prompt, *continuation]])
            expected = module(text, use_cache=False).logits[0, -1]
            torch.testing.assert_close(row, scale * expected, atol=1e-4, rtol=1e-4)
        module.set_attn_implementation("ridgeline")


def test_margins_lead_to_the_plain_token() -> None:
    """The token that plain decoding says leads every other one, greedily and seeded."""
    reference, engine = exam().reference, subject("match").plain()
    for temperature in (0.0, 0.9):
        params = SamplingParams(temperature=temperature, seed=5, max_tokens=3, presence_penalty=1.0)
        output = run(engine, [Request(PROMPTS[0], params)])[0][0].output
        before, chosen = output[:-1], output[-1]
        others = [token for token in range(SIZE) if token != chosen]
        margins = [reference.margin(PROMPTS[0], before, chosen, o, params) for o in others]
        assert min(margins) > 0


def test_rounding_is_zero_where_bits_are_equal() -> None:
    exact, rounded = (Reference(loaded, 64, 16) for loaded in (target(), in_torch()))
    assert max(exact.rounding(prompt) for prompt in PROMPTS) == 0
    assert 0 < max(rounded.rounding(prompt) for prompt in PROMPTS) < 1e-4
    assert exact.rounding([5]) == 0  # nothing to compare


def test_where_logits_round_the_honest_engine_passes_too() -> None:
    plan = replace(PLAN, rules=("match", "rejection"), rounds=2, tokens=12)
    proof = prove(in_torch(), PROMPTS[:2], plan)
    assert not proof.failed
    assert proof.exam.rounding > 0
    assert "it is rounding" in "\n".join(page(in_torch(), proof))


def test_cells_are_all_texts_with_their_probabilities() -> None:
    """Against enumeration of all texts of two tokens."""
    params = SamplingParams(temperature=1.5, top_k=20)
    reference, prompt = exam().reference, PROMPTS[1]
    cells = cells_of(reference, prompt, params, 2)
    first = reference.processed(prompt, [[]], params).double().softmax(1)[0]
    second = reference.processed(prompt, [[t] for t in range(SIZE)], params).double().softmax(1)
    joint = (first[:, None] * second).numpy()
    assert sum(cells.p.values()) == pytest.approx(1)
    assert any(cell[-1] == OTHER for cell in cells.p)
    assert any(len(cell) == 2 and OTHER not in cell for cell in cells.p)
    sums = dict.fromkeys(cells.p, 0.0)
    names = list(cells.p)
    for text in product(range(SIZE), repeat=2):
        (at,) = np.flatnonzero(cells.count([text]).observed)
        sums[names[at]] += joint[text]
    assert sums == pytest.approx(cells.p)
    assert cells.marginal().p == pytest.approx(
        {
            **{(int(t),): float(first[t]) for t in np.flatnonzero(first >= 0.01)},
            (OTHER,): float(first[first < 0.01].sum()),
        }
    )


def test_differences_have_a_place_and_a_margin() -> None:
    wrong = replace(exam().plain, outputs=[[o[0] + 1, *o[1:]] for o in exam().plain.outputs])
    engine = subject("match").start()
    equality = compare_texts(
        subject("match"), wrong, exam().reference, exam().rounding, engine=engine
    )
    assert equality.failed
    assert len(equality.differences) == equality.texts == 2 * len(wrong.outputs)
    for difference in equality.differences:
        assert difference.position == 0
        assert difference.plain == difference.drafted + 1
        assert difference.margin < 0  # what was claimed to be plain is not what leads
    assert {d.batch for d in equality.differences} == {d.sampled for d in equality.differences}


def test_rounding_explains_what_it_can() -> None:
    """A difference counts as rounding up to a few times the rounding that was measured."""
    pair = [5, 6]
    plain = replace(exam().plain, requests=requests_of([pair], 4, 0)[-2:-1])
    params = plain.requests[0].params
    said = run(subject("match").plain(), plain.requests)[0][0].output
    logits = exam().reference.processed(pair, [[]], params)[0]
    second = int(logits.topk(2).indices[1])
    plain = replace(plain, outputs=[[second, *said[1:]]])
    margin = float(logits.topk(2).values.diff().abs())
    for rounding, failed in ((margin, False), (0.0, True)):
        # the plain text's token trails the drafted one by `margin`, so it leads by less than 0
        found = compare_texts(subject("match"), plain, exam().reference, rounding)
        assert [d.rounding for d in found.differences] == [not failed] * 2
        assert found.failed == failed


def test_texts_of_few_words() -> None:
    params = replace(few_words([4, 5, 6, 7, 6, 6, 8]), max_tokens=24)
    output = run(subject("match").plain(), [Request(PROMPTS[0], params)])[0][0].output
    assert set(output) == {7, 6, 8, 4}
    assert set(few_words([9]).logit_bias) == {9}


def test_samples_end_where_they_count() -> None:
    engine = subject("block").start()
    rounds = list(sample(engine, exam().questions, Allowance(2), seed=2**64 - 1))
    assert len(rounds) == 2
    assert {len(text) for texts in rounds[-1].outputs for text in texts} == {5}
    assert engine.pool.used == 0


def test_numerics_find_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that the target cannot say, put into the text."""
    right = numerics.run

    def wrong(engine, requests):
        samples = right(engine, requests)
        for (sequence,) in samples:
            sequence.tokens[-1] = (sequence.tokens[-1] + 7) % SIZE
        return samples

    trials = exam().trials
    monkeypatch.setattr(numerics, "run", wrong)
    found = numerics.stress(subject("rejection"), trials, exam().rounding)
    greedy = [failure for failure in found.failures if failure.startswith(("T = 0,", "T = 1e-06"))]
    assert len(greedy) == 2 * len(numerics.LOGITS)
    assert all(failure.endswith("the text is not the plain one") for failure in greedy)
    others = [failure for failure in found.failures if failure not in greedy]
    assert len(others) > 5
    assert all("behind the likeliest" in failure for failure in others)


def test_numerics_find_what_is_not_a_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "process", lambda logits, rows: process(logits, rows) * torch.nan)
    found = numerics.stress(subject("rejection"), exam().trials, exam().rounding)
    assert sum("distributions do not sum to 1" in line for line in found.failures) == 4


def test_drafts_from_p_itself_are_never_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless they are said to be drawn from something flatter."""

    def flatter(*arguments, **options):
        drafts = draw_drafts(*arguments, **options)
        if drafts.q is None:
            return drafts
        flat = drafts.q.sqrt()
        return replace(drafts, q=flat / flat.sum(1, keepdim=True))

    trials = exam().trials
    assert numerics.stress(subject("block"), trials, exam().rounding).failures == ()
    monkeypatch.setattr(levels, "draw_drafts", flatter)
    found = numerics.stress(subject("block"), trials, exam().rounding)
    assert len(found.failures) == 1
    assert found.failures[0].endswith("were rejected")


def test_neighbouring_seeds_share_no_samples() -> None:
    texts = []
    for seed in (0, 1, 3):
        rounds = list(sample(subject("match").start(), exam().questions, Allowance(2), seed))
        texts += [
            tuple(map(tuple, answers[i : i + 16]))
            for answers in rounds[-1].outputs
            for i in (0, 16)
        ]
    assert len(set(texts)) == len(texts) == 18


def test_the_same_seed_finds_the_same() -> None:
    """All but the time."""
    plan = replace(PLAN, rules=("rejection",), rounds=1, tokens=4)
    first, second = (findings(target(), prove(target(), PROMPTS[:2], plan)) for _ in range(2))
    for found in (first, second):
        del found["seconds"], found["time"]
    assert first == second


def test_engines_draft_whether_it_pays_or_not() -> None:
    for drafter in (None, "ngram"):
        engine = replace(subject("match"), drafter=drafter).start()
        assert engine.config.policy == "fixed"
        assert isinstance(engine.policy, FixedPolicy)


@pytest.mark.parametrize("children", ["right", "wrong"])
def test_accepted_drafts_of_a_drafter_that_does_not_draw(
    children: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come as often as p says; were they drawn with the target's noise, more often."""
    drafter = "ngram" if children == "right" else None
    honest = replace(subject("match"), drafter=drafter, draws=False)
    (latest,) = deque(sample(honest.start(), exam().questions, Allowance(6), 0, draws=False), 1)
    acceptance = latest.watch.acceptance
    assert acceptance.trials > 50
    assert acceptance.seen[1] == latest.watch.accepted
    assert latest.watch.theory == pytest.approx(1 + acceptance.expected[1] / latest.watch.steps)
    assert (acceptance.p_value > ALPHA) == (drafter is not None)


def test_which_subjects() -> None:
    """One that draws needs no stand-in."""
    names = [s.name for s in subjects_of(target(), PROMPTS, PLAN)]
    assert names == [f"{rule} with blurred" for rule in RULES]
    assert hands_q(subject("rejection"), PROMPTS[0])
    assert not hands_q(subject("match"), PROMPTS[0])
    other = replace(PLAN, drafter="ngram")
    names = [s.name for s in subjects_of(target(), PROMPTS, other)]
    assert names == ["match with ngram", *(f"{rule} with the blurred target" for rule in RULES)]
    with pytest.raises(ConfigError, match="'none' never drafts, so there is nothing to prove"):
        subjects_of(target(), PROMPTS, replace(PLAN, drafter="none"))


def test_the_page_and_the_file_say_the_same(proof: Proof) -> None:
    loaded = target()
    text = "\n".join(page(loaded, proof))
    found = findings(loaded, proof)
    assert text.startswith("PASS: ")
    assert found["verdict"] == verdict(proof)
    assert text.count("total variation over ") == len(proof.results)
    assert not any(entry["ratio_untested"] for entry in found["subjects"])
    assert found["passed"]
    for result, entry in zip(proof.results, found["subjects"], strict=True):
        assert result.subject.name in text
        for name, test in entry["distribution"]["tests"].items():
            assert f"{name}: p = {test['p_value']:.2g}" in text
        for fault in entry["faults"]:
            assert fault["fault"] in text


def test_verdicts(proof: Proof) -> None:
    results = [replace(result, detections=[]) for result in proof.results]
    assert verdict(replace(proof, results=results)).startswith("NOT PROVEN: nothing differed")
    results = [replace(result, drift=True) for result in results]
    failed = replace(proof, results=results)
    assert failed.failed
    assert not failed.passed
    assert verdict(failed).startswith("FAIL: with drafts the output is not the target's own: match")
