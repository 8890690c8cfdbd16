"""The options of `ridgeline train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ridgeline.options import Device, Dtype, Model, Threads, option
from ridgeline.train import METHODS

DATA, LEARNING = "Data", "Training"


def train(
    method: Annotated[str, typer.Argument(help=f"What to train: {', '.join(METHODS)}.")],
    out: Annotated[Path, typer.Option(help="Folder for the head.")],
    work: Annotated[
        Path | None,
        typer.Option(
            help="Folder for texts and hidden states; heads of one model may share it.",
            show_default="OUT/work",
        ),
    ] = None,
    model: Model = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    data: Annotated[
        list[Path] | None,
        option("Text, code, a folder of them, or FILE.jsonl of messages; repeatable.", DATA),
    ] = None,
    distill: Annotated[
        list[str] | None,
        option(
            "Prompts that the model answers itself: a file, `default` for those that ship, or "
            "`own:N` for N that it writes itself; repeatable.",
            DATA,
        ),
    ] = None,
    answers: Annotated[int, option("Answers to each prompt.", DATA)] = 3,
    answer_tokens: Annotated[int, option("Longest answer.", DATA)] = 256,
    cache_gb: Annotated[float, option("Room for hidden states on disk.", DATA)] = 20.0,
    steps: Annotated[int, option("Positions ahead to train on.", LEARNING)] = 5,
    draft_vocab: Annotated[int, option("Most frequent ids, to draft from.", LEARNING)] = 8192,
    intermediate: Annotated[
        int | None, option("Width of the MLP.", LEARNING, show_default="8/3 of the hidden size")
    ] = None,
    epochs: Annotated[int, option("Passes over the data.", LEARNING)] = 8,
    learning_rate: Annotated[float, option("Highest learning rate.", LEARNING)] = 1e-3,
    minutes: Annotated[
        float | None, option("Stop training after so long.", LEARNING, show_default="never")
    ] = None,
    seed: Annotated[int, option("Of data, weights and order.", LEARNING)] = 0,
    compact: Annotated[
        bool, typer.Option("--compact", help="Leave out the LM head, which is the model's own.")
    ] = False,
    bits: Annotated[int, typer.Option(help="Of a weight of the saved head: 16 or 8.")] = 16,
) -> None:
    """Train a draft head for a model; the same command goes on where it was interrupted."""
    from ridgeline.loading import load_llm
    from ridgeline.train.command import Job, run_training
    from ridgeline.train.run import TrainOptions

    job = Job(
        method=method,
        out=out,
        work=work,
        data=tuple(data or ()),
        distill=tuple(distill or ()),
        answers=answers,
        answer_tokens=answer_tokens,
        steps=steps,
        draft_vocab=draft_vocab,
        intermediate=intermediate,
        cache_gb=cache_gb,
        compact=compact,
        bits=bits,
    )
    options = TrainOptions(epochs=epochs, learning_rate=learning_rate, minutes=minutes, seed=seed)
    target = load_llm(model, dtype=dtype, device=device, threads=threads).loaded
    run_training(target, job, options)
