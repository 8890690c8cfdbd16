"""Faults of verification, planted from outside: each replaces a function as long as it lasts.

They are mistakes that speculative decoding invites. A test that does not notice them would not
notice others of their size either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ridgeline.core import rejection, sampling
from ridgeline.core.batch import Batch, Entry, pack
from ridgeline.core.noise import Stream, keys
from ridgeline.core.sampling import Drafts, Rows, draw_drafts
from ridgeline.core.tree import TokenTree
from ridgeline.draft import levels
from ridgeline.engine import Engine
from ridgeline.model.target import TargetOutput


@dataclass
class Effect:
    """How often a planted fault made a difference to something."""

    count: int = 0


@dataclass(frozen=True)
class Fault:
    """A fault that can be planted into an engine."""

    name: str
    plant: Callable[[Engine], AbstractContextManager[Effect]]
    by_ratio: bool
    """whether it concerns only rules that accept by the ratio of p and q"""


@contextmanager
def shared_stream(_: Engine | None = None) -> Iterator[Effect]:
    """Drafts, acceptance and corrections take their random numbers from one stream."""
    effect = Effect()

    def shared(seeds: Any, positions: Any, stream: Stream, rounds: Any) -> NDArray[np.int64]:
        if stream in (Stream.DRAFT, Stream.ACCEPT):
            effect.count += len(positions)
            stream = Stream.CORRECT
        return keys(seeds, positions, stream, rounds)

    with patch.object(sampling, "keys", shared):
        yield effect


@contextmanager
def wrong_residual(_: Engine | None = None) -> Iterator[Effect]:
    """What follows a rejection is drawn from p instead of (p - q)+."""
    effect = Effect()

    def whole(p: Tensor, _: Tensor) -> Tensor:
        effect.count += 1
        return p

    with patch.object(rejection, "_excess", whole):
        yield effect


@contextmanager
def softmax_for_argmax(_: Engine | None = None) -> Iterator[Effect]:
    """Drafts are the likeliest tokens, but said to be drawn from the drafter's softmax."""
    effect = Effect()

    def likeliest(*arguments: Any, **options: Any) -> Drafts:
        drafts = draw_drafts(*arguments, **options)
        if drafts.q is None:
            return drafts
        p, tokens = drafts.q.topk(drafts.tokens.shape[1])
        effect.count += int((tokens != drafts.tokens).any(1).sum())
        return replace(drafts, tokens=tokens, scores=p.double().log())

    with patch.object(levels, "draw_drafts", likeliest):
        yield effect


@contextmanager
def last_token_penalised(_: Engine | None = None) -> Iterator[Effect]:
    """Of the drafted tokens before it, a node's penalties see the last one only."""
    effect, right = Effect(), Rows.drafted_path.fget  # type: ignore[attr-defined]

    def last_only(rows: Rows) -> NDArray[np.bool_]:
        seen: NDArray[np.bool_] = rows.nodes[:, None] == np.arange(rows.tree.trunk, rows.tree.size)
        effect.count += int((seen != right(rows)).any(1).sum())
        return seen

    with patch.object(Rows, "drafted_path", property(last_only)):
        yield effect


Lookup = Callable[[TokenTree, int], int]
"""From a drafted node to the node whose key is read in its place."""


def mask_off_by_one(_: TokenTree, node: int) -> int:
    """The node before it."""
    return node - 1


def position_as_slot(tree: TokenTree, node: int) -> int:
    """The node whose index equals its depth: on a chain itself, else one of another path."""
    return int(tree.depth[node])


def misread(batch: Batch, lookup: Lookup) -> tuple[Batch, int]:
    """The batch with wrong ancestors for drafted nodes, in a form that no check can refuse.

    Every drafted node becomes a sequence of its own, which reads its ancestors' keys from where
    `lookup` says. Rows keep their order, and with the right lookup everything is as before.

    Returns:
        The batch, and how many lookups are wrong.
    """
    entries, wrong = [], 0
    for entry in batch.entries:
        tree, keep = entry.tree, set(entry.keep.tolist())
        own, committed = entry.slots[entry.kv_len :], entry.slots[: entry.kv_len + tree.trunk]
        trunk = TokenTree.plain(tree.tokens[: tree.trunk])
        kept = entry.keep[entry.keep < tree.trunk]
        entries.append(Entry(trunk, entry.kv_len, committed, kept))
        for node in range(tree.trunk, tree.size):
            above = tree.path(node)[:-1]
            read = [lookup(tree, ancestor) for ancestor in above]
            wrong += above != read
            slots = np.concatenate([committed, own[[*read, node]]])
            kept = np.zeros(int(node in keep), np.int64)
            alone = TokenTree.plain(tree.tokens[node : node + 1])
            entries.append(Entry(alone, len(slots) - 1, slots, kept))
    return pack(entries, batch.tokens.device), wrong


@contextmanager
def misreading(engine: Engine, lookup: Lookup) -> Iterator[Effect]:
    """The target's forward passes look ancestors up wrongly."""
    effect, target = Effect(), engine.target
    forward = target.forward

    def faulty(batch: Batch, *rest: Any) -> TargetOutput:
        misled, wrong = misread(batch, lookup)
        effect.count += wrong
        return forward(misled, *rest)

    with patch.object(target, "forward", faulty):
        yield effect


@contextmanager
def addressed_by_position(engine: Engine) -> Iterator[Effect]:
    """Keys are looked up by position; and accepted ones stay, as if they lay there already."""
    with misreading(engine, position_as_slot) as effect:

        def stay(sources: Tensor, _: Tensor) -> None:
            effect.count += len(sources)

        with patch.object(engine, "store", SimpleNamespace(move=stay)):
            yield effect


FAULTS = (
    Fault("tree mask off by one", partial(misreading, lookup=mask_off_by_one), False),
    Fault("position instead of slot", addressed_by_position, False),
    Fault("penalties that see the last token only", last_token_penalised, False),
    Fault("one random stream shared by drafts, acceptance and corrections", shared_stream, True),
    Fault("corrections drawn from p, not from the residual", wrong_residual, True),
    Fault("softmax q for argmax drafts", softmax_for_argmax, True),
)
"""Those that texts show come first: they take the least time."""
