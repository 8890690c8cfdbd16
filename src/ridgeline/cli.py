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
from typing import TYPE_CHECKING, Annotated, Any

try:
    import typer
except KeyboardInterrupt:  # half of the program's start, before `main` can see to it
    sys.exit(130)

from ridgeline.core.params import SamplingParams
from ridgeline.errors import ConfigError, DraftError, OutOfBlocksError, RidgelineError
from ridgeline.output import report
from ridgeline.train import METHODS

if TYPE_CHECKING:
    from ridgeline.llm import LLM

FAILED, USAGE, INTERRUPTED = 1, 2, 130

app = typer.Typer(
    help="Lossless speculative decoding: language models, faster, saying the same.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

_MODEL, _DRAFTS, _SAMPLING, _ENDING = "Model", "Speculation", "Sampling", "Ending"
_DATA, _LEARNING = "Data", "Training"


def _option(help: str, panel: str, **rest: Any) -> Any:
    return typer.Option(help=help, rich_help_panel=panel, **rest)


Model = Annotated[
    str | None,
    _option(
        "Hugging Face id, folder of safetensors, or GGUF file.",
        _MODEL,
        show_default="SmolLM2-135M-Instruct, fetched once",
    ),
]
Dtype = Annotated[
    str, _option("auto (a GGUF file as it is), bfloat16, float16 or float32.", _MODEL)
]
Quantize = Annotated[str | None, _option("int8 or int4: round the weights.", _MODEL)]
Device = Annotated[str, _option("auto, cpu, cuda, ...", _MODEL)]
Threads = Annotated[int | None, _option("CPU threads.", _MODEL, show_default="torch's choice")]
DrafterSpec = Annotated[
    str, _option("NAME or NAME:ARGUMENT; `ridgeline info` lists the names.", _DRAFTS)
]
Depth = Annotated[int | None, _option("Longest path of drafted tokens.", _DRAFTS, show_default="5")]
Nodes = Annotated[
    int | None,
    _option("Drafted tokens per text and step.", _DRAFTS, show_default="as many as the depth"),
]


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
        int | None, _option("Texts generated at once.", _MODEL, show_default="32")
    ] = None,
    kv_tokens: Annotated[
        int | None,
        _option("Capacity of the cache.", _MODEL, show_default="from free memory"),
    ] = None,
    drafter: DrafterSpec = "auto",
    draft_dtype: Annotated[
        str,
        _option("Of the drafter's weights; auto: a GGUF file's own, else the target's.", _DRAFTS),
    ] = "auto",
    draft_quantize: Annotated[
        str | None,
        _option(
            "int8, int4 or none: round the drafter's weights.",
            _DRAFTS,
            show_default="int4 where they run natively",
        ),
    ] = None,
    depth: Depth = None,
    confidence: Annotated[
        float | None,
        _option(
            "End a draft that is less likely than this to be accepted; 0: never.",
            _DRAFTS,
            show_default="0.5",
        ),
    ] = None,
    nodes: Nodes = None,
    verify: Annotated[
        str | None,
        _option("Rule: match, rejection or block.", _DRAFTS, show_default="match"),
    ] = None,
    temperature: Annotated[
        float, _option("0 takes the most probable token.", _SAMPLING)
    ] = SamplingParams.temperature,
    top_k: Annotated[int, _option("Keep the k most probable; 0: all.", _SAMPLING)] = (
        SamplingParams.top_k
    ),
    top_p: Annotated[float, _option("Keep this probability mass.", _SAMPLING)] = (
        SamplingParams.top_p
    ),
    min_p: Annotated[
        float, _option("Keep tokens of this share of the largest probability.", _SAMPLING)
    ] = SamplingParams.min_p,
    repetition_penalty: Annotated[
        float, _option("Divides the logits of tokens that occurred.", _SAMPLING)
    ] = SamplingParams.repetition_penalty,
    frequency_penalty: Annotated[
        float, _option("Subtracted per occurrence in the output.", _SAMPLING)
    ] = SamplingParams.frequency_penalty,
    presence_penalty: Annotated[
        float, _option("Subtracted once from what occurred in the output.", _SAMPLING)
    ] = SamplingParams.presence_penalty,
    logit_bias: Annotated[
        list[str] | None, _option("ID=BIAS, added to a token's logit; repeatable.", _SAMPLING)
    ] = None,
    bad_words: Annotated[
        list[str] | None, _option("Text that must not be written; repeatable.", _SAMPLING)
    ] = None,
    seed: Annotated[
        int | None, _option("The same seed gives the same text.", _SAMPLING, show_default="random")
    ] = SamplingParams.seed,
    n: Annotated[int, _option("Samples per prompt.", _SAMPLING)] = SamplingParams.n,
    logprobs: Annotated[
        int | None,
        _option("With --json: log-probabilities, and the N largest beside.", _SAMPLING),
    ] = SamplingParams.logprobs,
    max_tokens: Annotated[int, _option("Longest text.", _ENDING)] = SamplingParams.max_tokens,
    min_tokens: Annotated[int, _option("Shortest text.", _ENDING)] = SamplingParams.min_tokens,
    stop: Annotated[
        list[str] | None, _option("Text that ends the output; repeatable.", _ENDING)
    ] = None,
    stop_token_ids: Annotated[
        list[int] | None, _option("Token id that ends the output; repeatable.", _ENDING)
    ] = None,
    ignore_eos: Annotated[
        bool, _option("The model's own end tokens do not end the text.", _ENDING)
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
    depth: Annotated[int, _option("Longest path of drafted tokens.", _DRAFTS)] = 4,
    nodes: Nodes = None,
    max_tokens: Annotated[int, _option("Longest text.", _ENDING)] = 300,
    svg: Annotated[
        Path | None, typer.Option(help="Also save what was shown, as a picture.")
    ] = None,
) -> None:
    """Write one text plainly and once more with drafts, and compare."""
    from rich.console import Console

    from ridgeline.demo import run

    if svg is not None:
        _check_writable(svg)
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


