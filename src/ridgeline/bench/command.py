"""The command `bench`: its options, and what it does with them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.errors import ConfigError
from ridgeline.options import (
    DRAFTS,
    INTERRUPTED,
    MODEL,
    SAMPLING,
    Confidence,
    Depth,
    Device,
    DraftDtype,
    DraftQuantize,
    Dtype,
    Model,
    Nodes,
    PolicySpec,
    Quantize,
    Threads,
    check_writable,
    option,
)

if TYPE_CHECKING:
    from ridgeline.bench.measure import Contender, Load
    from ridgeline.bench.prompts import Prompt
    from ridgeline.bench.record import Record
    from ridgeline.model.load import LoadedModel

TEMPERATURES = (0.0, 1.0)
BATCHES = (1, 4, 16)


def bench(
    model: Model = None,
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    device: Device = "auto",
    threads: Threads = None,
    batch: Annotated[
        list[int] | None,
        option("Texts at once; repeatable.", MODEL, show_default="1, 4 and 16"),
    ] = None,
    drafter: Annotated[
        list[str] | None,
        option(
            "NAME or NAME:ARGUMENT; repeatable. Plain decoding is always measured.",
            DRAFTS,
            show_default="auto",
        ),
    ] = None,
    draft_dtype: DraftDtype = "auto",
    draft_quantize: DraftQuantize = None,
    depth: Depth = None,
    confidence: Confidence = None,
    nodes: Nodes = None,
    policy: PolicySpec = None,
    temperature: Annotated[
        list[float] | None, option("Repeatable.", SAMPLING, show_default="0 and 1")
    ] = None,
    seed: Annotated[int, option("Of the first prompt; each has its own.", SAMPLING)] = 0,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            help='As for `generate`, perhaps with a "kind" a line.',
            show_default="ten prompts of seven kinds",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Longest answer.")] = 128,
    repeat: Annotated[int, typer.Option(help="Rounds, each plain and drafted in turn.")] = 3,
    as_json: Annotated[
        Path | None,
        typer.Option(
            "--json",
            help="Write the figures; the same command goes on where it was interrupted, and one "
            "with other drafters or options of theirs adds rows.",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw them; needs `pip install 'ridgeline\\[plot]'`.")
    ] = None,
) -> int:
    """Compare drafters with plain decoding and each other."""
    for name, value in (
        ("tokens", tokens),
        ("repeat", repeat),
        *(("batch", b) for b in batch or ()),
    ):
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    for file in filter(None, (as_json, plot)):
        check_writable(file, "the results")
    if as_json and plot and as_json.resolve() == plot.resolve():
        raise ConfigError(f"--json and --plot are both {plot}; give them different files")

    from rich.console import Console

    from ridgeline.bench.measure import Contender, Load, memory
    from ridgeline.bench.plot import check_plot, draw
    from ridgeline.bench.prompts import SHIPPED, encode, read_prompts
    from ridgeline.bench.record import Record, digest
    from ridgeline.bench.report import show
    from ridgeline.config import EngineConfig
    from ridgeline.draft.auto import AUTO
    from ridgeline.loading import load_llm

    if plot is not None:
        check_plot(plot)
    file = prompt_file or SHIPPED
    jobs = read_prompts(file)
    llm = load_llm(model, dtype=dtype, quantize=quantize, device=device, threads=threads)
    prompts, loaded = encode(llm, jobs, file, tokens), llm.loaded
    del llm  # and its cache: every round has engines of its own
    arguments = {"dtype": dtype, "quantize": quantize, "tokens": tokens, "repeat": repeat}
    common = _common(loaded, arguments | {"seed": seed}, prompts)
    record = Record(as_json, common)
    depth = EngineConfig.depth if depth is None else depth
    contenders = [
        Contender(
            spec,
            depth,
            depth if nodes is None else nodes,
            EngineConfig.confidence if confidence is None else confidence,
            EngineConfig(policy=policy).chosen_policy,
            draft_dtype,
            draft_quantize or "auto",
            digest(spec, loaded),
        )
        for spec in dict.fromkeys(drafter or [AUTO])
    ]
    loads = [
        Load(t, b)
        for t in dict.fromkeys(temperature or TEMPERATURES)
        for b in dict.fromkeys(batch or BATCHES)
    ]
    most, longest = max(load.batch for load in loads), max(len(p.request.tokens) for p in prompts)
    takes = {c: asdict(memory(loaded, c, most, longest + tokens)) for c in contenders}
    plan = [(c, load, takes[c]) for c in contenders for load in loads]
    interrupted = False
    try:
        _run(loaded, plan, prompts, record, repeat, seed)
    except KeyboardInterrupt:
        interrupted = True
    if record.runs:
        show(Console(), common, record.runs)
        if plot is not None:
            draw(plot, f"{common['model']['name']}, {common['model']['computes']}", record.runs)
    return INTERRUPTED if interrupted else 0


def _common(
    loaded: LoadedModel, arguments: dict[str, Any], prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """What all runs of a file share."""
    from ridgeline.model.native import NativeModel
    from ridgeline.provenance import machine, portable

    texts = json.dumps([[p.request.tokens, str(p.request.params)] for p in prompts])
    return {
        "model": {
            "name": portable(loaded.name),
            "computes": loaded.model.computes,
            "device": str(loaded.model.device),
            "weights": loaded.model.nbytes,
            "exact": isinstance(loaded.model, NativeModel),
        },
        "arguments": arguments,
        "prompts": {
            "kinds": [prompt.kind for prompt in prompts],
            "tokens": [len(prompt.request.tokens) for prompt in prompts],
            "sha256": hashlib.sha256(texts.encode()).hexdigest(),
        },
        "machine": machine(),
    }


def _run(
    loaded: LoadedModel,
    plan: Sequence[tuple[Contender, Load, dict[str, int]]],
    prompts: Sequence[Prompt],
    record: Record,
    repeat: int,
    seed: int,
) -> None:
    """Measures what the record lacks."""
    from ridgeline.bench.figures import figures_of
    from ridgeline.bench.measure import PLAIN, Contender, Round, measure, requests
    from ridgeline.bench.record import key
    from ridgeline.provenance import moment

    missing = [entry for entry in plan if not record.holds(*entry[:2])]
    asked = {load: requests(prompts, load, seed) for _, load, _ in missing}
    groups = sum(2 * repeat * len(asked[load]) // load.batch for _, load, _ in missing)
    with _progress(groups) as (describe, advance):
        for contender, load, takes in missing:
            options = key(contender, load)
            describe(f"{options['drafter']}, T = {load.temperature:g}, batch {load.batch}")
            about = {"options": options, **moment(), "load_average": os.getloadavg()}
            pair = (Contender(PLAIN), contender)
            rounds = [
                Round(*measure(loaded, pair, load, asked[load], number, advance))
                for number in range(repeat)
            ]
            record.add(about | {"memory": takes} | figures_of(rounds))


@contextmanager
def _progress(total: int) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """A bar on standard error over all runs: functions that name the present one and advance."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = Progress.get_default_columns()[:2]
    more = (MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    hidden = not total or not console.is_terminal
    with Progress(*columns, *more, console=console, disable=hidden, redirect_stdout=False) as bar:
        task = bar.add_task("", total=total)
        yield (
            lambda text: bar.update(task, description=text),
            lambda: bar.advance(task),
        )
