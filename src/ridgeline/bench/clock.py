"""What a step spends in the target's forward pass and in the drafter, timed from outside."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from ridgeline.core.batch import Batch
from ridgeline.core.tree import DraftProposal
from ridgeline.engine import Engine


class Clock:
    """The times of the present step, in seconds."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.reset()

    def reset(self) -> None:
        """Before a step."""
        self.target = 0.0
        self.drafter = 0.0
        self.decodes = False
        """whether the step read no prompt: every row was a sequence's last token or a draft"""
        self.proposals: Sequence[DraftProposal] = ()

    @property
    def levels(self) -> int:
        """Depth of the deepest tree that was proposed."""
        return max((_depth(proposal) for proposal in self.proposals), default=0)

    def timed(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """What a call returns, and how long it took, the device's work included."""
        self._wait()
        start = time.perf_counter()
        result = call()
        self._wait()
        return result, time.perf_counter() - start

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


def _depth(proposal: DraftProposal) -> int:
    depths: list[int] = []
    for parent in proposal.parents.tolist():
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return max(depths, default=0)


@contextmanager
def clocked(engine: Engine) -> Iterator[Clock]:
    """Times the engine's target and drafter as long as this lasts."""
    clock = Clock(engine.device)
    target, drafter = engine.target, engine.drafter
    forward = target.forward

    def timed_forward(batch: Batch, *rest: Any) -> Any:
        output, clock.target = clock.timed(lambda: forward(batch, *rest))
        clock.decodes = len(batch.keep) == len(batch.tokens)
        return output

    with ExitStack() as patches:
        patches.enter_context(patch.object(target, "forward", timed_forward))
        if drafter is not None:
            propose, observe = drafter.propose, drafter.observe

            def timed_propose(requests: Any) -> Any:
                proposals, seconds = clock.timed(lambda: propose(requests))
                clock.proposals, clock.drafter = proposals, clock.drafter + seconds
                return proposals

            def timed_observe(observations: Any) -> None:
                _, seconds = clock.timed(lambda: observe(observations))
                clock.drafter += seconds

            patches.enter_context(patch.object(drafter, "propose", timed_propose))
            patches.enter_context(patch.object(drafter, "observe", timed_observe))
        yield clock
