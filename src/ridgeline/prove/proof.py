"""All four parts for every rule, within a time, and the verdict on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ridgeline.errors import ConfigError
from ridgeline.model.load import LoadedModel
from ridgeline.prove.allowance import Allowance
from ridgeline.prove.distribution import ALPHA, Distribution, ask, judge, sample
from ridgeline.prove.equality import (
    Equality,
    compare_texts,
    requests_of,
    write_plainly,
)
from ridgeline.prove.faults import FAULTS
from ridgeline.prove.numerics import LOGITS, Numerics, Trial, stress
from ridgeline.prove.power import Detection, Exam, detect
from ridgeline.prove.reference import Reference
from ridgeline.prove.statistics import holm
from ridgeline.prove.subject import Options, Subject, hands_q

EQUALITY = 0.1
"""Share of the time for part 1."""
SAMPLING = 0.45
"""Share for part 2 of what the preparations and parts 1 and 4 leave; the rest is part 3's."""
NUMERIC_TOKENS = 6
"""Length of the texts of part 4."""
MEASURED = 3
"""Prompts that rounding is measured on."""


@dataclass(frozen=True)
class Plan:
    """What to do."""

    rules: tuple[str, ...]
    drafter: str
    options: Options
    tokens: int
    """of each text of part 1"""
    seed: int
    seconds: float | None = None
    """for everything; None: as many rounds as `rounds` says"""
    rounds: int | None = None
    """of samples in part 2, at most"""


