"""What a user gives to train on: prompts, text, code and conversations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ridgeline.errors import ConfigError, RequestError
from ridgeline.model.load import LoadedModel
from ridgeline.requests_file import checked_messages
from ridgeline.train.files import objects, read_text, text_lines
from ridgeline.train.store import Text

SHORTEST = 8
"""Texts with no more written tokens than this are left out."""


def read_prompts(file: Path) -> list[str]:
    """A prompt a line, or `{"prompt": ...}` a line of a .jsonl file.

    Raises:
        ConfigError: the file cannot be read, holds none, or a line of it has none.
    """
    if file.suffix == ".jsonl":
        prompts = []
        for number, line in objects(file):
            if not isinstance(line.get("prompt"), str):
                raise ConfigError(
                    f'{file}, line {number}: no prompt; it must be like {{"prompt": "Say hello"}}'
                )
            prompts.append(line["prompt"])
    else:
        prompts = [line for _, line in text_lines(file)]
    if not prompts:
        raise ConfigError(f"{file} holds no prompts; it must have one a line")
    return prompts


def read_texts(files: Sequence[Path], target: LoadedModel, length: int) -> list[Text]:
    """Plain text and code, cut into pieces; conversations ({"messages": [...]}) of .jsonl files.

    Files of a folder that are no text are left out, and counted on the terminal.

    Raises:
        ConfigError: a file cannot be read, or a line of it cannot be used.
    """
    texts: list[Text] = []
    for given in files:
        inside = sorted(f for f in given.rglob("*") if f.is_file()) if given.is_dir() else [given]
        left_out = [file for file in inside if given.is_dir() and _is_binary(file)]
        if left_out:
            Console().print(
                f"{len(left_out)} of {len(inside)} files in {given} are not UTF-8 text and are "
                f"left out, such as {left_out[0].name}"
            )
        skipped = set(left_out)
        for file in inside:
            if file not in skipped:
                texts += _texts(file, target, length)
    return [text for text in texts if text.written > SHORTEST]


def _is_binary(file: Path) -> bool:
    try:
        file.read_bytes().decode()
    except UnicodeDecodeError:
        return True
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    return False


def _texts(file: Path, target: LoadedModel, length: int) -> list[Text]:
    texts = []
    if file.suffix == ".jsonl":
        for number, line in objects(file):
            try:
                texts.append(_conversation(line, target))
            except RequestError as error:
                raise ConfigError(f"{file}, line {number}: {error}") from None
        return texts
    try:
        tokens = target.encode_text(read_text(file))
    except RequestError as error:
        raise ConfigError(f"{file}: {error}") from None
    pieces = (tokens[i : i + length] for i in range(0, len(tokens), length))
    return [Text(piece, len(piece)) for piece in pieces]


def _conversation(line: dict[str, Any], target: LoadedModel) -> Text:
    if "messages" not in line:
        if not isinstance(line.get("text"), str):
            raise RequestError("it must have either `text`, a string, or `messages`")
        tokens = target.encode_text(line["text"])
        return Text(tokens, len(tokens))
    *before, last = checked_messages(line["messages"])
    prompt = target.encode_chat(before)
    answer = target.encode_text(last["content"])
    return Text([*prompt, *answer], len(answer))
