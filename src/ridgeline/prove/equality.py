"""Part 1: the very tokens, with drafts and without, alone and in a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ridgeline.core.params import SamplingParams
from ridgeline.engine import Engine
from ridgeline.llm import Request
from ridgeline.prove.allowance import Allowance
from ridgeline.prove.reference import Reference
from ridgeline.prove.subject import Subject, run

ROUNDING = 4.0
"""A difference is rounding if its margin is at most so many times the measured rounding."""
PENALTIES = SamplingParams(repetition_penalty=1.1, frequency_penalty=0.3, presence_penalty=0.2)
"""Of every other prompt."""
FEW, FAVOUR = 4, 100.0
"""Words of a text of few words, and the bias that excludes all others."""
SHORT = 2
"""Prompts that are answered in few words as well."""
TEMPERATURE = 0.8


@dataclass(frozen=True)
class Difference:
    """Where a drafted text parts from the plain one."""

    prompt: int
    """index of the prompt"""
    few_words: bool
    """answered in few words"""
    sampled: bool
    """seeded; else greedy"""
    batch: bool
    """together with the other prompts; else alone"""
    position: int
    """index of the first token that differs"""
    plain: int | None
    """the plain text's token there; None: it has ended"""
    drafted: int | None
    margin: float | None
    """by how much the plain token leads in what decides: see `Reference.margin`; None: one of the
    texts has ended"""
    rounding: bool
    """whether rounding explains it"""


@dataclass(frozen=True)
class Plain:
    """Texts written without drafts."""

    requests: list[Request]
    outputs: list[list[int]]

    def parts(self) -> list[Plain]:
        """Those in few words, which show most and come first, and the others."""
        short = sum(bool(request.params.logit_bias) for request in self.requests)
        cuts = [(0, short), (short, len(self.requests))]
        return [Plain(self.requests[i:j], self.outputs[i:j]) for i, j in cuts if i < j]


@dataclass(frozen=True)
class Equality:
    """What part 1 found for one subject."""

    texts: int
    """drafted texts compared, each prompt alone and in a batch"""
    tokens: int
    """of the plain texts they were compared with"""
    sampled: bool
    """whether seeded texts were among them: only `match` promises the same ones"""
    accepted: int
    """drafted tokens in those texts"""
    differences: tuple[Difference, ...]

    @property
    def failed(self) -> bool:
        """Whether a difference is more than rounding."""
        return any(not difference.rounding for difference in self.differences)

    @property
    def could_fail(self) -> bool:
        """Whether drafts had any part in the texts."""
        return self.accepted > 0


def few_words(prompt: Sequence[int]) -> SamplingParams:
    """Lets but a few of the prompt's own tokens be said, each the less the more often it was.

    There penalties decide every token, and much of what is drafted is accepted.
    """
    words = list(dict.fromkeys([*prompt[len(prompt) // 2 :], *prompt]))[:FEW]
    return SamplingParams(
        logit_bias=dict.fromkeys(words, FAVOUR), frequency_penalty=2.0, ignore_eos=True
    )


def requests_of(prompts: Sequence[Sequence[int]], tokens: int, seed: int) -> list[Request]:
    """Each prompt greedily and seeded, and some in few words first."""
    requests = []
    short = [(prompt, few_words(prompt)) for prompt in prompts[:SHORT]]
    given = [(prompt, PENALTIES if i % 2 else SamplingParams()) for i, prompt in enumerate(prompts)]
    for prompt, params in (*short, *given):
        params = replace(params, max_tokens=tokens, seed=seed)
        requests += [
            Request(list(prompt), replace(params, temperature=t)) for t in (0.0, TEMPERATURE)
        ]
    return requests


def write_plainly(
    engine: Engine, requests: Sequence[Request], allowance: Allowance, advance: Callable[[], None]
) -> Plain:
    """Writes requests one by one, two a round (a prompt's), as far as the allowance goes."""
    outputs: list[list[int]] = []
    for number in allowance.spend():
        pair = requests[2 * number : 2 * number + 2]
        if not pair:
            break
        outputs += [run(engine, [request])[0][0].output for request in pair]
        advance()
    return Plain(list(requests[: len(outputs)]), outputs)


def compare_texts(
    subject: Subject,
    plain: Plain,
    reference: Reference,
    rounding: float,
    *,
    alone: bool = True,
    engine: Engine | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Equality:
    """Writes the plain texts with drafts.

    Args:
        subject: the rule and the drafter.
        plain: what to compare with.
        reference: for margins.
        rounding: see `Reference.rounding`.
        alone: whether to write each text alone as well as all in a batch.
        engine: of the subject, if not a new one.
        advance: called after each prompt that is written alone, and after the batch.
    """
    engine = engine or subject.start()
    chosen = [
        i
        for i, request in enumerate(plain.requests)
        if request.params.greedy or subject.rule == "match"
    ]
    requests = [plain.requests[i] for i in chosen]
    written = []
    if alone:
        for i, request in zip(chosen, requests, strict=True):
            written.append((i, False, run(engine, [request])[0][0]))
            advance()
    batch = run(engine, requests)
    written += [(i, True, samples[0]) for i, samples in zip(chosen, batch, strict=True)]
    advance()
    differences = []
    short = sum(bool(request.params.logit_bias) for request in plain.requests) // 2
    for i, together, sequence in written:
        request, before, after = plain.requests[i], plain.outputs[i], sequence.output
        length = max(len(before), len(after))
        at = next((j for j in range(length) if before[j : j + 1] != after[j : j + 1]), None)
        if at is None:
            continue
        tokens = [output[at] if at < len(output) else None for output in (before, after)]
        margin = None
        if tokens[0] is not None and tokens[1] is not None:
            margin = reference.margin(
                request.tokens, before[:at], tokens[0], tokens[1], request.params
            )
        unit = 1.0 if request.params.greedy else 1 / request.params.temperature
        differences.append(
            Difference(
                i // 2 - (0 if request.params.logit_bias else short),
                bool(request.params.logit_bias),
                not request.params.greedy,
                together,
                at,
                tokens[0],
                tokens[1],
                margin,
                margin is not None and rounding > 0 and abs(margin) <= ROUNDING * rounding * unit,
            )
        )
    return Equality(
        len(written),
        sum(len(plain.outputs[i]) for i, _, _ in written),
        any(not request.params.greedy for request in requests),
        sum(sequence.speculation.accepted for _, _, sequence in written),
        tuple(differences),
    )