@dataclass
class Result:
    """What was found for one subject."""

    subject: Subject
    equality: Equality
    numerics: Numerics
    distribution: Distribution
    samples: int
    """texts of part 2"""
    drift: bool = False
    """whether a test of part 2 says so, all tests of all subjects considered"""
    detections: list[Detection] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether anything differs from plain decoding."""
        return self.equality.failed or self.drift or bool(self.numerics.failures)

    @property
    def could_fail(self) -> bool:
        """Whether planted faults were found: of the ratios, where drafts are accepted by them."""
        found = any(detection.found_by for detection in self.detections)
        return found and not self.ratio_untested

    @property
    def ratio_untested(self) -> bool:
        """Whether drafts were accepted by ratios, and no planted fault of that was noticed."""
        own = {fault.name for fault in FAULTS if fault.by_ratio}
        found = {detection.fault for detection in self.detections if detection.found_by}
        return self.distribution.ratings is not None and not own & found


@dataclass(frozen=True)
class Proof:
    """Everything that was found."""

    plan: Plan
    prompts: int
    """how many there were to take from"""
    exam: Exam
    threshold: float
    """p-values of at most this count as found, whatever the other tests say"""
    results: list[Result]
    seconds: float

    @property
    def failed(self) -> bool:
        """Whether any subject failed."""
        return any(result.failed for result in self.results)

    @property
    def passed(self) -> bool:
        """Whether none did, and all could have."""
        return not self.failed and all(result.could_fail for result in self.results)


Tell = Callable[[str], None]
"""Called often, with what is being done."""


def prove(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    plan: Plan,
    tell: Tell = lambda part: None,
) -> Proof:
    """Puts a target and its drafter to the proof.

    Args:
        loaded: the target.
        prompts: token ids of at least one prompt.
        plan: what to do.
        tell: called often, with what is being done.

    Raises:
        ConfigError: the drafter never drafts.
        RidgelineError: see `LLM`.
    """
    started = time.monotonic()
    end = None if plan.seconds is None else started + plan.seconds
    subjects = subjects_of(loaded, prompts, plan)
    exam = prepare(subjects[0], prompts, plan, len(subjects), tell)
    checked = [check(subject, exam, tell) for subject in subjects]
    rest = _left(end, SAMPLING)
    power_begins = None if rest is None else time.monotonic() + rest
    results = []
    for number, (subject, found) in enumerate(zip(subjects, checked, strict=True)):
        seconds = _left(power_begins, 1 / (len(subjects) - number))
        distribution, samples = search(subject, exam, plan, seconds, tell)
        results.append(Result(subject, *found, distribution, samples))

    p_values = [p for result in results for p in result.distribution.p_values.values()]
    fallen = holm(p_values, ALPHA)
    for result in results:
        count = len(result.distribution.p_values)
        result.drift, fallen = any(fallen[:count]), fallen[count:]
    threshold = ALPHA / len(p_values)
    pairs = [
        (result, fault)
        for fault in FAULTS
        for result in results
        if not fault.by_ratio or result.distribution.ratings is not None
    ]
    for done, (result, fault) in enumerate(pairs):
        seconds = _left(end, 1 / (len(pairs) - done))
        if seconds == 0 and result.detections:  # one is always planted
            result.detections.append(Detection(fault.name, 0, None, 0, planted=False))
            continue
        detection = detect(
            result.subject,
            exam,
            fault,
            threshold,
            result.samples,
            Allowance(None, seconds),
            partial(tell, f"power, {result.subject.name}: {fault.name}"),
        )
        result.detections.append(detection)
    return Proof(plan, len(prompts), exam, threshold, results, time.monotonic() - started)


def subjects_of(loaded: LoadedModel, prompts: Sequence[Sequence[int]], plan: Plan) -> list[Subject]:
    """Every rule with the drafter, or with one that draws where the drafter does not.

    A rule that accepts by ratios verifies drafts without q as `match` does. A drafter without q is
    therefore put to the proof under `match` alone, and one that draws stands in besides.

    Raises:
        ConfigError: the drafter never drafts.
        RidgelineError: see `LLM`.
    """
    options = plan.options
    longest = max(map(len, prompts)) + max(plan.tokens, 2 * options.depth + 3, NUMERIC_TOKENS)
    given = [Subject(loaded, rule, plan.drafter, options, longest) for rule in plan.rules]
    drawing = replace(given[0], rule="rejection")
    if drawing.start(1).drafter is None:
        raise ConfigError(
            f"drafter {plan.drafter!r} never drafts, so there is nothing to prove; name another, "
            "such as model:PATH"
        )
    if hands_q(drawing, prompts[0]):
        return given
    stand_ins = [replace(subject, drafter=None) for subject in given]
    fixed = [replace(subject, draws=False) for subject in given if subject.rule == "match"]
    return [*fixed, *stand_ins]


def prepare(
    subject: Subject, prompts: Sequence[Sequence[int]], plan: Plan, subjects: int, tell: Tell
) -> Exam:
    """What all `subjects` are compared with, of which `subject` is one."""
    tell("exact probabilities")
    reference = Reference(subject.loaded, subject.longest, subject.longest)
    rounding = max(reference.rounding(prompt) for prompt in prompts[:MEASURED])
    questions = list(ask(reference, prompts, plan.options.depth + 2))
    # Every subject writes the plain texts twice: alone and in a batch.
    share = None if plan.seconds is None else EQUALITY * plan.seconds / (1 + 2 * subjects)
    plain = write_plainly(
        subject.plain(),
        requests_of(prompts, plan.tokens, plan.seed),
        Allowance(None, share),
        partial(tell, "plain texts"),
    )
    shortest = [min(prompts, key=len)]
    trials = [Trial(subject, kind, shortest, NUMERIC_TOKENS, plan.seed) for kind in LOGITS]
    return Exam(reference, rounding, plain, questions, trials, plan.seed)


def check(subject: Subject, exam: Exam, tell: Tell) -> tuple[Equality, Numerics]:
    """Parts 1 and 4."""
    equality = compare_texts(
        subject,
        exam.plain,
        exam.reference,
        exam.rounding,
        advance=partial(tell, f"equality, {subject.name}"),
    )
    told = partial(tell, f"numerics, {subject.name}")
    return equality, stress(subject, exam.trials, exam.rounding, told)


def search(
    subject: Subject, exam: Exam, plan: Plan, seconds: float | None, tell: Tell
) -> tuple[Distribution, int]:
    """Part 2, and how many texts it sampled."""
    engine, allowance = subject.start(), Allowance(plan.rounds, seconds)
    told = partial(tell, f"distribution, {subject.name}")
    for samples in sample(engine, exam.questions, allowance, plan.seed, told, subject.draws):
        latest = samples
    return judge(exam.questions, latest, exam.exact), latest.count


def _left(end: float | None, share: float) -> float | None:
    """So much of the seconds until `end`; None: without limit."""
    return None if end is None else share * max(0.0, end - time.monotonic())
