"""A draft head's folder, or a repository of the hub, as it was found: configuration and tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ridgeline.draft.int8 import restored
from ridgeline.errors import ModelLoadError, reason
from ridgeline.model import hub

FILES = ("*.json", *hub.WEIGHTS, "*.bin", "*.pt")


@dataclass(frozen=True)
class HeadFiles:
    """A head's folder as it was found."""

    path: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]


def read_files(
    path: str, wanted: Callable[[Collection[str]], Collection[str]] | None = None
) -> HeadFiles:
    """Reads a folder, or a repository of the hub: config.json and one file of tensors, or several.

    Args:
        path: the folder or the repository's name.
        wanted: chooses, of the names of all tensors, those to read out of a whole model's; None:
            all of them.

    Raises:
        ModelLoadError: it is neither, or a file is missing or damaged.
    """
    try:
        folder = Path(path).expanduser()
        is_folder, exists = folder.is_dir(), folder.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, or an unknown user's home
        raise ModelLoadError(f"{path!r:.200} is no path of a head: {reason(error)}") from None
    if not is_folder:
        if exists or path.startswith(("/", ".", "~")) or path.count("/") != 1:
            raise ModelLoadError(f"{path!r} is no folder with a draft head, nor a name on the hub")
        folder = hub.download(path, ("*.json", *hub.WEIGHTS) if wanted else FILES)
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path} holds no config.json, so it is not a draft head") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}/config.json cannot be read: {reason(error)}") from error
    if not isinstance(config, dict):
        raise ModelLoadError(f"{path}/config.json holds no object")
    files = sorted(folder.glob("*.safetensors")) or sorted(
        file for pattern in ("*.bin", "*.pt") for file in folder.glob(pattern)
    )
    if not files:
        raise ModelLoadError(f"{path} holds no weights (*.safetensors, *.bin or *.pt)")
    held: dict[str, Callable[[], Tensor]] = {}
    with ExitStack() as opened:
        for file in files:
            with _one_line(file):
                held |= _tensors(file, opened)
        with _one_line(folder):
            tensors = {name: held[name]() for name in (wanted(held) if wanted else held)}
    if not all(isinstance(t, Tensor) and t.layout is torch.strided for t in tensors.values()):
        raise ModelLoadError(f"{path} holds something else than dense tensors")
    return HeadFiles(path, config, restored(tensors, path))


def _tensors(file: Path, opened: ExitStack) -> dict[str, Callable[[], Tensor]]:
    """How to read each tensor of a file; `opened` keeps it open."""
    if file.suffix == ".safetensors":
        content = opened.enter_context(safe_open(file, "pt"))
        return {name: partial(content.get_tensor, name) for name in content.keys()}  # noqa: SIM118
    read = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(read, dict) or not all(isinstance(name, str) for name in read):
        raise TypeError("it holds no tensors by name")
    return {name: partial(read.__getitem__, name) for name in read}


@contextmanager
def _one_line(file: Path) -> Iterator[None]:
    """Whatever a damaged or hostile file makes of the readers, as one line."""
    try:
        yield
    except Exception as error:
        raise ModelLoadError(f"{file} cannot be read: {reason(error)}") from error
