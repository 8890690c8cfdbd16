"""The file of a benchmark: written after each finished run, so that what was interrupted goes on.

One file holds runs that can be compared: the same model, prompts, length, rounds and machine. The
same command adds to it what is still missing; one with other drafters or options of theirs adds
rows.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ridgeline.bench.measure import Contender, Load
from ridgeline.bench.published import SOURCES, published
from ridgeline.draft.auto import AUTO
from ridgeline.draft.base import spec_parts
from ridgeline.draft.heads import head_for
from ridgeline.errors import ConfigError
from ridgeline.model.load import LoadedModel
from ridgeline.provenance import portable

FORMAT = "ridgeline bench 2"
LONGEST = 60
_OF_A_RUN = {"options", "memory", "texts", "identical", "drafted", "speed_up", "kinds"}


class Record:
    """The finished runs, and what they have in common."""

    def __init__(self, path: Path | None, common: dict[str, Any]) -> None:
        """Reads the file, where there is one already.

        Raises:
            ConfigError: it is something else, or its runs were made with other arguments.
        """
        self._path = path
        self.common = common
        self.runs: list[dict[str, Any]] = []
        if path is not None and path.exists():
            self.runs = _read(path, common)

    def holds(self, contender: Contender, load: Load) -> bool:
        """Whether a run of these options and weights is finished."""
        wanted = key(contender, load)
        return any(run["options"] == wanted for run in self.runs)

    def add(self, run: dict[str, Any]) -> None:
        """Adds a finished run and writes the file.

        Raises:
            ConfigError: it cannot be written.
        """
        self.runs.append(run)
        if self._path is None:
            return
        report = {
            "format": FORMAT,
            **self.common,
            "runs": self.runs,
            "published": {"sources": SOURCES, "rows": [asdict(row) for row in published()]},
        }
        part = self._path.with_name(self._path.name + ".part")
        try:
            part.write_text(json.dumps(report, indent=2) + "\n")
            os.replace(part, self._path)  # whole or not at all
        except OSError as error:
            raise ConfigError(f"cannot write {self._path}: {error.strerror}") from None


def key(contender: Contender, load: Load) -> dict[str, Any]:
    """What tells one run of a file from another."""
    return {name: portable(value) for name, value in (asdict(contender) | asdict(load)).items()}


def digest(drafter: str, target: LoadedModel) -> str:
    """Of the files that a drafter is read from, named or known; empty if there are none.

    Folders of the same name are told apart by it, and weights from those they replaced. In a
    folder those that lie in it directly count: training keeps others below.
    """
    found = hashlib.sha256()
    files = [file for path in _paths(drafter, target) for file in (path, *sorted(path.glob("*")))]
    files = [file for file in files if file.is_file()]
    for file in files:
        with file.open("rb") as content:
            found.update(hashlib.file_digest(content, "sha256").digest())
    return found.hexdigest()[:12] if files else ""


def _paths(drafter: str, target: LoadedModel) -> list[Path]:
    parts = spec_parts(drafter)
    if len(parts) > 1:
        return [path for part in parts for path in _paths(part, target)]
    name, _, argument = drafter.partition(":")
    if argument:
        return [Path(argument)]
    head = head_for(target, None if name == AUTO else name)
    return [head.path] if head else []


def _read(path: Path, common: dict[str, Any]) -> list[dict[str, Any]]:
    try:
        found = json.loads(path.read_text())
        if found["format"] != FORMAT:
            raise ValueError
        runs: list[dict[str, Any]] = found["runs"]
        if not all(run.keys() >= _OF_A_RUN for run in runs):
            raise ValueError
        there = {part: dict(found.get(part, {})) for part in common}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ConfigError(
            f"{path} holds no results of this command; give --json another file"
        ) from None
    for part, values in json.loads(json.dumps(common)).items():
        for name, value in values.items():
            if there[part].get(name) != value:
                old = _short(there[part].get(name))
                raise ConfigError(
                    f"{path} holds runs with {name} {old}, now it is {_short(value)}; "
                    "give --json another file"
                )
    return runs


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
