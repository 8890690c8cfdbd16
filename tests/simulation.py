"""A target and a drafter that are tables of probabilities, and what verification makes of them.

A trial is one sequence of a batch, so that thousands run through one call of `verify`, the very
code that the engine calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from ridgeline.core import noise
from ridgeline.core.groups import gumbel_argmax
from ridgeline.core.noise import Stream
from ridgeline.core.sampling import Rows, SamplingParams
from ridgeline.core.tree import TokenTree
from ridgeline.core.verify import verify

ALPHA = 1e-4
"""A right rule fails a test with this probability; seeds are fixed, so it fails never or always."""
SAMPLED = SamplingParams(temperature=1.0)


@cache
def tree_of(tokens: tuple[int, ...], parents: tuple[int, ...]) -> TokenTree:
    """A trunk of one (token 0) and drafted nodes; parents as in DraftProposal."""
    return TokenTree(np.array([0, *tokens]), np.array([-1, *(p + 1 for p in parents)], np.int32), 1)


def chain(depth: int) -> tuple[int, ...]:
    """Parents of a chain."""
    return tuple(range(-1, depth - 1))


@dataclass(frozen=True)
class Simulation:
    """How to draft and verify. Tables hold one row for each token that came before."""

    rule: str
    target: Tensor
    """f32[V,V]: logits of the target"""
    draft: Tensor
    """f32[V,V]: probabilities that the drafter draws from"""
    parents: tuple[int, ...] = (-1,)
    params: SamplingParams = SAMPLED
    stream: Stream = Stream.DRAFT
    """noise that drafts are drawn with"""
    handed: Tensor | None = None
    """f32[V,V]: the q handed to verification, if not `draft` itself"""
    point_mass: bool = False
    """hand no q at all"""
    argmax_drafts: bool = False

    def run(self, trials: int, length: int, first_seed: int = 0) -> tuple[NDArray[np.int64], float]:
        """Generates `length` tokens after token 0 in each trial.

        Returns:
            i64[trials,length], and the mean number of tokens of a trial's first step.
        """
        output = [[0] for _ in range(trials)]
        first_step = 0.0
        alive = list(range(trials))
        while alive:
            emitted = self._step([output[i] for i in alive], [first_seed + i for i in alive])
            if not first_step:
                first_step = sum(map(len, emitted)) / trials
            for i, tokens in zip(alive, emitted, strict=True):
                output[i] += tokens
            alive = [i for i in alive if len(output[i]) <= length]
        return np.array([tokens[1 : length + 1] for tokens in output]), first_step

    def _step(self, outputs: list[list[int]], seeds: list[int]) -> list[list[int]]:
        last = torch.tensor([tokens[-1] for tokens in outputs])
        lengths = np.array([len(tokens) for tokens in outputs])
        drafted = self._draft(last, lengths, seeds)
        nodes = torch.cat([last[:, None], drafted], 1)
        rows = [
            Rows(self.params, seed, tokens, 1, frozenset(), tree_of(tuple(d), self.parents), order)
            for order in [np.arange(nodes.shape[1])]
            for seed, tokens, d in zip(seeds, outputs, drafted.tolist(), strict=True)
        ]
        q = (self.draft if self.handed is None else self.handed)[nodes].unbind()
        logits = self.target[nodes.flatten()]
        checks = verify(self.rule, logits, rows, [None] * len(rows) if self.point_mass else q)
        return [check.tokens for check in checks]

    def _draft(self, last: Tensor, lengths: NDArray[np.int64], seeds: list[int]) -> Tensor:
        """i64[trials,M]: siblings are drawn together, without replacement, in draw order."""
        drafted = torch.empty(len(last), len(self.parents), dtype=torch.int64)
        for parent in sorted(set(self.parents)):
            children = [i for i, p in enumerate(self.parents) if p == parent]
            scores = self.draft[last if parent < 0 else drafted[:, parent]].log()
            if self.argmax_drafts:
                drafted[:, children] = scores.topk(len(children)).indices
                continue
            ahead = 0
            while parent >= 0:
                parent, ahead = self.parents[parent], ahead + 1
            words = noise.keys(np.array(seeds, np.uint64), lengths + ahead, self.stream, lengths)
            keys = torch.from_numpy(words)
            if len(children) == 1:
                drafted[:, children[0]] = gumbel_argmax(scores, keys)
            else:
                groups = torch.arange(scores.shape[1] // noise.GROUP + 1)
                g = noise.gumbel(keys[:, None], groups).flatten(1)[:, : scores.shape[1]]
                drafted[:, children] = (scores + g).topk(len(children)).indices
        return drafted


def assert_distributed(
    simulation: Simulation, trials: int, length: int, batch: int = 1 << 13
) -> None:
    """Every position and every pair of neighbours of the output is distributed as the target's."""
    output = np.concatenate(
        [
            simulation.run(min(batch, trials - start), length, start)[0]
            for start in range(0, trials, batch)
        ]
    )
    p = simulation.target.double().div(simulation.params.temperature).softmax(1).numpy()
    marginal = p[0]
    assert_counts(output[:, 0], marginal)
    for i in range(1, length):
        pair = marginal[:, None] * p
        assert_counts(output[:, i - 1] * len(p) + output[:, i], pair.flatten())
        marginal = pair.sum(0)
        assert_counts(output[:, i], marginal)


def assert_counts(tokens: NDArray[np.int64], expected: NDArray[np.float64]) -> None:
    """Chi-square test of outcomes against probabilities; rare outcomes are pooled."""
    counts = np.bincount(tokens, minlength=len(expected)).astype(float)
    frequencies = expected * len(tokens)
    assert not counts[expected == 0].any(), "an impossible token"
    rare = frequencies < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    frequencies = np.append(frequencies[~rare], frequencies[rare].sum())
    held = frequencies > 0
    statistic = ((counts - frequencies)[held] ** 2 / frequencies[held]).sum()
    assert stats.chi2.sf(statistic, held.sum() - 1) > ALPHA
