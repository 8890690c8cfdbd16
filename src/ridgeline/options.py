"""Options that several commands have in common, and the exit codes of all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from ridgeline.errors import ConfigError

FAILED, USAGE, INTERRUPTED = 1, 2, 130

MODEL, DRAFTS, SAMPLING, ENDING = "Model", "Speculation", "Sampling", "Ending"


def option(help: str, panel: str, **rest: Any) -> Any:
    """One option, in a panel of the help."""
    return typer.Option(help=help, rich_help_panel=panel, **rest)


Model = Annotated[
    str | None,
    option(
        "Hugging Face id, folder of safetensors, or GGUF file.",
        MODEL,
        show_default="SmolLM2-135M-Instruct, fetched once",
    ),
]
Dtype = Annotated[str, option("auto (a GGUF file as it is), bfloat16, float16 or float32.", MODEL)]
Quantize = Annotated[str | None, option("int8 or int4: round the weights.", MODEL)]
Device = Annotated[str, option("auto, cpu, cuda, ...", MODEL)]
Threads = Annotated[int | None, option("CPU threads.", MODEL, show_default="torch's choice")]
DrafterSpec = Annotated[
    str, option("NAME or NAME:ARGUMENT; `ridgeline info` lists the names.", DRAFTS)
]
DraftDtype = Annotated[
    str, option("Of the drafter's weights; auto: a GGUF file's own, else the target's.", DRAFTS)
]
DraftQuantize = Annotated[
    str | None,
    option(
        "int8, int4 or none: round the drafter's weights.",
        DRAFTS,
        show_default="int4 where they run natively",
    ),
]
Depth = Annotated[int | None, option("Longest path of drafted tokens.", DRAFTS, show_default="5")]
Confidence = Annotated[
    float | None,
    option(
        "End a draft that is less likely than this to be accepted; 0: never.",
        DRAFTS,
        show_default="0.5",
    ),
]
Nodes = Annotated[
    int | None,
    option("Drafted tokens per text and step.", DRAFTS, show_default="as many as the depth"),
]
PolicySpec = Annotated[
    str | None,
    option(
        "fixed, table, table:TEXTS=DEPTH,... or goodput: how many drafts which text may have.",
        DRAFTS,
        show_default="goodput; fixed with --verify rejection or block",
    ),
]


def check_writable(file: Path, what: str) -> None:
    """Refuses a file that could not be written later, when the work is done.

    Raises:
        ConfigError: it is a folder, or lies in one that may not be written to.
    """
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"cannot write {what} {file}; give a file in a folder of yours")
