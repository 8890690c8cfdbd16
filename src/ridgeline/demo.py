"""The command `demo`: one answer written twice, plainly and with drafts, and what that changed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ridgeline.core.params import SamplingParams
from ridgeline.draft.auto import chosen
from ridgeline.llm import LLM, Completion, Request
from ridgeline.loading import load_llm
from ridgeline.output import tokens_per_step

PROMPT = """The twelve months of the year as JSON, an object a line:

```json
{"id": 1, "name": "January", "kind": "month", "calendar": "Gregorian", "public": true}
{"id": 2, "name": "February", "kind": "month", "calendar": "Gregorian", "public": true}
{"id": 3, "name": "March", "kind": "month", "calendar": "Gregorian", "public": true}
"""
"""A text that repeats itself, as data and code do: here drafts need no model."""
STOP = ("```",)
DRAFTED = "bold green"
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Difference:
    """Where two greedy texts part."""

    token: int
    """index of the first token that differs"""
    margin: float
    """by how much the plain run's logit of its token exceeds the runner-up's"""


def run(console: Console, model: str | None, drafter: str, **options: Any) -> None:
    """Writes the demo's answer plainly, then with drafts, and compares the two.

    Args:
        console: where everything appears; without colours where it is no terminal.
        model: as `LLM` takes it; None is the demo model.
        drafter: its spec.
        options: `max_tokens`, `depth`, `nodes`, and whatever else `LLM` takes.

    Raises:
        RidgelineError: see `LLM`.
    """
    params = SamplingParams(max_tokens=options.pop("max_tokens"), stop=STOP)
    drafts = {name: options.pop(name) for name in ("depth", "nodes")}
    plain = load_llm(model, **options)
    drafted = LLM(plain.loaded, drafter=drafter, **drafts)
    request = plain.request(PROMPT, params)
    console.print(Text(PROMPT, style="dim"), soft_wrap=True)
    completions = []
    for title, llm in (
        ("Plain: one token a step", plain),
        ("With drafts: the accepted ones are green", drafted),
    ):
        # The first passes allocate memory and choose kernels; neither run should pay for that.
        llm.generate(replace(request, params=SamplingParams(max_tokens=WARM_UP_TOKENS)))
        console.print(Text(f"{title}\n", style="bold"))
        completions.append(_write(console, llm, request))
    before, after = completions
    table = _table(before, after, difference(plain, request, before, after))
    table.caption = (
        f"{_place(plain)}; {chosen(drafter, plain.loaded, drafted.drafter)}, "
        f"depth {drafted.engine.config.depth}"
    )
    console.print(table)


def _write(console: Console, llm: LLM, request: Request) -> Completion:
    """Streams one answer and returns it."""
    completion = None
    for event in llm.stream(request):
        text = Text()
        for piece in event.pieces:
            text.append(piece.text, DRAFTED if piece.drafted else None)
        console.print(text, end="", soft_wrap=True)
        completion = event.completion
    assert completion is not None, "a sample's last event holds its completion"
    console.print()
    return completion


def difference(
    plain: LLM, request: Request, before: Completion, after: Completion
) -> Difference | None:
    """Compares two completions of `request`, `before` being the one of `plain`; None: the same.

    The margin costs another plain run up to the token that differs, so only then.
    """
    pairs = zip(before.token_ids, after.token_ids, strict=False)
    token = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if token is None:
        token = min(len(before.token_ids), len(after.token_ids))
        if len(before.token_ids) == len(after.token_ids):
            return None
    params = replace(request.params, max_tokens=token + 1, logprobs=2)
    (output,) = plain.generate(replace(request, params=params))
    logprobs = output.completions[0].logprobs
    assert logprobs
    (_, best), (_, second) = logprobs[-1].top
    return Difference(token, best - second)  # log-probabilities differ as logits do


def _table(before: Completion, after: Completion, difference: Difference | None) -> Table:
    speeds = [completion.tokens_per_s or 0.0 for completion in (before, after)]
    steps = [tokens_per_step([completion]) or 0.0 for completion in (before, after)]
    speculation = after.speculation
    share = speculation.accepted / speculation.drafted if speculation.drafted else 0.0
    if difference is None:
        verdict = f"identical, {len(after.token_ids)} tokens"
    else:
        verdict = f"token {difference.token + 1} differs, logit margin {difference.margin:.2g}"
    table = Table("", "plain", "with drafts")
    table.add_row("tokens/s", *(f"{speed:.1f}" for speed in speeds))
    table.add_row("speed-up", "", f"{speeds[1] / speeds[0]:.2f}x" if speeds[0] else "")
    table.add_row("tokens per step", *(f"{count:.2f}" for count in steps))
    table.add_row(
        "drafts accepted", "", f"{speculation.accepted} of {speculation.drafted}, {share:.0%}"
    )
    table.add_row("text", "", verdict)
    return table


def _place(llm: LLM) -> str:
    """What ran where."""
    model = llm.loaded.model
    threads = f", {torch.get_num_threads()} threads" if model.device.type == "cpu" else ""
    return f"{llm.loaded.name}, {model.computes}, on {model.device}{threads}"
