"""The command `plan`: its options, and what it does with them."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from ridgeline.errors import ConfigError
from ridgeline.options import DRAFTS, MODEL, Threads, check_writable, option

HARDWARE = "Hardware"
BATCHES = (1, 2, 4, 8, 16, 32, 64)
DEEPEST = 64


def _check_new_file(file: Path) -> None:
    """Makes it and removes it again: permissions do not tell of every folder that takes no file."""
    if file.exists():
        return
    try:
        file.touch()
        file.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write the picture {file}: {error.strerror}") from None


def plan(
    model: Annotated[
        str | None,
        option(
            "Hugging Face id, folder, GGUF file or config.json; weights need not be there.",
            MODEL,
            show_default="SmolLM2-135M-Instruct",
        ),
    ] = None,
    precision: Annotated[
        str | None,
        option("fp32, bf16, fp16, fp8, int8 or int4.", MODEL, show_default="as it is stored"),
    ] = None,
    context: Annotated[
        int | None,
        option("Tokens of each text.", MODEL, show_default="1024, or what the model reads"),
    ] = None,
    batch: Annotated[
        list[int] | None,
        option("Texts at once; repeatable.", MODEL, show_default="1, 2, 4, ... 64"),
    ] = None,
    hardware: Annotated[
        str,
        option("local, which is measured once, or a name such as h100-sxm or rtx-4090.", HARDWARE),
    ] = "local",
    devices: Annotated[int, option("So many of it, sharing the model.", HARDWARE)] = 1,
    threads: Threads = None,
    recalibrate: Annotated[
        bool,
        typer.Option("--recalibrate", help="Measure this machine again.", rich_help_panel=HARDWARE),
    ] = False,
    drafter: Annotated[
        list[str] | None,
        option(
            "NAME, or model:PATH; repeatable.",
            DRAFTS,
            show_default="all that need no other model; those of --bench",
        ),
    ] = None,
    draft_precision: Annotated[
        str | None,
        option(
            "As --precision, for drafters.",
            DRAFTS,
            show_default="int4 where they run natively here, else the target's",
        ),
    ] = None,
    depth: Annotated[int, option("Deepest draft to consider.", DRAFTS)] = 8,
    acceptance: Annotated[
        str | None,
        option(
            "A rate or a range, such as 0.6-0.8, for every drafter.",
            DRAFTS,
            show_default="what others published",
        ),
    ] = None,
    bench: Annotated[
        Path | None, option("Take it from a file of `ridgeline bench --json`.", DRAFTS)
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Take it from a short run here, and the target's times too: loads the model.",
            rich_help_panel=DRAFTS,
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw it; needs `pip install 'ridgeline\\[plot]'`.")
    ] = None,
) -> None:
    """Say what speculation will bring, on what hardware, before anything is loaded."""
    batches = sorted(set(batch or BATCHES))
    for name, value, most in (
        *(("batch", value, 1 << 16) for value in batches),
        ("devices", devices, 1 << 16),
        ("depth", depth, DEEPEST),
    ):
        if not 1 <= value <= most:
            raise ConfigError(f"{name} is {value}; it must be from 1 to {most}")
    if sum((acceptance is not None, bench is not None, measure)) > 1:
        raise ConfigError("give only one of --acceptance, --bench and --measure")
    if plot is not None:
        from ridgeline.bench.plot import check_plot

        check_writable(plot, "the picture")
        check_plot(plot)
        _check_new_file(plot)

    from rich.console import Console

    from ridgeline.plan.report import show, to_json
    from ridgeline.plan.result import make_plan
    from ridgeline.plan.setup import Wanted, set_up

    wanted = Wanted(
        model=model,
        precision=precision,
        hardware=hardware,
        devices=devices,
        threads=threads,
        recalibrate=recalibrate,
        drafters=tuple(dict.fromkeys(drafter or ())),
        draft_precision=draft_precision,
        depth=depth,
        context=context,
        acceptance=acceptance,
        bench=bench,
        measure=measure,
    )
    console = Console(stderr=True)
    with console.status("reading") if console.is_terminal else nullcontext() as status:
        setup = set_up(wanted, status.update if status else lambda text: None)
    for note in setup.notes:
        print(f"note: {note}", file=sys.stderr)
    made = make_plan(
        setup.planner,
        setup.contenders,
        setup.shape,
        setup.hardware,
        setup.basis,
        batches,
        depth,
    )
    if as_json:
        print(json.dumps(to_json(made), indent=2))
    else:
        show(Console(), made)
    if plot is not None:
        from ridgeline.plan.plot import draw

        draw(plot, made)
