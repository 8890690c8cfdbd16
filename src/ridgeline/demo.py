"""The command `demo`: one answer written twice, plainly and with drafts, and what that changed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ridgeline.core.params import SamplingParams
from ridgeline.draft import WEIGHTLESS
from ridgeline.llm import LLM, Completion, Request
from ridgeline.loading import load_llm
from ridgeline.output import tokens_per_step

PROMPT = """..."""
DRAFTED = "bold green"
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Difference:
    """Where two greedy texts part."""

    token: int
    """index of the first token that differs"""
    margin: float
    """by how much the plain run's logit of its token exceeds the runner-up's"""


def run(console: Console, model: str | None, drafter: str | None, **options: Any) -> None:
    """Writes the demo's answer plainly, then with drafts, and compares the two.

    Args:
        console: where everything appears; without colours where it is no terminal.
        model: as `LLM` takes it; None is the demo model.
        drafter: its spec; None is the one that needs no weights.
        options: `max_tokens`, and whatever else `LLM` takes.

    Raises:
        RidgelineError: see `LLM`.
    """
    params = SamplingParams(max_tokens=options.pop("max_tokens"))
    drafts = {name: options.pop(name) for name in ("depth", "nodes")}
    plain = load_llm(model, **options)
    drafted = LLM(plain.loaded, drafter=drafter or WEIGHTLESS, **drafts)
    request = plain.request([{"role": "user", "content": PROMPT}], params)
    console.print(Text(PROMPT, style="dim"))
    completions = []
    for title, llm in (("one token a step", plain), ("with drafts", drafted)):
        # The first passes allocate memory and choose kernels; neither run should pay for that.
        llm.generate(replace(request, params=SamplingParams(max_tokens=WARM_UP_TOKENS)))
        console.rule(title, align="left")
        completions.append(_write(console, llm, request))
    before, after = completions
    console.print(_table(before, after, _difference(plain, request, before, after)))


def _write(console: Console, llm: LLM, request: Request) -> Completion:
    """Streams one answer and returns it."""
    for event in llm.stream(request):
        for piece in event.pieces:
            style = DRAFTED if piece.drafted else ""
            console.print(Text(piece.text, style=style), end="", soft_wrap=True)
        if event.completion:
            console.print("\n")
            return event.completion
    raise AssertionError("a stream ends with a completion")


def _difference(
    plain: LLM, request: Request, before: Completion, after: Completion
) -> Difference | None:
    """Compares the two token by token; the margin costs a second plain run, so only if needed."""
    if before.token_ids == after.token_ids:
        return None
    pairs = zip(before.token_ids, after.token_ids, strict=False)
    token = next(
        (i for i, (a, b) in enumerate(pairs) if a != b),
        min(len(before.token_ids), len(after.token_ids)),
    )
    again = replace(request.params, max_tokens=token + 1, logprobs=2)
    (output,) = plain.generate(replace(request, params=again))
    logprobs = output.completions[0].logprobs
    assert logprobs is not None
    (_, best), (_, second) = logprobs[token].top
    return Difference(token, best - second)  # log-probabilities differ as logits do


def _table(before: Completion, after: Completion, difference: Difference | None) -> Table:
    speeds = [completion.tokens_per_s or 0.0 for completion in (before, after)]
    speculation = after.speculation
    table = Table("", "plain", "speculative")
    table.add_row("tokens/s", *(f"{speed:.1f}" for speed in speeds))
    table.add_row("speed-up", "", f"{speeds[1] / speeds[0]:.2f}x" if speeds[0] else "")
    table.add_row("tokens per step", *(f"{tokens_per_step([c]) or 0:.2f}" for c in (before, after)))
    table.add_row("drafts accepted", "", f"{speculation.accepted} of {speculation.drafted}")
    if difference is None:
        table.add_row("text", "", f"identical, all {len(after.token_ids)} tokens")
    else:
        table.add_row(
            "text",
            "",
            f"differs from token {difference.token + 1} on, where the plain run's choice "
            f"leads by a logit margin of {difference.margin:.2g}",
        )
    return table
