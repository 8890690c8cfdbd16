"""Part 2: many short samples through the whole engine against the target's exact probabilities."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ridgeline.core.params import SamplingParams
from ridgeline.engine import Engine
from ridgeline.llm import Request
from ridgeline.prove.allowance import Allowance
from ridgeline.prove.cells import Cells, cells_of
from ridgeline.prove.equality import PENALTIES, few_words
from ridgeline.prove.reference import Reference
from ridgeline.prove.statistics import Comparison, Tally, compare
from ridgeline.prove.subject import run
from ridgeline.prove.watch import Watch, watched

ALPHA = 1e-3
"""Chance that an honest engine fails, over all tests of all subjects together."""
FIRST, JOINT = "first token", "first tokens jointly"
RATINGS, ACCEPTED = "tokens by the drafter's rating", "accepted drafts"
"""Names of the tests; the last two depend on what is drafted: see `Watch`."""
SAMPLES = 16
"""Samples of a prompt in a round."""
SETTINGS = (
    SamplingParams(temperature=1.0),
    replace(PENALTIES, temperature=1.1, top_k=200, top_p=0.95, min_p=0.001),
)
"""Of the prompts."""


@dataclass(frozen=True)
class Question:
    """A prompt with sampling parameters, and the exact answer."""

    request: Request
    """its seed and number of samples are each round's own"""
    first: Cells
    """of the first token"""
    joint: Cells
    """of the first tokens, as many as one step can settle and the one before them"""


@dataclass
class Samples:
    """What an engine answered."""

    outputs: list[list[list[int]]]
    """one list of texts a question"""
    watch: Watch = field(default_factory=Watch)

    @property
    def count(self) -> int:
        """Of all questions."""
        return sum(map(len, self.outputs))


@dataclass(frozen=True)
class Distribution:
    """What part 2 found for one subject."""

    first: Comparison
    joint: Comparison
    ratings: Tally | None
    """see `Watch.ratings`; None where drafts come without q"""
    acceptance: Tally | None
    """see `Watch.acceptance`; None where nothing is said of it"""
    tokens_per_step: float | None
    theory: float | None
    """see `Watch.theory`"""

    @property
    def tests(self) -> dict[str, Comparison | Tally]:
        """Every test, by its name."""
        tests = {
            FIRST: self.first,
            JOINT: self.joint,
            RATINGS: self.ratings,
            ACCEPTED: self.acceptance,
        }
        return {name: test for name, test in tests.items() if test is not None}

    @property
    def p_values(self) -> dict[str, float]:
        """Of every test."""
        return {name: test.p_value for name, test in self.tests.items()}

    def found(self, threshold: float) -> str | None:
        """The test with the smallest p-value, if that is no larger than a threshold."""
        name, p_value = min(self.p_values.items(), key=lambda item: item[1])
        return name if p_value <= threshold else None


def ask(reference: Reference, prompts: Sequence[Sequence[int]], length: int) -> Iterator[Question]:
    """Computes the exact answers to as many prompts as `SETTINGS`, and to one in few words.

    The first token is the prompt's own: drafts begin at the second.
    """
    asked = [
        *zip(prompts, SETTINGS, strict=False),
        (prompts[0], replace(few_words(prompts[0]), temperature=1.0)),
    ]
    for prompt, params in asked:
        params = replace(params, ignore_eos=True)
        joint = cells_of(reference, prompt, params, length)
        yield Question(Request(list(prompt), params), joint.marginal(), joint)


def sample(
    engine: Engine,
    questions: Sequence[Question],
    allowance: Allowance,
    seed: int,
    advance: Callable[[], None] = lambda: None,
    draws: bool = True,
) -> Generator[Samples]:
    """Samples all questions together, round by round; yields all samples so far.

    `draws`: see `Subject`.
    """
    samples = Samples([[] for _ in questions])
    length = questions[0].joint.length
    with watched(engine, draws) as samples.watch:
        for number in allowance.spend():
            requests = [
                Request(
                    question.request.tokens,
                    replace(
                        question.request.params,
                        # Room for a whole draft after the last token that counts.
                        max_tokens=length + engine.config.depth + 1,
                        n=SAMPLES,
                        seed=_own_seed(seed, number, i),
                    ),
                )
                for i, question in enumerate(questions)
            ]
            for texts, answers in zip(samples.outputs, run(engine, requests, length), strict=True):
                texts += [sequence.output[:length] for sequence in answers]
            advance()
            yield samples


def _own_seed(seed: int, number: int, question: int) -> int:
    """Of a question in a round: unrelated to those of other rounds, and of other proofs."""
    source = np.random.SeedSequence(seed, spawn_key=(number, question))
    return int(source.generate_state(1, np.uint64)[0])


def judge(questions: Sequence[Question], samples: Samples, exact: bool) -> Distribution:
    """Tests samples.

    Args:
        questions: what was asked.
        samples: the answers.
        exact: whether the engine's logits have the reference's bits.
    """
    pairs = list(zip(questions, samples.outputs, strict=True))
    watch = samples.watch
    return Distribution(
        compare([question.first.count(texts) for question, texts in pairs], exact),
        compare([question.joint.count(texts) for question, texts in pairs], exact),
        watch.ratings if watch.ratings.trials else None,
        watch.acceptance if watch.acceptance.trials else None,
        watch.tokens_per_step,
        watch.theory,
    )
