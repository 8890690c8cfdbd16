"""The step: pick, draft, pack, one forward pass, verify, commit.

There is one path. Prefill is a trunk without drafts, plain decoding a trunk of one, speculation a
tree below it; the engine never asks which of them, or which drafter, it has before it.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

from ridgeline.config import EngineConfig
from ridgeline.core.batch import Entry, pack
from ridgeline.core.noise import substream
from ridgeline.core.sampling import SamplingParams
from ridgeline.core.sequence import FinishReason, Piece, Sequence
from ridgeline.core.text import TextStream
from ridgeline.core.tree import DraftProposal, TokenTree
from ridgeline.core.verify import Verification, verify
from ridgeline.draft.base import Drafter, DraftRequest, Observation
from ridgeline.draft.guard import Guard
from ridgeline.errors import ConfigError, RequestError, UnsupportedModelError
from ridgeline.kv.blocks import BlockPool
from ridgeline.kv.store import KVStore, LayerShape, bytes_per_token
from ridgeline.kv.table import BlockTable
from ridgeline.model.load import LoadedModel
from ridgeline.model.target import TargetOutput
from ridgeline.schedule.choice import create_policy
from ridgeline.schedule.cost import Guess
from ridgeline.schedule.policy import FixedPolicy, Outcome, Step
from ridgeline.schedule.scheduler import Scheduler, Task

BLOCK_SIZE = 16
"""Tokens of a cache block."""
MEMORY_SHARE = 0.5
"""Share of the free memory that a cache of unstated size may take."""


@dataclass(frozen=True)
class Progress:
    """What one step added to one sequence."""

    sequence: Sequence
    pieces: list[Piece]


@dataclass
class _Part:
    """One sequence's part of a step, from its tree to the verdict on it."""

    sequence: Sequence
    start: int
    """kv_len before the step"""
    tree: TokenTree
    proposal: DraftProposal
    final: bool
    """whether the trunk reaches the last token, so that logits are wanted"""
    depth: int
    """longest drafted path that was allowed; 0: nothing was asked for"""
    check: Verification | None = None

    @property
    def keep(self) -> NDArray[np.int64]:
        """Nodes whose logits are wanted: the root and the drafted ones."""
        first = self.tree.root if self.final else self.tree.size
        return np.arange(first, self.tree.size, dtype=np.int64)

    def entry(self) -> Entry:
        slots = self.sequence.table.slots(0, self.start + self.tree.size)
        return Entry(self.tree, self.start, slots, self.keep)


