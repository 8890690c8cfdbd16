"""Checks that hold in every test: the cache's invariants after every step of every engine."""

from __future__ import annotations

import pytest
import torch

from ridgeline.engine import Engine, Progress

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
