"""The findings: a page of plain words, and an object for JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console

from ridgeline.model.load import LoadedModel
from ridgeline.prove.distribution import ALPHA
from ridgeline.prove.power import Detection
from ridgeline.prove.proof import Proof, Result
from ridgeline.prove.statistics import CONFIDENCE, POWER, Tally
from ridgeline.prove.subject import BLUR
from ridgeline.provenance import machine, moment, portable

FORMAT = 1
"""Of the JSON file."""
SHOWN = 5
"""Differences and failures that the page lists; the file has all."""


def show(console: Console, loaded: LoadedModel, proof: Proof) -> None:
    """Prints the page."""
    for line in page(loaded, proof):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def page(loaded: LoadedModel, proof: Proof) -> Iterator[str]:
    """Its lines."""
    yield verdict(proof)
    yield ""
    plan, exam = proof.plan, proof.exam
    yield f"Target: {loaded.name}, {loaded.model.computes}, on {loaded.model.device}."
    yield (
        f"Drafter: {plan.drafter}, depth {plan.options.depth}, {plan.options.nodes} nodes; "
        f"{proof.prompts} prompts; seed {plan.seed}; {proof.seconds:.0f} s."
    )
    if any(result.subject.drafter is None for result in proof.results):
        yield (
            "It does not say what it drew its drafts from, so all rules treat them as `match` does."
            " For the rest stands in: the target itself, with noise of standard deviation "
            f"{BLUR:g} on its logits, which draws and says from what."
        )
    yield (
        "The target's logits have the same bits whatever is computed beside them."
        if exam.exact
        else f"The target's logits differ by up to {exam.rounding:.2g} with what is computed "
        "beside them: where texts part at tokens closer than a few times that, it is rounding."
    )
    yield ""
    yield "1. The very tokens, with drafts and without, each text alone and all in a batch"
    for result in proof.results:
        yield from _equality(result)
    yield ""
    yield (
        f"2. The distribution of the first {plan.options.depth + 2} tokens, against exact "
        "probabilities from plain forward passes"
    )
    yield (
        f"   An honest engine fails here in one of {1 / ALPHA:,.0f} runs at most (Holm over all "
        f"p-values). A drift that shows is found in {POWER:.0%} of runs."
    )
    for result in proof.results:
        yield from _distribution(result, proof.threshold)
    yield ""
    yield "3. The same tests with planted faults: could they have failed?"
    for result in proof.results:
        yield from _power(result)
    yield ""
    yield "4. Temperatures from 0 to 2, large logits in fp32 and bf16, a residual without mass"
    for result in proof.results:
        numerics = result.numerics
        found = f"{len(numerics.failures)} failures" if numerics.failures else "nothing wrong"
        yield f"   {result.subject.name}: {numerics.texts} texts, {numerics.tokens} tokens: {found}"
        yield from (f"      {failure}" for failure in numerics.failures[:SHOWN])
    yield ""
    yield (
        "What this does not show: drifts smaller than stated, and whatever these prompts, lengths "
        "and options do not reach."
    )


def verdict(proof: Proof) -> str:
    """One line."""
    if proof.failed:
        names = ", ".join(result.subject.name for result in proof.results if result.failed)
        return f"FAIL: with drafts the output is not the target's own: {names}."
    if not proof.passed:
        blind = "; ".join(
            f"{result.subject.name}"
            + (" (none in accepting and correcting by ratios)" if result.ratio_untested else "")
            for result in proof.results
            if not result.could_fail
        )
        return (
            f"NOT PROVEN: nothing differed, but planted faults went unnoticed: {blind}. Give it "
            "more --minutes, or prompts on which drafts are accepted."
        )
    return "PASS: with drafts the output is the target's own, as far as these tests can see."


def findings(loaded: LoadedModel, proof: Proof) -> dict[str, Any]:
    """Everything that was found, ready for JSON."""
    plan, exam = proof.plan, proof.exam
    return {
        "format": FORMAT,
        "passed": proof.passed,
        "failed": proof.failed,
        "verdict": verdict(proof),
        "model": {
            "name": portable(loaded.name),
            "computes": loaded.model.computes,
            "device": str(loaded.model.device),
        },
        "arguments": {
            "drafter": portable(plan.drafter),
            "rules": plan.rules,
            **asdict(plan.options),
            "prompts": proof.prompts,
            "tokens": plan.tokens,
            "seed": plan.seed,
            "seconds": plan.seconds,
        },
        "seconds": proof.seconds,
        "rounding": exam.rounding,
        "alpha": ALPHA,
        "threshold": proof.threshold,
        "confidence": CONFIDENCE,
        "power": POWER,
        "subjects": [_subject(result, proof.threshold) for result in proof.results],
        **moment(),
        "machine": machine(),
    }


def _subject(result: Result, threshold: float) -> dict[str, Any]:
    found = result.distribution
    tests = {
        name: {
            **(
                {"trials": test.trials, "seen": list(test.seen), "expected": list(test.expected)}
                if isinstance(test, Tally)
                else asdict(test)
            ),
            "p_value": test.p_value,
            "smallest_drift": test.smallest_drift(threshold),
            "could_fail": test.smallest_drift(threshold) < 1,
        }
        for name, test in found.tests.items()
    }
    return {
        "rule": result.subject.rule,
        "drafter": portable(result.subject.drafter),
        "failed": result.failed,
        "could_fail": result.could_fail,
        "ratio_untested": result.ratio_untested,
        "equality": {
            **asdict(result.equality),
            "failed": result.equality.failed,
            "could_fail": result.equality.could_fail,
        },
        "distribution": {
            "samples": result.samples,
            "drift": result.drift,
            "tests": tests,
            "tokens_per_step": found.tokens_per_step,
            "theory": found.theory,
        },
        "faults": [asdict(detection) for detection in result.detections],
        "numerics": asdict(result.numerics),
    }


def _equality(result: Result) -> Iterator[str]:
    equality = result.equality
    kinds = "greedy and seeded" if equality.sampled else "greedy"
    differences = equality.differences
    found = f"{len(differences)} differ" if differences else "all the same"
    if not equality.could_fail:
        found += ". COULD NOT HAVE FAILED: no draft was accepted"
    yield (
        f"   {result.subject.name}: {equality.texts} texts, {kinds}, {equality.tokens} tokens of "
        f"which {equality.accepted} were drafted: {found}"
    )
    for d in differences[:SHOWN]:
        how = (
            f"{'in few words, ' if d.few_words else ''}{'seeded' if d.sampled else 'greedy'}, "
            f"{'in a batch' if d.batch else 'alone'}"
        )
        margin = "" if d.margin is None else f"; logit margin {d.margin:.2g}"
        yield (
            f"      prompt {d.prompt + 1}, {how}: token {d.position + 1} {_said(d.drafted)}, "
            f"plainly {_said(d.plain)}{margin}{', rounding' if d.rounding else ''}"
        )


def _said(token: int | None) -> str:
    return "is none, the text has ended" if token is None else f"is {token}"


def _distribution(result: Result, threshold: float) -> Iterator[str]:
    found = result.distribution
    joint = found.joint
    yield f"   {result.subject.name}: {result.samples} samples" + (
        ", WHICH ARE NOT THE TARGET'S" if result.drift else ""
    )
    for name, test in found.tests.items():
        drift = test.smallest_drift(threshold)
        least = (
            f"a drift of {drift:.1%} shows"
            if drift < 1
            else "COULD NOT HAVE FAILED: too few samples to show any drift"
        )
        yield f"      {name}: p = {test.p_value:.2g}; {least}"
    if joint.df:
        yield (
            f"      total variation over {joint.cells} outcomes: {joint.distance:.3f}, truly "
            f"between {joint.low:.3f} and {joint.high:.3f} ({CONFIDENCE:.0%})"
        )
    if found.tokens_per_step is not None:
        chain = ", a chain" if result.subject.draws else ""
        theory = "" if found.theory is None else f"; by theory{chain}: {found.theory:.2f}"
        yield f"      tokens per step: {found.tokens_per_step:.2f}{theory}"


def _power(result: Result) -> Iterator[str]:
    if not result.could_fail:
        kind = " of the ratios" if result.ratio_untested else ""
        yield f"   {result.subject.name}: COULD NOT HAVE FAILED: no planted fault{kind} was noticed"
    else:
        yield f"   {result.subject.name}:"
    for detection in result.detections:
        yield f"      {detection.fault}: {_detection(detection)}"


def _detection(detection: Detection) -> str:
    if not detection.planted:
        return "not planted: no time was left"
    if detection.found_by is None:
        if not detection.effects:
            return "made no difference to anything here"
        return (
            f"NOT NOTICED in {detection.samples} samples, though it changed {detection.effects} "
            "things on the way"
        )
    after = f" after {detection.samples} samples" if detection.samples else ""
    return f"found by {detection.found_by}{after}"
