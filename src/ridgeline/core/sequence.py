"""One sequence under generation: its tokens, how much of them the cache holds, and when it ends."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ridgeline.core.sampling import Rows, SamplingParams, TokenLogprobs
from ridgeline.core.text import TextStream
from ridgeline.core.tree import TokenTree
from ridgeline.core.verify import Verification


class Status(Enum):
    """Where a sequence stands. A preempted sequence waits again."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"
    """an end token or a stop string"""
    LENGTH = "length"
    """max_tokens, or the model's context is full"""
    ABORT = "abort"
    """the caller gave it up"""


class Table(Protocol):
    """What a sequence's holder of cache blocks offers (`kv.BlockTable`)."""

    blocks: list[int]

    def slot(self, index: int) -> int: ...  # noqa: D102
    def slots(self, lo: int, hi: int) -> NDArray[np.int64]: ...  # noqa: D102
    def grow(self, n: int) -> None: ...  # noqa: D102
    def shrink(self, n: int) -> None: ...  # noqa: D102
    def fork(self) -> Table: ...  # noqa: D102
    def adopt(self, blocks: Seq[int]) -> None: ...  # noqa: D102
    def writable(self, lo: int, hi: int) -> list[tuple[int, int]]: ...  # noqa: D102
    def release(self) -> None: ...  # noqa: D102


@dataclass
class Speculation:
    """What drafting brought to one sequence. Each figure is defined in docs/verification.md."""

    steps: int = 0
    """decode steps: forward passes that emitted tokens of this sequence after its first token"""
    drafted: int = 0
    """drafted nodes that were verified"""
    accepted: int = 0
    """drafted tokens that were emitted"""
    reached: list[int] = field(default_factory=list)
    """reached[i]: steps in which a draft of depth i+1 hung below an accepted path"""
    passed: list[int] = field(default_factory=list)
    """passed[i]: those of them in which a draft of depth i+1 was accepted"""

    def record(self, tree: TokenTree, path: NDArray[np.int64]) -> None:
        """Counts one verified step; `path` starts at the root."""
        self.steps += 1
        self.drafted += tree.drafted
        self.accepted += len(path) - 1
        for depth, node in enumerate(path.tolist()):
            if not tree.children(node):
                break
            if depth == len(self.reached):
                self.reached.append(0)
                self.passed.append(0)
            self.reached[depth] += 1
            self.passed[depth] += depth + 1 < len(path)

    @property
    def drafted_steps(self) -> int:
        """Decode steps in which anything was drafted."""
        return self.reached[0] if self.reached else 0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of drafts accepted at depth 1, 2, ..., given that all before were."""
        return [p / r for p, r in zip(self.passed, self.reached, strict=True)]


@dataclass(frozen=True)
class Piece:
    """One emitted token as a stream shows it."""

    token: int
    text: str
    """what became readable with it; may be empty, or more than the token's own text"""
    drafted: bool
    """True if the drafter guessed it, False if the target supplied it"""


@dataclass(eq=False)
class Sequence:
    """A prompt and what has been generated after it.

    Between steps 0 <= kv_len < len(tokens); once it decodes, kv_len == len(tokens) - 1.
    """

    id: int
    tokens: list[int]
    """committed tokens, the prompt first"""
    prompt_len: int
    params: SamplingParams
    seed: int
    end_tokens: frozenset[int]
    limit: int
    """total number of tokens at which it must end: the context, or prompt + max_tokens"""
    table: Table
    text: TextStream | None = None
    parent: Sequence | None = None
    """the sample whose prompt blocks this one may share, where n > 1"""

    kv_len: int = 0
    """committed tokens whose keys and values the target's cache holds"""
    draft_len: int = 0
    """the same for the drafter's own layers; it may lag behind or lead by one"""
    hashes: list[bytes] = field(default_factory=list)
    """chained hashes of the first full blocks of `tokens`, as many as were needed so far"""
    sealed: int = 0
    """blocks already offered for reuse"""
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    speculation: Speculation = field(default_factory=Speculation)
    arrived: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    last_token: float | None = None

    @property
    def output(self) -> list[int]:
        """Generated tokens."""
        return self.tokens[self.prompt_len :]

    @property
    def output_len(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens) - self.prompt_len

    @property
    def uncached(self) -> int:
        """Committed tokens that the next forward passes must compute: the trunk, in full."""
        return len(self.tokens) - self.kv_len

    def rows(self, tree: TokenTree, nodes: NDArray[np.int64]) -> Rows:
        """What processing needs to know about the logits of these tree nodes."""
        return Rows(
            self.params, self.seed, self.tokens, self.prompt_len, self.end_tokens, tree, nodes
        )

    def commit(self, tree: TokenTree, check: Verification) -> list[Piece]:
        """Appends a step's tokens up to the first that ends the sequence; returns the new pieces.

        Whatever the rule accepted beyond the end is neither kept nor counted.
        """
        pieces: list[Piece] = []
        for i, token in enumerate(check.tokens):
            pieces.append(self._append(token, drafted=i < check.accepted))
            if check.logprobs is not None:
                self.logprobs.append(check.logprobs[i])
            if self.finish_reason is not None:
                break
        if self.output_len > len(pieces):
            kept = min(check.accepted, len(pieces))
            self.speculation.record(tree, check.path[: kept + 1])
        self.last_token = time.perf_counter()
        self.first_token = self.first_token or self.last_token
        return pieces

    def _append(self, token: int, drafted: bool) -> Piece:
        self.tokens.append(token)
        may_stop = self.output_len >= self.params.min_tokens
        text = self.text.put(token, may_stop) if self.text else ""
        if token in self.end_tokens or (self.text and self.text.stopped):
            text += self.finish(FinishReason.STOP)
        elif len(self.tokens) >= self.limit:
            text += self.finish(FinishReason.LENGTH)
        return Piece(token, text, drafted)

    def finish(self, reason: FinishReason) -> str:
        """Ends the sequence; returns the text that had been held back."""
        self.status = Status.FINISHED
        self.finish_reason = reason
        return self.text.finish() if self.text else ""
