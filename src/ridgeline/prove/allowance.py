"""How much a part of the proof may do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Allowance:
    """A number of rounds, a time, or whichever ends first."""

    rounds: int | None = None
    seconds: float | None = None

    def spend(self) -> Iterator[int]:
        """Numbers of rounds, from 0: one at least, none begun when the time is over."""
        end = float("inf") if self.seconds is None else time.monotonic() + self.seconds
        number = 0
        while number == 0 or (number != self.rounds and time.monotonic() < end):
            yield number
            number += 1
