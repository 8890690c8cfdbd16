"""Part 4: low temperatures, large logits and a residual without mass, through the whole engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ridgeline.core.params import SamplingParams
from ridgeline.core.sequence import Sequence as TokenSequence
from ridgeline.llm import Request
from ridgeline.prove.altered import altered
from ridgeline.prove.equality import ROUNDING
from ridgeline.prove.reference import Reference
from ridgeline.prove.subject import Subject, run
from ridgeline.prove.watch import watched

TEMPERATURES = (0.0, 1e-6, 0.01, 0.05, 0.3, 1.0, 2.0)
NOISE_RANGE = 45.0
"""No draw is further behind the largest logit: Gumbel noise lies between -4 and 41."""


@dataclass(frozen=True)
class Logits:
    """What is made of the target's logits."""

    name: str
    scale: float = 1.0
    bf16: bool = False
    """rounded to 8 bits, so that many are equal"""

    def __call__(self, logits: Tensor) -> Tensor:
        """f32[K,V] of f32[K,V]."""
        logits = logits * self.scale
        return logits.bfloat16().float() if self.bf16 else logits


LOGITS = (
    Logits("as they are"),
    Logits("fp32, 10,000 times as large", 1e4),
    Logits("bf16, 10,000 times as large", 1e4, bf16=True),
)


@dataclass(frozen=True)
class Numerics:
    """What part 4 found for one subject."""

    texts: int
    """drafted texts"""
    tokens: int
    failures: tuple[str, ...]
    """one line each: what went wrong where"""


def stress(
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    rounding: float,
    seed: int,
    advance: Callable[[], None] = lambda: None,
) -> Numerics:
    """Every temperature with every kind of logits, all texts of a kind in one batch.

    Every token must be one that the target can say, and every distribution on the way one that sums
    to 1. Where the target has one answer besides (greedy requests, and seeded ones by `match`) and
    its logits are exact, the text must be the plain one. A drafter that draws from the very p
    leaves no residual: nothing that it drafts may be rejected.

    Args:
        subject: the rule and the drafter.
        prompts: what is answered.
        tokens: length of each answer.
        rounding: see `Reference.rounding`.
        seed: of all requests.
        advance: called after each kind of logits.
    """
    requests = [
        Request(
            list(prompt),
            SamplingParams(temperature=t, max_tokens=tokens, seed=seed, ignore_eos=True),
        )
        for prompt in prompts
        for t in TEMPERATURES
    ]
    failures = []
    written: list[list[int]] = []
    longest = max(map(len, prompts))
    for kind in LOGITS:
        changed = replace(subject, loaded=altered(subject.loaded, kind))
        samples, broken = _write(changed, requests)
        texts = [sample.output for sample in samples]
        written += texts
        plain = [samples[0].output for samples in run(changed.plain(len(requests)), requests)]
        reference = Reference(changed.loaded, longest, tokens)
        if broken:
            failures.append(f"logits {kind.name}: {broken} distributions do not sum to 1")
        for request, text, expected in zip(requests, texts, plain, strict=True):
            params = request.params
            one_answer = rounding == 0 and (params.greedy or subject.rule == "match")
            wrong = _unsayable(reference, request, text, kind, rounding)
            if one_answer and text != expected:
                wrong = "the text is not the plain one"
            if wrong:
                failures.append(f"T = {params.temperature:g}, logits {kind.name}: {wrong}")
        advance()
    if subject.rule != "match":
        sampled = [request for request in requests if not request.params.greedy]
        samples, broken = _write(replace(subject, drafter=None, blur=0.0), sampled)
        found = [sample.speculation for sample in samples]
        rejected = sum(sum(s.reached) - sum(s.passed) for s in found)
        written += [sample.output for sample in samples]
        reference = Reference(subject.loaded, longest, tokens)
        if broken:
            failures.append(f"drafts from the target's own p: {broken} distributions are broken")
        if rounding == 0 and rejected:
            failures.append(f"of drafts drawn from the target's own p, {rejected} were rejected")
        for request, sample in zip(sampled, samples, strict=True):
            if wrong := _unsayable(reference, request, sample.output, LOGITS[0], rounding):
                failures.append(f"drafts from the target's own p: {wrong}")
        advance()
    return Numerics(len(written), sum(map(len, written)), tuple(failures))


def _write(subject: Subject, requests: Sequence[Request]) -> tuple[list[TokenSequence], int]:
    """One text a request, and how many distributions on the way did not sum to 1."""
    engine = subject.start()
    with watched(engine, subject.draws) as watch:
        return [samples[0] for samples in run(engine, requests)], watch.broken


def _unsayable(
    reference: Reference, request: Request, text: Sequence[int], kind: Logits, rounding: float
) -> str | None:
    """Whether a token lies further behind than any draw, and rounding, can bring it."""
    params = request.params
    logits = reference.processed(request.tokens, [text[:i] for i in range(len(text))], params)
    largest = logits.amax(1)
    tokens = torch.tensor(text, device=logits.device)[:, None]
    behind = float((largest - logits.gather(1, tokens)[:, 0]).max())
    allowed = 0.0 if params.greedy else NOISE_RANGE
    if rounding:
        unit = 1.0 if params.greedy else params.temperature
        allowed += ROUNDING * rounding * kind.scale / unit
        allowed += float(largest.abs().max()) * 2**-7 if kind.bf16 else 0.0
    if behind <= allowed:
        return None
    return f"a token lies {behind:g} behind the likeliest, where {allowed:g} is the most"
