"""What a short run on this machine tells of a model and its drafters, for `--measure`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import torch

from ridgeline.bench.figures import figures_of
from ridgeline.bench.measure import PLAIN, Contender, Load, Round, measure, requests
from ridgeline.bench.prompts import SHIPPED, Prompt, encode, read_prompts
from ridgeline.llm import LLM
from ridgeline.model.load import LoadedModel
from ridgeline.plan.acceptance import Acceptance, of_run
from ridgeline.plan.calibration import Calibration
from ridgeline.plan.cost import CostCurve, fit
from ridgeline.plan.passes import Pass, Passes
from ridgeline.plan.shape import ModelShape

PROMPTS, TOKENS = 3, 48
"""How many of those that ship, and the longest answer."""
ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 17, 24, 32, 48, 64, 96)
CONTEXTS = (64, 1024, 2048)
SHAPES = ((1, 1), (1, 8), (4, 1), (4, 4))
"""Sequences and rows of each, to tell keys from pairs."""
ROUNDS = 2


def measured_curve(
    loaded: LoadedModel,
    shape: ModelShape,
    calibration: Calibration,
    *,
    rows: Sequence[int] = ROWS,
    contexts: Sequence[int] = CONTEXTS,
) -> CostCurve:
    """T(N, B, S) of a step of this very model, from its own passes."""
    most = min(max(contexts), loaded.context_len - max(rows) - 1)
    lengths = [context for context in contexts if context <= most] or [most]
    sizes = [Pass(1, count, lengths[0]) for count in rows]
    sizes += [Pass(*sequences, context) for sequences in SHAPES for context in lengths]
    slots = 4 * (lengths[-1] + 16) + max(rows)
    windows = tuple(layer.window for layer in shape.attention)
    curve = fit(Passes(loaded.model, slots).samples(sizes, ROUNDS), windows)
    return replace(
        curve,
        row_seconds=tuple(seconds + calibration.step for seconds in curve.row_seconds),
        sequence=curve.sequence + calibration.sequence,
    )


def prompts_of(loaded: LoadedModel) -> list[Prompt]:
    """The first of the prompts that ship with Ridgeline."""
    llm = LLM(loaded, kv_tokens=1024)
    return encode(llm, read_prompts(SHIPPED)[:PROMPTS], SHIPPED, TOKENS)


def measured_acceptance(
    loaded: LoadedModel, spec: str, depth: int, prompts: Sequence[Prompt]
) -> Acceptance:
    """Of one drafter at temperature 0, in chains of at most `depth`.

    Raises:
        RidgelineError: see `LLM`.
    """
    contender, load = Contender(spec, depth=depth, nodes=depth, policy="fixed"), Load(0.0, 1)
    asked = requests(prompts, load, seed=0)
    with torch.inference_mode():
        sides = measure(loaded, (Contender(PLAIN), contender), load, asked, 0, lambda: None)
    found = figures_of([Round(*sides)])
    return of_run({**found, "options": asdict(contender)})
