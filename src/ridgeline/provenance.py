"""What a benchmark's figures were measured on and with, to be kept beside them."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from ridgeline.info import processor

ROOT = Path(__file__).resolve().parents[2]
"""The checkout, where this file lies in one."""
PACKAGES = ("ridgeline", "torch", "transformers", "numpy")


def provenance(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments, time, commit and machine, ready for JSON."""
    return {
        **moment(),
        "arguments": {key: portable(value) for key, value in arguments.items()},
        **machine(),
    }


def moment() -> dict[str, Any]:
    """The time and the code.

    `commit` is None outside a git checkout, `modified` tells whether tracked files differ from it.
    """
    # An installed copy may lie in a checkout of something else, which does not know this file.
    ours = bool(_git("ls-files", __file__))
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "--verify", "--quiet", "HEAD") or None if ours else None,
        "modified": ours and bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def machine() -> dict[str, Any]:
    """Versions, processor and memory."""
    name, features = processor()
    return {
        "versions": {
            "python": platform.python_version(),
            **{package: version(package) for package in PACKAGES},
        },
        "system": platform.platform(),
        "processor": name,
        "features": features,
        "cores": psutil.cpu_count(logical=False),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def portable(value: Any) -> Any:
    """Paths relative to the checkout, or a name alone when they are outside it."""
    if isinstance(value, Path):
        path = value.resolve()
        return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
    if isinstance(value, (list, tuple)):
        return [portable(item) for item in value]
    if isinstance(value, str):  # a path too, or a drafter's name and one: model:PATH
        name, colon, rest = value.rpartition(":")
        return name + colon + portable(Path(rest)) if Path(rest).is_absolute() else value
    return value


def _git(*command: str) -> str:
    """Its output; empty when there is no git, no checkout or no commit."""
    try:
        run = subprocess.run(
            ["git", "-C", str(ROOT), *command], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return ""
    return run.stdout.strip()
