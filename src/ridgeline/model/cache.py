"""The user's cache folder: where fetched models and converted weights are kept.

Everything in it can be made again, so the folder may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from ridgeline.errors import ModelLoadError


def cache_folder() -> Path:
    """`RIDGELINE_CACHE`, else the platform's cache folder (`XDG_CACHE_HOME` honoured)/ridgeline."""
    if chosen := os.environ.get("RIDGELINE_CACHE"):
        return Path(chosen).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "ridgeline"
    platform = "Library/Caches" if sys.platform == "darwin" else ".cache"
    return Path.home() / platform / "ridgeline"


@contextmanager
def staging_folder(target: Path, needed: int, what: str) -> Iterator[Path]:
    """A fresh folder beside `target` (on the same disk), removed at the end whatever happens.

    `needed` bytes must be free; `what` says in a ModelLoadError what was going on when they are
    not, or a file cannot be written. Publish by renaming: no reader ever sees a half-made file.
    """
    staging: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if free < needed:
            raise ModelLoadError(
                f"{what} takes {needed / 1e9:.1f} GB in {target.parent}, where {free / 1e9:.1f} GB "
                "are free; make room, or set RIDGELINE_CACHE to a folder on another disk"
            )
        staging = Path(tempfile.mkdtemp(prefix=".partial-", dir=target.parent))
        yield staging
    except OSError as error:
        raise ModelLoadError(
            f"{what} failed in the cache folder {target.parent} ({error.strerror or error}); "
            "RIDGELINE_CACHE can name another"
        ) from error
    finally:
        if staging:
            shutil.rmtree(staging, ignore_errors=True)


def file_sha256(path: Path) -> str:
    """Hex digest of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def byte_progress(description: str, total: int | None) -> Iterator[Progress]:
    """A progress bar on standard error that counts bytes; its one task has id 0.

    Silent where standard error is not a terminal, and gone once it is done.
    """
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        progress.add_task(description, total=total)
        yield progress
