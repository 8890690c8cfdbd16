"""A simulated machine and drafter, for the tests of policies: no clock, no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ridgeline.core.params import SamplingParams
from ridgeline.core.sequence import Sequence as TokenSequence
from ridgeline.core.tree import TokenTree
from ridgeline.core.verify import Verification
from ridgeline.kv.blocks import BlockPool
from ridgeline.kv.table import BlockTable
from ridgeline.schedule.cost import Guess
from ridgeline.schedule.goodput import GoodputPolicy
from ridgeline.schedule.policy import Outcome, Policy, Step

DEPTH = 5
GUESS = Guess(10**8, 10**4)
Times = Callable[[int], float]


def bound_by_rows(rows: int) -> float:
    """About SmolLM2 on two cores: 4 rows for the time of one and a half, then in proportion."""
    return 0.005 + 0.0008 * rows


def bound_by_memory(rows: int) -> float:
    """An accelerator's: rows for nothing up to 256, in steps of 64 from there."""
    return 0.02 * max(1.0, -(-rows // 64) / 4)


@dataclass
class Run:
    """What a simulated run came to."""

    tokens: int = 0
    seconds: float = 0.0
    depths: list[list[int]] = field(default_factory=list)
    """asked for, by step and sequence"""

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass
class Machine:
    """Decodes sequences for as long as asked; each has its own chance that a draft is right."""

    times: Times = bound_by_rows
    level: float = 0.0
    """seconds of a drafted level"""
    lag: float | None = None
    """seconds for each token that the drafter's layers lack; None: it has none"""
    offers: float = 1.0
    """share of requests for drafts that the drafter has something for"""
    noise: float = 0.0
    """standard deviation of the logarithm of times as the policy sees them; at 0.1 one step in
    twenty-five seems to take five times as long, too"""
    seed: int = 0

    def run(self, policy: Policy, acceptance: Sequence[float], steps: int) -> Run:
        """Runs `steps` steps of as many sequences as have a chance given."""
        rng = np.random.default_rng(self.seed)
        running = sequences(len(acceptance))
        result = Run()
        for _ in range(steps):
            budgets = policy.budget(running, len(running), 512 - len(running))
            result.depths.append([depth for _, depth in budgets])
            outcomes, rows, draft_seconds, emitted = [], 0, 0.0, 0
            for sequence, (nodes, depth), chance in zip(running, budgets, acceptance, strict=True):
                offered = min(nodes, depth) if rng.random() < self.offers else 0
                right = 0
                while right < offered and rng.random() < chance:
                    right += 1
                if depth and self.lag is not None:
                    draft_seconds += self.lag * (len(sequence.tokens) - sequence.draft_len)
                    sequence.draft_len = len(sequence.tokens)
                tree = TokenTree(
                    np.arange(1 + offered), np.arange(-1, offered, dtype=np.int32), trunk=1
                )
                check = Verification(np.arange(right + 1), [0] * (right + 1), right, None)
                outcomes.append(Outcome(sequence, sequence.kv_len, depth, tree, check))
                rows += tree.size
                emitted += right + 1
            draft_seconds += self.level * max(result.depths[-1])
            seconds = self.times(rows) + draft_seconds
            seen = np.exp(self.noise * rng.normal()) * (5 if rng.random() < 0.4 * self.noise else 1)
            policy.observe(Step(outcomes, rows, True, draft_seconds * seen, seconds * seen))
            for outcome in outcomes:
                outcome.sequence.tokens += outcome.check.tokens
                outcome.sequence.kv_len = len(outcome.sequence.tokens) - 1
            result.tokens += emitted
            result.seconds += seconds
        return result


def sequences(count: int) -> list[TokenSequence]:
    """Sequences that decode, numbered from 0."""
    pool = BlockPool(1, 16)
    return [
        TokenSequence(
            id=number,
            tokens=[0] * 100,
            prompt_len=100,
            params=SamplingParams(),
            seed=0,
            end_tokens=frozenset(),
            limit=100_000,
            table=BlockTable(pool),
            kv_len=99,
            draft_len=100,
        )
        for number in range(count)
    ]


def goodput(depth: int = DEPTH, *, draft_layers: bool = False) -> GoodputPolicy:
    """A policy that knows nothing yet, of chains."""
    return GoodputPolicy(depth, depth, GUESS, draft_layers=draft_layers)
