"""Part 3: the same tests with planted faults, and the smallest drift that they would have found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from ridgeline.prove.allowance import Allowance
from ridgeline.prove.distribution import Question, judge, sample
from ridgeline.prove.equality import Plain, compare_texts
from ridgeline.prove.faults import Fault
from ridgeline.prove.numerics import Trial
from ridgeline.prove.reference import Reference
from ridgeline.prove.subject import Subject

EQUALITY = "equality"


@dataclass(frozen=True)
class Detection:
    """What the tests made of one fault."""

    fault: str
    effects: int
    """how often it made a difference to something that was computed"""
    found_by: str | None
    """the test that found it; None: none did"""
    samples: int
    """texts that were sampled until then"""
    planted: bool = True
    """False: the time was over"""


@dataclass(frozen=True)
class Exam:
    """What every subject, honest or not, is compared with."""

    reference: Reference
    rounding: float
    """see `Reference.rounding`; the largest of some prompts"""
    plain: Plain
    questions: Sequence[Question]
    trials: Sequence[Trial]
    seed: int

    @property
    def exact(self) -> bool:
        """Whether logits have the same bits whatever is computed beside them."""
        return self.rounding == 0


def detect(
    subject: Subject,
    exam: Exam,
    fault: Fault,
    threshold: float,
    most: int,
    allowance: Allowance,
    advance: Callable[[], None] = lambda: None,
) -> Detection:
    """Plants a fault into a new engine and tests that until the fault is found.

    The p-values are looked at whenever the number of samples has doubled, so that a fault counts as
    found by chance with a few times `threshold` at most.

    Args:
        subject: the rule and the drafter.
        exam: what the honest engine was compared with.
        fault: what to plant.
        threshold: p-values of at most this count as found.
        most: samples that the honest engine was tested with: a fault gets no more.
        allowance: rounds of samples.
        advance: called often.
    """
    engine = subject.start()
    count, found = 0, None
    with fault.plant(engine) as effect:
        if not fault.by_ratio:
            for plain in exam.plain.parts():
                equality = compare_texts(
                    subject, plain, exam.reference, exam.rounding, alone=False, engine=engine
                )
                advance()
                if equality.failed:
                    return Detection(fault.name, effect.count, EQUALITY, 0)
        with closing(
            sample(engine, exam.questions, allowance, exam.seed, advance, subject.draws)
        ) as rounds:
            due = 0
            for samples in rounds:
                count = samples.count
                if count >= min(due, most):
                    due = 2 * count
                    found = judge(exam.questions, samples, exam.exact).found(threshold)
                if found or count >= most:
                    break
    return Detection(fault.name, effect.count, found, count)
