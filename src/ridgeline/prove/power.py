"""Part 3: the same tests with planted faults, and the smallest drift that they would have found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from ridgeline.prove.allowance import Allowance
from ridgeline.prove.distribution import Question, judge, sample
from ridgeline.prove.equality import Plain, compare_texts
from ridgeline.prove.faults import Fault
from ridgeline.prove.reference import Reference
from ridgeline.prove.subject import Subject


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


@dataclass(frozen=True)
class Examiner:
    """The tests of parts 1 and 2, as the honest engine went through them."""

    subject: Subject
    plain: Plain
    questions: Sequence[Question]
    reference: Reference
    rounding: float
    threshold: float
    """p-values of at most this count as found"""
    samples: int
    """that the honest engine was tested with: no fault gets more"""
    seed: int

    def examine(
        self, fault: Fault, allowance: Allowance, advance: Callable[[], None] = lambda: None
    ) -> Detection:
        """Plants a fault into a new engine and tests that until the fault is found.

        The p-values are looked at whenever the number of samples has doubled, so that a fault
        counts as found by chance with a few times `threshold` at most.
        """
        engine = self.subject.start()
        count = 0
        with fault.plant(engine) as effect:
            if not fault.by_ratio:
                equality = compare_texts(
                    self.subject,
                    self.plain,
                    self.reference,
                    self.rounding,
                    alone=False,
                    engine=engine,
                )
                advance()
                if equality.failed:
                    return Detection(fault.name, effect.count, "equality", 0)
            looks = sample(engine, self.questions, allowance, self.seed, advance)
            with closing(looks):
                due = 0
                for samples in looks:
                    count = samples.count
                    if count < due and count < self.samples:
                        continue
                    due = 2 * count
                    found = judge(self.questions, samples, self.rounding == 0).found(self.threshold)
                    if found or count >= self.samples:
                        return Detection(fault.name, effect.count, found, count)
        return Detection(fault.name, effect.count, None, count)
