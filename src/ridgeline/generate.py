"""The command `generate`: runs prompts and streams their texts, or JSON Lines."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from ridgeline.core.params import SamplingParams
from ridgeline.errors import ConfigError, RequestError
from ridgeline.output import InOrder, json_line, record, report, summary, title
from ridgeline.requests_file import Job, read_jobs

if TYPE_CHECKING:
    from ridgeline.llm import LLM, Completion, Event, Request

OK, FAILED, INTERRUPTED = 0, 1, 130
"""Exit codes: every prompt ran, some could not, Ctrl-C ended the run."""


@dataclass(frozen=True)
class Source:
    """What to run: prompts of the command line, then those of a file."""

    prompts: Sequence[str]
    file: Path | None
    params: SamplingParams
    bad_words: tuple[str, ...]
    chat: bool
    """whether a prompt is a user's message to the model's chat template"""

    def jobs(self) -> tuple[list[Job], list[str]]:
        """The prompts in order, and a message for each broken line of the file."""
        jobs = [Job(prompt, self.params, self.bad_words) for prompt in self.prompts]
        if self.file is None:
            return jobs, []
        lines, broken = read_jobs(self.file, self.params, self.bad_words)
        return jobs + lines, broken

    def request(self, llm: LLM, job: Job) -> Request:
        """Encodes and checks one prompt.

        Raises:
            RequestError: it cannot run.
        """
        params = replace(job.params, bad_words=llm.bad_words(job.bad_words))
        if self.chat and isinstance(job.prompt, str):
            if not job.prompt:
                raise RequestError("the prompt is empty; give at least one character")
            return llm.request([{"role": "user", "content": job.prompt}], params)
        return llm.request(job.prompt, params)


def run(source: Source, load: Callable[[], LLM], as_json: bool) -> int:
    """Runs every prompt that can run; returns the exit code.

    Raises:
        RidgelineError: nothing can run, or a prompt of the command line is wrong.
    """
    jobs, broken = source.jobs()
    if not jobs and not broken:
        raise ConfigError("there is no prompt; give --prompt TEXT or --prompt-file FILE")
    for message in broken:
        report(message)
    if not jobs:
        return FAILED
    llm = load()
    accepted: list[tuple[Job, Request]] = []
    for job in jobs:
        try:
            accepted.append((job, source.request(llm, job)))
        except RequestError as error:
            if job.line is None:
                raise
            broken.append(f"{source.file}, line {job.line}: {error}")
            report(broken[-1])
    if accepted and _run(llm, accepted, as_json):
        return INTERRUPTED
    return FAILED if broken else OK


def _run(llm: LLM, accepted: Sequence[tuple[Job, Request]], as_json: bool) -> bool:
    """Prints what the requests give; returns whether Ctrl-C ended them early."""
    keys = [(i, k) for i, (_, request) in enumerate(accepted) for k in range(request.params.n)]
    out = InOrder(keys, sys.stdout)
    if not as_json and len(keys) > 1:
        for number, (index, sample) in enumerate(keys, start=1):
            prompt = accepted[index][0].prompt
            last = prompt if isinstance(prompt, str) else prompt[-1]["content"]
            out.put((index, sample), title(number, len(keys), last), end=False)
    completions: list[Completion] = []
    started = time.perf_counter()
    with _interruptible(llm) as interrupted, _progress(len(keys)) as advance:
        for event in llm.stream([request for _, request in accepted]):
            if as_json:
                text = _json(event, *accepted[event.index])
            else:
                text = event.text + ("\n" if event.completion else "")
            out.put((event.index, event.sample), text, end=event.completion is not None)
            if event.completion:
                completions.append(event.completion)
                advance()
    if not as_json:
        used = f"; drafter {llm.drafter.name}" if llm.drafter else ""
        print(summary(completions, time.perf_counter() - started) + used, file=sys.stderr)
    return interrupted.is_set()


def _json(event: Event, job: Job, request: Request) -> str:
    """The line of a finished sample; nothing before."""
    if event.completion is None:
        return ""
    place: dict[str, Any] = {} if job.line is None else {"line": job.line}
    if request.params.n > 1:
        place["sample"] = event.sample
    return json_line(place | record(event.completion))


@contextmanager
def _interruptible(llm: LLM) -> Iterator[threading.Event]:
    """Ctrl-C ends the stream after the present step, a second one the program at once."""
    interrupted = threading.Event()

    def handle(*_: object) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()
        llm.interrupt()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar on standard error, where several texts run and none can be seen growing."""
    console = Console(stderr=True)
    unseen = total > 1 and console.is_terminal and not sys.stdout.isatty()
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not unseen, redirect_stdout=False) as bar:
        task = bar.add_task("generating", total=total)
        yield lambda: bar.advance(task)