class Engine:
    """Runs sequences on one target model, with or without a drafter."""

    def __init__(self, loaded: LoadedModel, drafter: Drafter | None, config: EngineConfig) -> None:
        self.loaded = loaded
        self.config = config
        self.drafter = drafter
        self._guard = Guard(drafter, loaded.vocab_size) if drafter else None
        self._features = drafter.needs.features if drafter else ()
        model = loaded.model
        layers = [*model.layers, *(drafter.needs.kv if drafter else ())]
        self.device = model.device
        num_blocks = _pool_size(config, layers, loaded.context_len, self.device)
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.store = KVStore(layers, num_blocks, BLOCK_SIZE, self.device)
        self.target = model.bind(self.store)
        if drafter:
            drafter.bind(self.store, len(model.layers))
        self.policy = (
            create_policy(
                config.chosen_policy,
                config.draft_nodes,
                config.depth,
                Guess(model.nbytes, bytes_per_token(model.layers)),
                draft_layers=bool(drafter.needs.kv),
            )
            if drafter
            else FixedPolicy(0, 0)
        )
        self.scheduler = Scheduler(
            self.pool,
            self.store,
            self.policy,
            max_batch=config.max_batch,
            max_batch_tokens=config.max_batch_tokens,
            prefix_sharing=config.prefix_sharing,
            draft_layers=bool(drafter and drafter.needs.kv),
        )
        self._ids = itertools.count()

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def check_request(self, tokens: Seq[int], params: SamplingParams) -> None:
        """Refuses what cannot run.

        Raises:
            RequestError: empty or over-long prompt, ids outside the vocabulary, text options
                without a tokenizer, more tokens than the cache pool holds.
        """
        vocab, context = self.loaded.vocab_size, self.loaded.context_len
        if not len(tokens):
            raise RequestError("the prompt is empty; give at least one token")
        ids = [*tokens, *params.logit_bias, *params.stop_token_ids]
        ids += itertools.chain.from_iterable(params.bad_words)
        wrong = next((token for token in ids if not 0 <= token < vocab), None)
        if wrong is not None:
            raise RequestError(f"token id {wrong} is outside the vocabulary, 0..{vocab - 1}")
        if len(tokens) >= context:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens; the model's context of {context} leaves "
                f"room for a prompt of at most {context - 1}"
            )
        if params.stop and self.loaded.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this model has none")
        limit = self._limit(len(tokens), params)
        capacity = self.pool.num_blocks * self.pool.block_size
        if limit > capacity:
            raise RequestError(
                f"prompt and max_tokens make {limit} tokens; the cache holds {capacity}: lower "
                "max_tokens or raise kv_tokens"
            )

    def add(self, tokens: Seq[int], params: SamplingParams) -> list[Sequence]:
        """Queues a request; returns its `params.n` sequences.

        Raises:
            RequestError: see `check_request`.
        """
        self.check_request(tokens, params)
        prompt = [int(token) for token in tokens]
        seed = random.getrandbits(63) if params.seed is None else params.seed
        sequences: list[Sequence] = []
        for i in range(params.n):
            sequence = Sequence(
                id=next(self._ids),
                tokens=list(prompt),
                prompt_len=len(prompt),
                params=params,
                seed=substream(seed, i),
                end_tokens=self._end_tokens(params),
                limit=self._limit(len(prompt), params),
                table=BlockTable(self.pool),
                text=self._text_stream(prompt, params),
                parent=sequences[0] if sequences else None,
            )
            sequences.append(sequence)
            self.scheduler.add(sequence)
        return sequences

    def abort(self, sequence: Sequence) -> str:
        """Ends a sequence at once, between two steps; what it has generated stays readable.

        Returns the text that had been held back; nothing for one that has ended already.
        """
        if sequence.finish_reason is not None:
            return ""
        self._retire(sequence)
        return sequence.finish(FinishReason.ABORT)

    def step(self) -> list[Progress]:
        """One forward pass; returns what it added, sequence by sequence.

        Raises:
            DraftError: the drafter proposed something malformed; nothing was committed.
        """
        started = time.perf_counter()
        tasks = self.scheduler.pick()
        if not tasks:
            return []
        parts, draft_seconds = self._draft(tasks)
        output = self.target.forward(
            pack([part.entry() for part in parts], self.device), self._features
        )
        self._verify([part for part in parts if part.final], output)
        progress = self._commit(parts)
        self._observe(parts, output)
        for part in parts:
            self.scheduler.seal(part.sequence)
            part.sequence.table.shrink(len(part.sequence.tokens))
        self.policy.observe(_report(parts, draft_seconds, time.perf_counter() - started))
        for part in parts:
            if part.sequence.finish_reason is not None:
                self._retire(part.sequence)
        return progress

    def _draft(self, tasks: list[Task]) -> tuple[list[_Part], float]:
        """The sequences with their trees, and the seconds that the drafter took."""
        requests = [
            DraftRequest(task.sequence, task.nodes, task.depth) for task in tasks if task.nodes
        ]
        started = time.perf_counter()
        proposals = iter(self._guard.propose(requests) if self._guard and requests else ())
        seconds = time.perf_counter() - started
        parts = [
            self._part(task, next(proposals) if task.nodes else DraftProposal.empty())
            for task in tasks
        ]
        return parts, seconds

    def _part(self, task: Task, proposal: DraftProposal) -> _Part:
        sequence, start = task.sequence, task.sequence.kv_len
        trunk = sequence.tokens[start : start + task.trunk]
        tree = (
            self._guard.graft(trunk, proposal, task.nodes, task.depth)
            if self._guard and task.nodes
            else TokenTree.plain(trunk)
        )
        return _Part(sequence, start, tree, proposal, task.final, task.depth)

    def _verify(self, parts: list[_Part], output: TargetOutput) -> None:
        if parts:
            _check_finite(parts, output.logits)
            rows = [part.sequence.rows(part.tree, part.keep) for part in parts]
            q = [part.proposal.q for part in parts]
            checks = verify(self.config.verify, output.logits, rows, q)
            for part, check in zip(parts, checks, strict=True):
                part.check = check

    def _commit(self, parts: list[_Part]) -> list[Progress]:
        """Appends the verified tokens and moves their cache rows to consecutive slots."""
        progress, moves = [], []
        for part in parts:
            check, sequence = part.check, part.sequence
            if check is None:
                sequence.kv_len += part.tree.trunk
                continue
            progress.append(Progress(sequence, sequence.commit(part.tree, check)))
            end = part.start + part.tree.trunk
            sequence.kv_len = min(end + check.accepted, len(sequence.tokens) - 1)
            source = part.start + check.path[1:]
            target = np.arange(end, end + check.accepted)
            moved = source != target
            if moved.any():
                slots = sequence.table.slots(0, part.start + part.tree.size)
                moves.append((slots[source[moved]], slots[target[moved]]))
        if moves:
            sources, targets = (
                torch.from_numpy(np.concatenate(side)).to(self.device)
                for side in zip(*moves, strict=True)
            )
            self.store.move(sources, targets)
        return progress

    def _observe(self, parts: list[_Part], output: TargetOutput) -> None:
        if self._guard:
            sizes = [part.tree.size for part in parts]
            split = [torch.split(layer, sizes) for layer in output.features]
            features = zip(*split, strict=True) if split else [()] * len(parts)
            observations = [
                Observation(part.sequence, part.tree, part.start, part.check, own)
                for part, own in zip(parts, features, strict=True)
            ]
            self._guard.observe(observations)

    def _retire(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self.policy.forget(sequence.id)
        if self._guard:
            self._guard.forget(sequence.id)

    def _limit(self, prompt_len: int, params: SamplingParams) -> int:
        return min(self.loaded.context_len, prompt_len + params.max_tokens)

    def _end_tokens(self, params: SamplingParams) -> frozenset[int]:
        model = frozenset() if params.ignore_eos else self.loaded.end_tokens
        return model | frozenset(params.stop_token_ids)

    def _text_stream(self, prompt: list[int], params: SamplingParams) -> TextStream | None:
        tokenizer = self.loaded.tokenizer
        if tokenizer is None:
            return None

        def decode(tokens: Seq[int]) -> str:
            return str(tokenizer.decode(tokens, skip_special_tokens=True))

        return TextStream(decode, prompt, params.stop)


def _report(parts: Seq[_Part], draft_seconds: float, seconds: float) -> Step:
    """What the policy learns of a step."""
    return Step(
        [Outcome(p.sequence, p.start, p.depth, p.tree, p.check) for p in parts if p.check],
        rows=sum(part.tree.size for part in parts),
        decodes=all(part.tree.trunk == 1 for part in parts),
        draft_seconds=draft_seconds,
        seconds=seconds,
    )


def _check_finite(parts: Seq[_Part], logits: Tensor) -> None:
    """Refuses weights or a number format that make no sense, at a text's first token.

    Raises:
        UnsupportedModelError: the largest logit there is not a finite number.
    """
    if all(part.sequence.output_len for part in parts):
        return
    ends = np.cumsum([len(part.keep) for part in parts])
    first = [end - 1 for part, end in zip(parts, ends, strict=True) if not part.sequence.output_len]
    if not bool(logits[first].amax(1).isfinite().all()):
        raise UnsupportedModelError(
            "the model's logits are not finite numbers: its weights are damaged, or too large for "
            "this number format (try --dtype float32)"
        )


def _pool_size(
    config: EngineConfig, layers: Seq[LayerShape], context_len: int, device: torch.device
) -> int:
    """Blocks of the pool: what was asked for, else what free memory allows and the batch needs.

    Raises:
        ConfigError: more than fits, or less than one sequence's smallest need.
    """
    size = bytes_per_token(layers)
    if device.type == "cuda":
        available = torch.cuda.mem_get_info(device)[0]
    else:
        available = psutil.virtual_memory().available
    if config.kv_tokens is not None:
        tokens = config.kv_tokens
        if tokens * size > available:
            raise ConfigError(
                f"kv_tokens is {tokens}, which takes {tokens * size / 1e9:.1f} GB where "
                f"{available / 1e9:.1f} GB are free; it must be at most {available // size}"
            )
    else:
        tokens = min(int(available * MEMORY_SHARE) // size, config.max_batch * context_len)
    if tokens < BLOCK_SIZE:
        raise ConfigError(
            f"the cache would hold {tokens} tokens at {size} bytes each; it needs room for "
            f"{BLOCK_SIZE} at least: raise kv_tokens or free memory"
        )
    return -(-tokens // BLOCK_SIZE)
