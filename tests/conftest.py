"""Checks that hold in every test: the cache's invariants after every step of every engine."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.engine import Engine, Progress
from tests.extension import KERNELS, native

# Tiny tensors gain nothing from a second thread, and lose much where tests share the cores.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _checked_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Engine.step

    def checked(engine: Engine) -> list[Progress]:
        progress = step(engine)
        scheduler = engine.scheduler
        sequences = scheduler.waiting + scheduler.running
        engine.pool.check([sequence.table for sequence in sequences])
        for sequence in sequences:
            assert 0 <= sequence.kv_len < len(sequence.tokens)
            assert sequence.table.capacity >= sequence.kv_len
        return progress

    monkeypatch.setattr(Engine, "step", checked)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def benchmark_named(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a program of benchmarks/, which are no package."""

    def load(name: str) -> Any:
        monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        return importlib.import_module(name)

    return load


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set in turn, on two threads."""
    native.choose_kernels(request.param)
    native.set_threads(2)
    yield request.param
    native.choose_kernels(KERNELS[0])
    native.set_threads(1)
