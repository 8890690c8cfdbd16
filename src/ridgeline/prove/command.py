"""The command `prove`: its options, and what it does with them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from ridgeline.core.tree import MAX_DRAFTED
from ridgeline.errors import ConfigError
from ridgeline.options import (
    DRAFTS,
    FAILED,
    MODEL,
    Confidence,
    Device,
    DraftDtype,
    DrafterSpec,
    DraftQuantize,
    Dtype,
    Model,
    Quantize,
    Threads,
    check_writable,
    option,
)

MOST_BATCH, MOST_TOKENS, MOST_SEED = 1024, 1 << 20, 2**63


def prove(
    model: Model = None,
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    device: Device = "auto",
    threads: Threads = None,
    batch: Annotated[int, option("Texts sampled at once.", MODEL)] = 32,
    drafter: DrafterSpec = "auto",
    draft_dtype: DraftDtype = "auto",
    draft_quantize: DraftQuantize = None,
    depth: Annotated[int, option("Longest path of drafted tokens.", DRAFTS)] = 3,
    confidence: Confidence = None,
    nodes: Annotated[
        int | None,
        option("Drafted tokens per text and step.", DRAFTS, show_default="twice the depth"),
    ] = None,
    verify: Annotated[
        list[str] | None,
        option("Rule: match, rejection or block; repeatable.", DRAFTS, show_default="all three"),
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="As for `generate`; tested besides the ten that ship.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Longest text that is compared as a whole.")] = 48,
    minutes: Annotated[
        float, typer.Option(help="Time for it all; more shows smaller drifts.")
    ] = 4.0,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Also write the findings to this file.")
    ] = None,
) -> int:
    """Put it to the proof that drafts change nothing, on your own models."""
    for name, value, low, high in (
        ("depth", depth, 1, MAX_DRAFTED),
        ("nodes", nodes, 1, MAX_DRAFTED),
        ("batch", batch, 1, MOST_BATCH),
        ("tokens", tokens, 1, MOST_TOKENS),
        ("seed", seed, 0, MOST_SEED),
    ):
        if value is not None and not low <= value <= high:
            raise ConfigError(f"{name} is {value}; it must be from {low} to {high}")
    if not 0 < minutes < float("inf"):
        raise ConfigError(f"minutes is {minutes:g}; it must be a number above 0")
    if as_json is not None:
        check_writable(as_json, "the findings")

    from rich.console import Console

    from ridgeline.bench.prompts import SHIPPED, encode, read_prompts
    from ridgeline.config import EngineConfig
    from ridgeline.core.verify import RULES
    from ridgeline.loading import load_llm
    from ridgeline.prove.proof import Plan, prove
    from ridgeline.prove.report import findings, show
    from ridgeline.prove.subject import Options

    options = Options(
        depth=depth,
        nodes=min(2 * depth, MAX_DRAFTED) if nodes is None else nodes,
        confidence=EngineConfig.confidence if confidence is None else confidence,
        draft_dtype=draft_dtype,
        draft_quantize=draft_quantize or "auto",
        batch=batch,
    )
    rules = tuple(dict.fromkeys(verify or RULES))
    for rule in rules:
        options.config(rule, batch, None)  # what is wrong comes to light before anything is loaded
    files = [SHIPPED] if prompt_file is None else [prompt_file, SHIPPED]
    jobs = [(file, read_prompts(file)) for file in files]
    llm = load_llm(model, dtype=dtype, quantize=quantize, device=device, threads=threads)
    prompts = [p.request.tokens for file, found in jobs for p in encode(llm, found, file, tokens)]
    loaded = llm.loaded
    del llm  # and its cache: every engine has its own
    plan = Plan(rules, drafter, options, tokens, seed, seconds=60 * minutes)
    with _progress(60 * minutes) as tell:
        proof = prove(loaded, prompts, plan, tell)
    show(Console(), loaded, proof)
    if as_json is not None:
        text = json.dumps(findings(loaded, proof), indent=1, allow_nan=False) + "\n"
        try:
            as_json.write_text(text)
        except OSError as error:
            raise ConfigError(f"cannot write the findings {as_json}: {error.strerror}") from None
    return 0 if proof.passed else FAILED


@contextmanager
def _progress(seconds: float) -> Iterator[Callable[[str], None]]:
    """A bar of the time on standard error: a function that says what is being done."""
    from rich.console import Console
    from rich.progress import Progress, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (*Progress.get_default_columns()[:2], TimeElapsedColumn(), TimeRemainingColumn())
    started = time.monotonic()
    hidden = not console.is_terminal
    with Progress(*columns, console=console, disable=hidden, redirect_stdout=False) as bar:
        task = bar.add_task("", total=seconds)
        yield lambda text: bar.update(
            task, description=text, completed=min(seconds, time.monotonic() - started)
        )
