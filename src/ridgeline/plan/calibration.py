"""A machine's figures as they are kept in the cache folder, and checked when read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ridgeline.info import processor
from ridgeline.model.cache import cache_errors, cache_folder, staging_folder
from ridgeline.model.linear import native_kernels

FORMAT = 1
"""Of the kept files: raised when what is measured changes."""
_FASTEST, _LONGEST = 1e18, 3600.0
"""Bytes/s and seconds that no machine comes near."""
_MOST_ROWS = 1 << 20


@dataclass(frozen=True)
class KindRates:
    """What rows cost with weights of one number format."""

    rows: tuple[int, ...]
    layer: tuple[float, ...]
    """seconds of a layer whatever its size, for each number of rows"""
    weight: tuple[float, ...]
    """seconds of a weight, likewise"""

    @property
    def flops(self) -> float:
        """Highest matrix rate seen, FLOP/s."""
        pairs = zip(self.rows, self.weight, strict=True)
        return max((2 * rows / seconds for rows, seconds in pairs if seconds), default=0.0)


@dataclass
class Calibration:
    """A machine's figures. `kinds` grows as number formats are asked for."""

    machine: dict[str, Any]
    bandwidth: float = 0.0
    """bytes/s read from memory"""
    key: float = 0.0
    """seconds to read one number of the cache, for a sequence"""
    pair: float = 0.0
    """seconds of one dimension of one query head, for a row and a cached token"""
    step: float = 0.0
    """seconds of a step outside of the forward pass"""
    sequence: float = 0.0
    """seconds that each further sequence adds to that"""
    kinds: dict[str, KindRates] = field(default_factory=dict)


def machine_of(device: torch.device, native: bool) -> dict[str, Any]:
    """What figures depend on; `native`: whether on the native decoder."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "processor": processor()[0],
        "threads": torch.get_num_threads(),
        "kernels": native_kernels(),
        "gpu": gpu,
        "path": "native" if native else "torch",
        "format": FORMAT,
        "ridgeline": version("ridgeline"),
        "torch": torch.__version__,
    }


def read_calibration(machine: dict[str, Any]) -> Calibration | None:
    """What is kept of a machine; None where nothing is, or where it is damaged.

    Raises:
        ModelLoadError: the cache folder cannot be read.
    """
    file = _file(machine)
    with cache_errors("reading the calibration", file.parent):
        if not file.is_file():
            return None
        content = file.read_bytes()
    try:
        found = json.loads(content)
        kinds = {
            kind: KindRates(**{name: tuple(values) for name, values in rates.items()})
            for kind, rates in found.pop("kinds").items()
        }
        calibration = Calibration(**found, kinds=kinds)
        return calibration if calibration.machine == machine and _sound(calibration) else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _sound(found: Calibration) -> bool:
    """Whether measuring can have given these figures.

    Raises:
        TypeError: one is no number.
    """
    times = (found.key, found.pair, found.step, found.sequence)
    rows = [rates.rows for rates in found.kinds.values()]
    return (
        0 < found.bandwidth < _FASTEST
        and all(0 <= time < _LONGEST for time in times)
        and all(each == rows[0] for each in rows)
        and all(map(_sound_rates, found.kinds.values()))
    )


def _sound_rates(rates: KindRates) -> bool:
    """Neither cost ever falls, and a weight costs something in the end."""
    same = len(rates.rows) == len(rates.layer) == len(rates.weight) > 0
    ascending = all(type(a) is int and a < b for a, b in pairwise((0, *rates.rows, _MOST_ROWS)))
    layer, weight = ((0, *costs) for costs in (rates.layer, rates.weight))
    rising = all(a <= b < _LONGEST for costs in (layer, weight) for a, b in pairwise(costs))
    return same and ascending and rising and weight[-1] > 0


@contextmanager
def calibration_writer() -> Iterator[Callable[[Calibration], None]]:
    """What keeps a calibration, ready before there is one.

    Raises:
        ModelLoadError: the cache folder cannot be written.
    """
    with staging_folder(_folder() / "any", 0, "calibrating") as staging:

        def write(calibration: Calibration) -> None:
            file = _file(calibration.machine)
            (staging / file.name).write_text(json.dumps(asdict(calibration), indent=1))
            os.replace(staging / file.name, file)

        yield write


def _file(machine: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:16]
    return _folder() / f"{digest}.json"


def _folder() -> Path:
    return cache_folder() / "calibration"
