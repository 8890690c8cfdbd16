"""Part 4: low temperatures, large logits and a residual without mass, through the whole engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ridgeline.core.params import SamplingParams
from ridgeline.core.sequence import Sequence as TokenSequence
from ridgeline.llm import Request
from ridgeline.model.load import LoadedModel
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


class Trial:
    """One kind of logits, and what the target says with them at every temperature."""

    def __init__(
        self,
        subject: Subject,
        kind: Logits,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        seed: int,
    ) -> None:
        """Writes `tokens` tokens after each prompt, plainly; `subject` is any of the target's."""
        self.kind = kind
        self.requests = [
            Request(
                list(prompt),
                SamplingParams(temperature=t, max_tokens=tokens, seed=seed, ignore_eos=True),
            )
            for prompt in prompts
            for t in TEMPERATURES
        ]
        changed = replace(subject, loaded=altered(subject.loaded, kind))
        written = run(changed.plain(len(self.requests)), self.requests)
        self.plain = [samples[0].output for samples in written]
        self._reference = Reference(changed.loaded, max(map(len, prompts)), tokens)
        self._known: dict[tuple[int, ...], tuple[float, float]] = {}

    @property
    def loaded(self) -> LoadedModel:
        """The target with these logits."""
        return self._reference.loaded

    def unsayable(self, number: int, text: Sequence[int], rounding: float) -> str | None:
        """What is wrong if a token of an answer to a request lies further behind the likeliest
        than any draw, and rounding, can bring it."""
        params = self.requests[number].params
        largest, behind = self._distance(number, text)
        allowed = 0.0 if params.greedy else NOISE_RANGE
        if rounding:
            unit = 1.0 if params.greedy else params.temperature
            allowed += ROUNDING * rounding * self.kind.scale / unit
            allowed += largest * 2**-7 if self.kind.bf16 else 0.0
        if behind <= allowed:
            return None
        return f"a token lies {behind:g} behind the likeliest, where {allowed:g} is the most"

    def _distance(self, number: int, text: Sequence[int]) -> tuple[float, float]:
        """The largest magnitude of the likeliest tokens' logits, and how far behind they were."""
        key = (number, *text)
        if key not in self._known:
            request = self.requests[number]
            before = [text[:i] for i in range(len(text))]
            logits = self._reference.processed(request.tokens, before, request.params)
            largest = logits.amax(1)
            tokens = torch.tensor(text, device=logits.device)[:, None]
            behind = float((largest - logits.gather(1, tokens)[:, 0]).max())
            self._known[key] = float(largest.abs().max()), behind
        return self._known[key]


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
    trials: Sequence[Trial],
    rounding: float,
    advance: Callable[[], None] = lambda: None,
) -> Numerics:
    """All texts of a trial in one batch, with drafts.

    Every token must be one that the target can say, and every distribution on the way one that sums
    to 1. Where the target has one answer besides (greedy requests, and seeded ones by `match`) and
    its logits are exact, the text must be the plain one. A drafter that draws from the very p
    leaves no residual: nothing that it drafts may be rejected.

    Args:
        subject: the rule and the drafter.
        trials: one for each of `LOGITS`.
        rounding: see `Reference.rounding`.
        advance: called after each kind of logits.
    """
    failures = []
    written: list[TokenSequence] = []
    for trial in trials:
        name = f"logits {trial.kind.name}"
        samples, broken = _write(replace(subject, loaded=trial.loaded), trial.requests)
        written += samples
        if broken:
            failures.append(f"{name}: {broken} distributions do not sum to 1")
        for i, sample in enumerate(samples):
            params, text = sample.params, sample.output
            one_answer = rounding == 0 and (params.greedy or subject.rule == "match")
            if one_answer and text != trial.plain[i]:
                failures.append(
                    f"T = {params.temperature:g}, {name}: the text is not the plain one"
                )
            elif wrong := trial.unsayable(i, text, rounding):
                failures.append(f"T = {params.temperature:g}, {name}: {wrong}")
        advance()
    if subject.rule != "match":
        trial = trials[0]
        name = "drafts from the target's own p"
        perfect = replace(subject, loaded=trial.loaded, drafter=None, blur=0.0)
        samples, broken = _write(perfect, trial.requests)
        written += samples
        if broken:
            failures.append(f"{name}: {broken} distributions do not sum to 1")
        found = [sample.speculation for sample in samples]
        rejected = sum(sum(s.reached) - sum(s.passed) for s in found)
        if rounding == 0 and rejected:
            failures.append(f"{name}: {rejected} were rejected")
        for i, sample in enumerate(samples):
            if wrong := trial.unsayable(i, sample.output, rounding):
                failures.append(f"{name}: {wrong}")
        advance()
    return Numerics(len(written), sum(sample.output_len for sample in written), tuple(failures))


def _write(subject: Subject, requests: Sequence[Request]) -> tuple[list[TokenSequence], int]:
    """One text a request, and how many distributions on the way did not sum to 1."""
    engine = subject.start()
    with watched(engine, subject.draws) as watch:
        return [samples[0] for samples in run(engine, requests)], watch.broken