@app.command()
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
        _option("Text, code, a folder of them, or FILE.jsonl of messages; repeatable.", _DATA),
    ] = None,
    distill: Annotated[
        str | None,
        _option("Prompts that the model answers itself: a file, or `default`.", _DATA),
    ] = None,
    answers: Annotated[int, _option("Answers to each prompt.", _DATA)] = 3,
    answer_tokens: Annotated[int, _option("Longest answer.", _DATA)] = 256,
    cache_gb: Annotated[float, _option("Room for hidden states on disk.", _DATA)] = 20.0,
    steps: Annotated[int, _option("Positions ahead to train on.", _LEARNING)] = 5,
    draft_vocab: Annotated[int, _option("Most frequent ids, to draft from.", _LEARNING)] = 8192,
    intermediate: Annotated[
        int | None, _option("Width of the MLP.", _LEARNING, show_default="8/3 of the hidden size")
    ] = None,
    epochs: Annotated[int, _option("Passes over the data.", _LEARNING)] = 8,
    learning_rate: Annotated[float, _option("Highest learning rate.", _LEARNING)] = 1e-3,
    minutes: Annotated[
        float | None, _option("Stop training after so long.", _LEARNING, show_default="never")
    ] = None,
    seed: Annotated[int, _option("Of data, weights and order.", _LEARNING)] = 0,
    compact: Annotated[
        bool, typer.Option("--compact", help="Leave out the LM head, which is the model's own.")
    ] = False,
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
        distill=distill,
        answers=answers,
        answer_tokens=answer_tokens,
        steps=steps,
        draft_vocab=draft_vocab,
        intermediate=intermediate,
        cache_gb=cache_gb,
        compact=compact,
    )
    options = TrainOptions(epochs=epochs, learning_rate=learning_rate, minutes=minutes, seed=seed)
    run_training(load_llm(model, dtype=dtype, device=device, threads=threads), job, options)


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


def _check_writable(file: Path) -> None:
    """Refuses a file that could not be written later, when the work is done."""
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"cannot write the picture {file}; give a file in a folder of yours")


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
