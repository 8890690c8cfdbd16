"""The command line. What each command does is in a module of its own; here are its options.

Exit codes: 0 done, 1 something failed while it ran, 2 the command could not run as it was given,
130 Ctrl-C. Every mistake of a user is one line on standard error.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

try:
    import typer
except KeyboardInterrupt:  # half of the program's start, before `main` can see to it
    sys.exit(130)

from ridgeline.bench.command import bench
from ridgeline.core.params import SamplingParams
from ridgeline.errors import ConfigError, DraftError, OutOfBlocksError, RidgelineError
from ridgeline.options import (
    DRAFTS,
    ENDING,
    FAILED,
    INTERRUPTED,
    MODEL,
    SAMPLING,
    USAGE,
    Confidence,
    Depth,
    Device,
    DraftDtype,
    DrafterSpec,
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
from ridgeline.output import report
from ridgeline.plan.command import plan
from ridgeline.prove.command import prove
from ridgeline.train.options import train

if TYPE_CHECKING:
    from ridgeline.llm import LLM

app = typer.Typer(
    help="Lossless speculative decoding: language models, faster, saying the same.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command()(bench)
app.command()(plan)


@app.callback(invoke_without_command=True)
def _ridgeline(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from ridgeline import __version__

        print(f"ridgeline {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def generate(
    prompt: Annotated[
        list[str] | None, typer.Option(help="A prompt; may be given several times.")
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            help='A prompt a line; in FILE.jsonl an object a line: "prompt" or "messages", '
            "and any sampling parameter."
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put each prompt into the model's chat template.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON Lines, in the order of the prompts.")
    ] = False,
    model: Model = None,
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    device: Device = "auto",
    threads: Threads = None,
    batch: Annotated[
        int | None, option("Texts generated at once.", MODEL, show_default="32")
    ] = None,
    kv_tokens: Annotated[
        int | None,
        option("Capacity of the cache.", MODEL, show_default="from free memory"),
    ] = None,
    drafter: DrafterSpec = "auto",
    draft_dtype: DraftDtype = "auto",
    draft_quantize: DraftQuantize = None,
    depth: Depth = None,
    confidence: Confidence = None,
    nodes: Nodes = None,
    policy: PolicySpec = None,
    verify: Annotated[
        str | None,
        option("Rule: match, rejection or block.", DRAFTS, show_default="match"),
    ] = None,
    temperature: Annotated[
        float, option("0 takes the most probable token.", SAMPLING)
    ] = SamplingParams.temperature,
    top_k: Annotated[int, option("Keep the k most probable; 0: all.", SAMPLING)] = (
        SamplingParams.top_k
    ),
    top_p: Annotated[float, option("Keep this probability mass.", SAMPLING)] = (
        SamplingParams.top_p
    ),
    min_p: Annotated[
        float, option("Keep tokens of this share of the largest probability.", SAMPLING)
    ] = SamplingParams.min_p,
    repetition_penalty: Annotated[
        float, option("Divides the logits of tokens that occurred.", SAMPLING)
    ] = SamplingParams.repetition_penalty,
    frequency_penalty: Annotated[
        float, option("Subtracted per occurrence in the output.", SAMPLING)
    ] = SamplingParams.frequency_penalty,
    presence_penalty: Annotated[
        float, option("Subtracted once from what occurred in the output.", SAMPLING)
    ] = SamplingParams.presence_penalty,
    logit_bias: Annotated[
        list[str] | None, option("ID=BIAS, added to a token's logit; repeatable.", SAMPLING)
    ] = None,
    bad_words: Annotated[
        list[str] | None, option("Text that must not be written; repeatable.", SAMPLING)
    ] = None,
    seed: Annotated[
        int | None, option("The same seed gives the same text.", SAMPLING, show_default="random")
    ] = SamplingParams.seed,
    n: Annotated[int, option("Samples per prompt.", SAMPLING)] = SamplingParams.n,
    logprobs: Annotated[
        int | None,
        option("With --json: log-probabilities, and the N largest beside.", SAMPLING),
    ] = SamplingParams.logprobs,
    max_tokens: Annotated[int, option("Longest text.", ENDING)] = SamplingParams.max_tokens,
    min_tokens: Annotated[int, option("Shortest text.", ENDING)] = SamplingParams.min_tokens,
    stop: Annotated[
        list[str] | None, option("Text that ends the output; repeatable.", ENDING)
    ] = None,
    stop_token_ids: Annotated[
        list[int] | None, option("Token id that ends the output; repeatable.", ENDING)
    ] = None,
    ignore_eos: Annotated[
        bool, option("The model's own end tokens do not end the text.", ENDING)
    ] = SamplingParams.ignore_eos,
) -> int:
    """Write what comes after a prompt, or many."""
    from ridgeline.generate import Source, run

    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        logit_bias=_biases(logit_bias or ()),
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        stop_token_ids=tuple(stop_token_ids or ()),
        ignore_eos=ignore_eos,
        seed=seed,
        n=n,
        logprobs=logprobs,
    )
    source = Source(prompt or (), prompt_file, params, tuple(bad_words or ()), chat)

    def load() -> LLM:
        from ridgeline.config import EngineConfig
        from ridgeline.loading import load_llm

        return load_llm(
            model,
            dtype=dtype,
            quantize=quantize,
            device=device,
            threads=threads,
            drafter=drafter,
            draft_dtype=draft_dtype,
            draft_quantize=draft_quantize,
            max_batch=batch,
            max_batch_tokens=max(batch or 0, EngineConfig.max_batch_tokens),
            kv_tokens=kv_tokens,
            depth=depth,
            confidence=confidence,
            nodes=nodes,
            policy=policy,
            verify=verify,
        )

    return run(source, load, as_json)


@app.command()
def demo(
    model: Model = None,
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    device: Device = "auto",
    threads: Threads = None,
    drafter: DrafterSpec = "auto",
    depth: Annotated[int, option("Longest path of drafted tokens.", DRAFTS)] = 4,
    nodes: Nodes = None,
    max_tokens: Annotated[int, option("Longest text.", ENDING)] = 300,
    svg: Annotated[
        Path | None, typer.Option(help="Also save what was shown, as a picture.")
    ] = None,
) -> None:
    """Write one text plainly and once more with drafts, and compare."""
    from rich.console import Console

    from ridgeline.demo import run

    if svg is not None:
        check_writable(svg, "the picture")
    console = Console() if svg is None else Console(record=True, force_terminal=True, width=96)
    run(
        console,
        model,
        drafter,
        max_tokens=max_tokens,
        dtype=dtype,
        quantize=quantize,
        device=device,
        threads=threads,
        depth=depth,
        nodes=nodes,
    )
    if svg is not None:
        try:
            console.save_svg(str(svg), title="ridgeline demo")
        except OSError as error:
            raise ConfigError(f"cannot write the picture {svg}: {error.strerror}") from None


app.command()(train)
app.command()(prove)


@app.command()
def info() -> None:
    """Show versions, the processor, and which of our code paths it uses."""
    from ridgeline.info import run

    run()


def _biases(texts: Sequence[str]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for text in texts:
        token, _, bias = text.partition("=")
        try:
            new = {int(token): float(bias)}
        except ValueError:
            raise ConfigError(
                f"logit_bias is {text!r}; it must be ID=BIAS, such as 42=-5"
            ) from None
        if new.keys() & biases.keys():
            raise ConfigError(f"logit_bias names token {int(token)} twice; give one bias a token")
        biases |= new
    return biases


def execute(arguments: Sequence[str]) -> int:
    """Runs one command line; returns its exit code."""
    try:
        return app(arguments, standalone_mode=False) or 0
    except typer.TyperException as error:
        report(error.format_message())
        return USAGE
    except (DraftError, OutOfBlocksError) as error:
        report(error)
        return FAILED
    except RidgelineError as error:
        report(error)
        return USAGE
    except OSError as error:  # of standard output: what is read is checked where it is read
        report(f"the output cannot be written: {error.strerror or error}")
        return FAILED


def main() -> None:
    """The program `ridgeline`."""
    # OpenMP's threads wait asleep: spinning, they would hold the processors that our own threads
    # and other programs need, and on a busy machine decoding would be many times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # What the libraries say is meant for developers; our own errors say what a user can do.
    for library in ("TRANSFORMERS", "HF_HUB"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    warnings.simplefilter("ignore")
    if sys.stdout is None or sys.stderr is None:
        sys.exit(USAGE)  # closed by whoever started this: there is nobody to tell
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what the terminal cannot show; stderr escapes it
    code = INTERRUPTED
    try:
        signal.signal(signal.SIGINT, _interrupt_handler())
        code = execute(sys.argv[1:])
    except KeyboardInterrupt:
        pass
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done: Ctrl-C must not look like a failure
    sys.exit(code)


def _interrupt_handler() -> Callable[..., None]:
    """Raises KeyboardInterrupt, but not again within a second: the first one still unwinds."""
    last = float("-inf")

    def handle(*_: object) -> None:
        nonlocal last
        before, last = last, time.monotonic()
        if last > before + 1:
            raise KeyboardInterrupt

    return handle
