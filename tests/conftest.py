"""Checks that hold in every test: the cache's invariants after every step of every engine."""

from __future__ import annotations

from collections.abc import Iterator

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


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set in turn, on two threads."""
    native.choose_kernels(request.param)
    native.set_threads(2)
    yield request.param
    native.choose_kernels(KERNELS[0])
    native.set_threads(1)
