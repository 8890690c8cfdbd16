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

from ridgeline.errors import ConfigError, ModelLoadError


def cache_folder() -> Path:
    """`RIDGELINE_CACHE`, else the platform's cache folder (`XDG_CACHE_HOME` honoured)/ridgeline.

    Raises:
        ConfigError: it lies in the home folder of nobody.
    """
    if chosen := os.environ.get("RIDGELINE_CACHE"):
        try:
            return Path(chosen).expanduser()
        except RuntimeError:
            raise ConfigError(
                f"RIDGELINE_CACHE is {chosen!r}, and there is no such home folder; give a full path"
            ) from None
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "ridgeline"
    platform = "Library/Caches" if sys.platform == "darwin" else ".cache"
    try:
        return Path.home() / platform / "ridgeline"
    except RuntimeError:
        raise ConfigError("you have no home folder; set RIDGELINE_CACHE to a folder") from None


@contextmanager
def cache_errors(what: str, folder: Path) -> Iterator[None]:
    """Turn what goes wrong with the cache folder within into a ModelLoadError.

    `what` says in it what was going on.
    """
    try:
        yield
    except OSError as error:
        raise ModelLoadError(
            f"{what} failed in the cache folder {folder!s:.200} ({error.strerror or error}); "
            "RIDGELINE_CACHE can name another"
        ) from error


@contextmanager
def staging_folder(target: Path, needed: int, what: str) -> Iterator[Path]:
    """A fresh folder beside `target` (on the same disk), removed at the end whatever happens.

    `needed` bytes must be free; `what` says in a ModelLoadError what was going on when they are
    not, or a file cannot be written. Publish by renaming: no reader ever sees a half-made file.
    """
    staging: Path | None = None
    with cache_errors(what, target.parent):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(target.parent).free
            if free < needed:
                raise ModelLoadError(
                    f"{what} takes {needed / 1e9:.1f} GB in {target.parent}, where "
                    f"{free / 1e9:.1f} GB are free; make room, or set RIDGELINE_CACHE to a folder "
                    "on another disk"
                )
            staging = Path(tempfile.mkdtemp(prefix=".partial-", dir=target.parent))
            yield staging
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
