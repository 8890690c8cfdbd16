"""Everything that a continued training run needs, and what it must share with the one before."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.errors import ConfigError, reason

CHECKPOINT = "checkpoint.pt"
REMEDY = "use another --out folder, or delete the file to begin anew"
DATA = "data"
"""Key of the data's fingerprint, which is not known from the start."""

_OWN = ("step", "seconds", "since_best", "best", "figures")


class RunState:
    """Network, optimiser and schedule, with how far they are and the best network so far."""

    def __init__(
        self,
        network: nn.Module,
        optimiser: Any,
        schedule: Any,
        file: Path,
        about: Mapping[str, Any],
    ) -> None:
        """`about` is what the result depends on: option (or what else) and value."""
        self._parts: dict[str, Any] = {
            "network": network,
            "optimiser": optimiser,
            "schedule": schedule,
        }
        self._file, self._about = file, dict(about)
        self.step, self.seconds, self.since_best = 0, 0.0, 0
        self.best: dict[str, Tensor] | None = None
        self.figures: dict[str, Any] = {}

    def record(self, figures: dict[str, Any]) -> None:
        """Keeps the network if it is the best so far."""
        if not self.figures or figures["tokens_per_step"] > self.figures["tokens_per_step"]:
            network = self._parts["network"]
            self.best = {name: t.detach().clone() for name, t in network.state_dict().items()}
            self.figures, self.since_best = figures, 0
        else:
            self.since_best += 1

    def save(self) -> None:
        """Writes everything to the file, whole or not at all."""
        kept = {"about": self._about, "own": {name: getattr(self, name) for name in _OWN}}
        temporary = self._file.with_suffix(".part")
        torch.save(kept | {n: p.state_dict() for n, p in self._parts.items()}, temporary)
        temporary.replace(self._file)

    def load(self) -> None:
        """Goes on from the file, if there is one.

        Raises:
            ConfigError: it is damaged, or of another run.
        """
        kept = check_checkpoint(self._file, self._about)
        if kept is None:
            return
        try:
            for name, part in self._parts.items():
                part.load_state_dict(kept[name])
            for name in _OWN:
                setattr(self, name, kept["own"][name])
        except Exception as error:  # whatever damage leads to
            raise _damaged(self._file, error) from None


def check_checkpoint(file: Path, about: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a checkpoint holds; None where there is none.

    Raises:
        ConfigError: it is damaged, or of a run that differs in what `about` says.
    """
    if not file.is_file():
        return None
    try:
        kept: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        before = dict(kept["about"])
    except Exception as error:  # whatever damage leads to
        raise _damaged(file, error) from None
    for name, value in about.items():
        if before.get(name) != value:
            shown = "other data" if name == DATA else f"{name} {before.get(name)}, not {value}"
            raise ConfigError(f"{file} holds a run with {shown}; {REMEDY}")
    return kept


def _damaged(file: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{file} is damaged or of another version ({type(error).__name__}: {reason(error):.80}); "
        f"{REMEDY}"
    )
