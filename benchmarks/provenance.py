"""What a benchmark's figures were measured on and with, to be kept beside them."""

import platform
import subprocess
from argparse import Namespace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from ridgeline.info import processor

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("ridgeline", "torch", "transformers", "numpy")


def provenance(args: Namespace) -> dict[str, Any]:
    """Arguments, commit, versions and machine, ready for JSON.

    `commit` is None outside a git checkout, `modified` tells whether tracked files differ from it.
    Paths are relative to the checkout, or a name alone when they are outside it.
    """
    name, features = processor()
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "arguments": {key: _portable(value) for key, value in vars(args).items()},
        "commit": _git("rev-parse", "--verify", "--quiet", "HEAD") or None,
        "modified": bool(_git("status", "--porcelain", "--untracked-files=no")),
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


def _portable(value: Any) -> Any:
    if isinstance(value, Path):
        path = value.resolve()
        return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
    if isinstance(value, (list, tuple)):
        return [_portable(item) for item in value]
    if isinstance(value, str):  # a path too, or a drafter's name and one: model:PATH
        name, colon, path = value.rpartition(":")
        return name + colon + _portable(Path(path)) if Path(path).is_absolute() else value
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
