"""What a model answers to many requests, in a file that grows group by group.

`FILE.jsonl` has an answer a line, with the request's tokens before it; `FILE.json` beside it says
with which options they were written. A file is only ever continued: where it holds anything else
than the first of what is asked for, nothing is changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from ridgeline.core.sampling import SamplingParams
from ridgeline.errors import ConfigError
from ridgeline.llm import LLM
from ridgeline.train.files import read_json, write_json

GROUP = 256
"""Requests that are answered before their texts are written down."""
REMEDY = "use another --work folder, or delete the file"


def answered(
    llm: LLM,
    jobs: Sequence[tuple[list[int], SamplingParams]],
    file: Path,
    options: Mapping[str, Any],
    title: str,
) -> Iterator[list[dict[str, Any]]]:
    """The answers: first those that the file holds already, then a group at a time.

    Args:
        llm: who answers.
        jobs: the requests. The file may hold answers to more, or to the first of them.
        file: JSON Lines; an unfinished last line is written anew.
        options: what else the answers depend on.
        title: of the progress bar.

    Raises:
        ConfigError: the file is damaged, or holds answers to other requests.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    about, begun = file.with_suffix(".json"), file.is_file() and file.stat().st_size > 0
    if begun:
        _check_options(file, options)
    lines, whole = _held(file, jobs)
    if begun and not about.is_file():
        Console().print(f"{file} does not say how it was written; taken as written like this")
    write_json(about, options)
    yield lines
    if len(lines) == len(jobs):
        return
    with Progress() as progress, file.open("ab") as sink:
        sink.truncate(whole)
        bar = progress.add_task(title, total=len(jobs), completed=len(lines))
        for first in range(len(lines), len(jobs), GROUP):
            prompts, params = zip(*jobs[first : first + GROUP], strict=True)
            group = []
            for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
                ids = output.token_ids
                group.append({"tokens": [*prompt, *ids], "written": len(ids), "text": output.text})
            sink.write("".join(json.dumps(line) + "\n" for line in group).encode())
            sink.flush()
            progress.advance(bar, len(group))
            yield group


def _held(
    file: Path, jobs: Sequence[tuple[list[int], SamplingParams]]
) -> tuple[list[dict[str, Any]], int]:
    """The answers to the first requests, and the bytes that they take."""
    raw = file.read_bytes().splitlines(keepends=True) if file.is_file() else []
    lines, whole = list[dict[str, Any]](), 0
    for number, (line, (prompt, _)) in enumerate(zip(raw, jobs, strict=False), start=1):
        value = _answer(line)
        if value is None and number == len(raw):  # what an interruption left
            break
        if value is None:
            raise ConfigError(f"{file}, line {number}, is damaged; {REMEDY}")
        if value["tokens"][: -value["written"]] != prompt:
            raise ConfigError(
                f"{file} holds answers to other prompts from line {number} on; new prompts may "
                f"only be added at the end, with --answers 1. For others, {REMEDY}"
            )
        lines.append(value)
        whole += len(line)
    return lines, whole


def _answer(line: bytes) -> dict[str, Any] | None:
    """What a whole line holds; None if it is broken."""
    try:
        value = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    fits = (
        isinstance(value, dict)
        and isinstance(value.get("text"), str)
        and isinstance(value.get("tokens"), list)
        and all(type(token) is int for token in value["tokens"])
        and type(value.get("written")) is int
        and 0 < value["written"] < len(value["tokens"])
    )
    return value if fits else None


def _check_options(file: Path, options: Mapping[str, Any]) -> None:
    kept = read_json(file.with_suffix(".json"), REMEDY) or options
    for name, value in options.items():
        if kept.get(name) != value:
            raise ConfigError(
                f"{file} was written with {name} {kept.get(name)}, not {value}; {REMEDY}"
            )
