"""Draft heads of known models: the user's own, and those that ship with Ridgeline.

A folder of heads holds MODEL/METHOD/ with a head each, MODEL being the model's name in lower case,
without its owner and what says how its weights are quantised. A wrong head could only cost speed;
one that does not fit a model is refused when it is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ridgeline.errors import ConfigError
from ridgeline.model.cache import cache_folder
from ridgeline.model.load import LoadedModel

SHIPPED = Path(__file__).parent.parent / "heads"
METHODS = ("mtp", "eagle3", "eagle", "medusa")
"""Where a model has several heads, the first of these; docs/heads.md has the measurements."""
_QUANTISED = re.compile(r"[-._](i?q\d\w*|[bf]?f16|fp16|f32|gguf)$")


@dataclass(frozen=True)
class KnownHead:
    """A head for one model."""

    model: str
    method: str
    path: Path

    @property
    def spec(self) -> str:
        """What `--drafter` takes."""
        return f"{self.method}:{self.path}"

    @property
    def origin(self) -> str:
        """Where it comes from, for a person."""
        shipped = self.path.is_relative_to(SHIPPED)
        return "ships with Ridgeline" if shipped else f"is in {self.path}"


def known_heads() -> Iterator[KnownHead]:
    """All heads, the user's own (`heads` in the cache folder) before those that ship."""
    for home in (cache_folder() / "heads", SHIPPED):
        for model in sorted(folder for folder in home.glob("*") if folder.is_dir()):
            for method in METHODS:
                if (model / method / "config.json").is_file():
                    yield KnownHead(model.name, method, model / method)


def head_for(target: LoadedModel, method: str | None = None) -> KnownHead | None:
    """The first head for a model, of a method if one is named."""
    name = model_key(target.name)
    fitting = (head for head in known_heads() if head.model == name)
    return next((head for head in fitting if method in (None, head.method)), None)


def head_path(argument: str, method: str, target: LoadedModel, otherwise: str | None = None) -> str:
    """The path of a spec METHOD:PATH, that of the known head for the model, or `otherwise`.

    Raises:
        ConfigError: no path, and no head is known.
    """
    if argument:
        return argument
    head = head_for(target, method)
    path = str(head.path) if head else otherwise
    if path is None:
        raise ConfigError(
            f"no {method} head is known for {target.name}; give the folder of one, {method}:PATH, "
            f"or train one: ridgeline train {method}"
        )
    return path


def model_key(name: str) -> str:
    """The name of a model's folder of heads: `Org/Model-1B.Q4_K_M` is `model-1b`."""
    return _QUANTISED.sub("", name.rstrip("/").rpartition("/")[2].lower())
