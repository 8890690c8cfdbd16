"""Who takes part in a step: admission, the token budget, preemption.

Sequences run in order of arrival. Every decoding sequence has its one token in every step; prefill
takes what the token budget leaves, and drafts what both leave. When blocks run out, the sequence
that arrived last gives its blocks back and is computed again later.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, replace

from ridgeline.core.sequence import Sequence, Status
from ridgeline.errors import OutOfBlocksError
from ridgeline.kv.blocks import BlockPool, block_hashes
from ridgeline.kv.store import KVStore
from ridgeline.schedule.policy import Policy


@dataclass(frozen=True)
class Task:
    """One sequence's part of the coming step; its blocks are allocated."""

    sequence: Sequence
    trunk: int
    """uncached tokens to compute"""
    nodes: int = 0
    """drafted nodes allowed"""
    depth: int = 0
    """longest drafted path allowed"""

    @property
    def final(self) -> bool:
        """Whether the trunk reaches the sequence's last token, so that logits are wanted."""
        return self.trunk == self.sequence.uncached


class Scheduler:
    """Holds the waiting and the running sequences and the cache blocks they use."""

    def __init__(
        self,
        pool: BlockPool,
        store: KVStore,
        policy: Policy,
        *,
        max_batch: int,
        max_batch_tokens: int,
        prefix_sharing: bool,
        draft_layers: bool,
    ) -> None:
        self.pool = pool
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._store = store
        self._policy = policy
        self._max_batch = max_batch
        self._max_batch_tokens = max_batch_tokens
        self._prefix_sharing = prefix_sharing
        self._draft_layers = draft_layers

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence, in order of its id."""
        insort(self.waiting, sequence, key=lambda s: s.id)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it stands, and gives its blocks back."""
        for queue in (self.waiting, self.running):
            if sequence in queue:
                queue.remove(sequence)
        sequence.table.release()

    def pick(self) -> list[Task]:
        """The coming step. Empty only if nothing waits or runs."""
        tasks: list[Task] = []
        decoding = sum(sequence.uncached == 1 for sequence in self.running)
        budget = self._max_batch_tokens - decoding  # what prefill may use
        preempted = False
        for sequence in list(self.running):
            decodes = sequence.uncached == 1
            trunk = 1 if decodes else min(sequence.uncached, budget)
            while trunk and sequence.status is Status.RUNNING:
                if self._reserve(sequence, trunk):
                    tasks.append(Task(sequence, trunk))
                    budget -= 0 if decodes else trunk
                    break
                self._preempt(self.running[-1])
                preempted = True
        if not preempted:
            budget = self._admit(tasks, budget)
        return self._allot_drafts(tasks, budget)

    def seal(self, sequence: Sequence) -> None:
        """Offers the sequence's full, committed blocks to other requests."""
        if not self._prefix_sharing:
            return
        full = self._held(sequence) // self.pool.block_size
        self._hash(sequence, full)
        for i in range(sequence.sealed, full):
            self.pool.seal(sequence.table.blocks[i], sequence.hashes[i])
        sequence.sealed = max(sequence.sealed, full)

    def _held(self, sequence: Sequence) -> int:
        """Committed tokens that every layer of the cache holds, the drafter's included."""
        if self._draft_layers:
            return min(sequence.kv_len, sequence.draft_len)
        return sequence.kv_len

    def _hash(self, sequence: Sequence, blocks: int) -> None:
        size, known = self.pool.block_size, len(sequence.hashes)
        if known < blocks:
            parent = sequence.hashes[-1] if known else b""
            tokens = sequence.tokens[known * size : blocks * size]
            sequence.hashes += block_hashes(tokens, size, parent)

    def _reserve(self, sequence: Sequence, nodes: int) -> bool:
        """Allocates slots for `nodes` more tokens and makes them writable; False if it cannot."""
        end = sequence.kv_len + nodes
        try:
            sequence.table.grow(end)
            copies = sequence.table.writable(self._held(sequence), end)
        except OutOfBlocksError:
            return False
        self._store.copy_blocks(copies)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        sequence.table.release()
        sequence.kv_len = sequence.draft_len = sequence.sealed = 0
        sequence.status = Status.WAITING
        self.running.remove(sequence)
        self.add(sequence)

    def _admit(self, tasks: list[Task], budget: int) -> int:
        for sequence in list(self.waiting):
            if len(self.running) == self._max_batch or budget == 0:
                break
            if self._waits_for_parent(sequence):
                continue
            self._reuse(sequence)
            trunk = min(sequence.uncached, budget)
            missing = self._blocks(len(sequence.tokens) + 1) - len(sequence.table.blocks)
            if missing > self.pool.free or not self._reserve(sequence, trunk):
                sequence.table.release()
                sequence.kv_len = sequence.draft_len = sequence.sealed = 0
                break
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=lambda s: s.id)
            sequence.status = Status.RUNNING
            sequence.parent = None
            tasks.append(Task(sequence, trunk))
            budget -= trunk
        return budget

    def _waits_for_parent(self, sequence: Sequence) -> bool:
        parent = sequence.parent
        return (
            parent is not None
            and parent.status is not Status.FINISHED
            and parent.kv_len < sequence.prompt_len
        )

    def _reuse(self, sequence: Sequence) -> None:
        """Starts a sequence from blocks that are cached already; one token is always computed."""
        most = len(sequence.tokens) - 1
        parent = sequence.parent
        if parent is not None and parent.status is Status.RUNNING:
            sequence.table = parent.table.fork()
            sequence.table.shrink(most)
            sequence.kv_len = most
            sequence.draft_len = min(parent.draft_len, most)
        elif self._prefix_sharing:
            self._hash(sequence, most // self.pool.block_size)
            blocks = self.pool.match(sequence.hashes[: most // self.pool.block_size])
            sequence.table.adopt(blocks)
            sequence.kv_len = sequence.draft_len = len(blocks) * self.pool.block_size
        sequence.sealed = sequence.kv_len // self.pool.block_size

    def _allot_drafts(self, tasks: list[Task], tokens_left: int) -> list[Task]:
        decoding = [i for i, t in enumerate(tasks) if t.final and t.sequence.output_len]
        sequences, trunks = [tasks[i].sequence for i in decoding], sum(t.trunk for t in tasks)
        budgets = self._policy.budget(sequences, trunks, tokens_left)
        for i, (nodes, depth) in zip(decoding, budgets, strict=True):
            sequence = tasks[i].sequence
            # The step emits one token more than it accepts, and none may lie beyond the limit.
            depth = min(depth, sequence.limit - len(sequence.tokens) - 1)
            if depth > 0 and nodes > 0 and self._reserve(sequence, tasks[i].trunk + nodes):
                tasks[i] = replace(tasks[i], nodes=nodes, depth=depth)
        return tasks

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.pool.block_size)
