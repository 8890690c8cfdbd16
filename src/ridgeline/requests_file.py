"""Prompt files: a prompt a line, or JSON Lines whose objects bring parameters of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ridgeline.core.params import SamplingParams
from ridgeline.errors import ConfigError, RequestError

Messages = list[dict[str, str]]

MOST_DIGITS = 20
"""Of a token id: Python refuses to read numbers of thousands of them."""

PROMPT_KEYS = ("prompt", "messages")
KIND = "kind"
"""A name for what a prompt asks for, which a benchmark reports by."""
PARAM_KEYS = tuple(field.name for field in fields(SamplingParams))


@dataclass(frozen=True)
class Job:
    """One prompt to run."""

    prompt: str | Messages
    params: SamplingParams
    bad_words: tuple[str, ...] = ()
    """as text: the model that turns them into token ids is loaded later"""
    line: int | None = None
    """of the file; None for a prompt of the command line"""
    kind: str | None = None
    """what it asks for, where the file says so"""


def read_jobs(
    path: Path, params: SamplingParams, bad_words: Sequence[str] = ()
) -> tuple[list[Job], list[str]]:
    """Reads a prompt file; `params` and `bad_words` hold wherever a line does not set them.

    A file named *.jsonl has an object a line: `prompt` (text) or `messages` (role and content),
    perhaps a `kind`, and any field of SamplingParams, where `bad_words` are strings. Blank lines
    are skipped.

    Returns:
        The jobs, and one message for each broken line, naming it.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the prompt file {path}: {error.strerror}") from None
    base = Job("", params, tuple(bad_words))
    jobs, broken = [], []
    # Split at newlines alone: str.splitlines would also split at characters within JSON strings.
    for number, raw in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not raw.strip():
            continue
        job = replace(base, line=number)
        try:
            text = raw.decode().rstrip("\r")
            if path.suffix == ".jsonl":
                jobs.append(_from_json(text, job))
            else:
                jobs.append(replace(job, prompt=text))
        except UnicodeDecodeError:
            broken.append(f"{path}, line {number}: not UTF-8 text")
        except RequestError as error:
            broken.append(f"{path}, line {number}: {error}")
    return jobs, broken


def _from_json(text: str, job: Job) -> Job:
    """`job` with what one line of JSON sets."""
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(
            f"not valid JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise RequestError('not a JSON object, such as {"prompt": "Once upon a time"}')
    known = (*PROMPT_KEYS, KIND, *PARAM_KEYS)
    unknown = given.keys() - {*known}
    if unknown:
        raise RequestError(f"unknown key {min(unknown)!r}; the keys are {', '.join(known)}")
    kind = given.pop(KIND, None)
    if not isinstance(kind, str | None):
        raise RequestError(f"kind is {kind!r}; it must be a string")
    if sum(key in given for key in PROMPT_KEYS) != 1:
        raise RequestError("it must have either `prompt` or `messages`")
    words = given.pop("bad_words", job.bad_words)
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        raise RequestError(f"bad_words is {words!r}; it must be a list of strings")
    prompt = checked_messages(given["messages"]) if "messages" in given else given["prompt"]
    if "prompt" in given and not isinstance(prompt, str):
        raise RequestError(f"prompt is {prompt!r}; it must be a string")
    changes: dict[str, Any] = {key: given[key] for key in given if key not in PROMPT_KEYS}
    if isinstance(changes.get("logit_bias"), Mapping):
        changes["logit_bias"] = {
            int(token) if token.isdecimal() and len(token) < MOST_DIGITS else token: bias
            for token, bias in changes["logit_bias"].items()
        }
    return replace(
        job,
        prompt=prompt,
        params=replace(job.params, **changes),
        bad_words=tuple(words),
        kind=kind,
    )


def checked_messages(value: object) -> Messages:
    """A conversation as JSON gave it.

    Raises:
        RequestError: it is not a list of objects with the strings role and content.
    """
    if (
        not isinstance(value, list)
        or not value
        or not all(
            isinstance(message, dict)
            and all(isinstance(message.get(key), str) for key in ("role", "content"))
            for message in value
        )
    ):
        raise RequestError("messages must be a list of objects with the strings role and content")
    return value
