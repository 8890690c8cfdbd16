"""The files of training: read with errors that name them, written whole or not at all."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ridgeline.errors import ConfigError, reason


def check_writable(folder: Path) -> None:
    """Makes the folder where it is missing.

    Raises:
        ConfigError: files cannot be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = "it is a file" if folder.is_file() else error.strerror
        raise ConfigError(f"cannot write to the folder {folder}: {why}") from None


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Writes an object, whole or not at all."""
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(value) + "\n", "utf-8")
    part.replace(file)


def read_json(file: Path, remedy: str) -> dict[str, Any] | None:
    """The object in a file of ours; None where there is no file.

    Raises:
        ConfigError: it is damaged; the message ends with the remedy.
    """
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is damaged ({reason(error)}); {remedy}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file} is damaged; {remedy}")
    return value


def text_lines(file: Path) -> Iterator[tuple[int, str]]:
    """The lines of a user's file that are not blank, with their numbers.

    Raises:
        ConfigError: the file cannot be read, or is not UTF-8 text.
    """
    # Split at newlines alone: str.splitlines would also split at characters within JSON strings.
    for number, line in enumerate(read_text(file).split("\n"), start=1):
        if line.strip():
            yield number, line.rstrip("\r")


def read_text(file: Path) -> str:
    """A user's file, without its byte order mark.

    Raises:
        ConfigError: the file cannot be read, or is not UTF-8 text.
    """
    try:
        return file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text: {reason(error)}") from None


def objects(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a user's JSON Lines file, with the numbers of their lines.

    Raises:
        ConfigError: the file cannot be read, or a line of it is no object.
    """
    for number, line in text_lines(file):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{file}, line {number}: not valid JSON: {reason(error)}") from None
        if not isinstance(value, dict):
            raise ConfigError(f"{file}, line {number}: not a JSON object")
        yield number, value
