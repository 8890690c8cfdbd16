"""Verification: which drafted tokens are kept, and which token follows them.

Every rule is lossless: what is emitted is distributed as the target alone would have it.
docs/verification.md says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ridgeline.core.groups import gumbel_argmax
from ridgeline.core.noise import Stream, uniform
from ridgeline.core.rejection import NO_CHILD, Inner, Rule, block, rejection
from ridgeline.core.sampling import Rows, TokenLogprobs, draw, noise_keys, process, token_logprobs
from ridgeline.core.tree import TokenTree

RULES: dict[str, Rule | None] = {"match": None, "rejection": rejection, "block": block}
"""Rules by name. `match` needs no distribution of the drafts; the others need it to do better."""

Scores = Callable[[NDArray[np.int64]], Tensor]
"""From rows i64[S] to the unnormalised log-probabilities f32[S,V] to draw there."""


@dataclass(frozen=True, eq=False)
class Verification:
    """What one step emits for one sequence."""

    path: NDArray[np.int64]
    """i64[P]: tree nodes from the root to the last accepted one"""
    tokens: list[int]
    """[P]: the accepted tokens and one more, the target's own"""
    accepted: int
    """P - 1"""
    logprobs: list[TokenLogprobs] | None
    """[P], if the request asked for them"""


def verify(
    rule: str, logits: Tensor, rows: Sequence[Rows], q: Sequence[Tensor | None]
) -> list[Verification]:
    """Verifies the drafts of a batch.

    At each node from the root on, the rule chooses a token. If a child bears it, that child is
    accepted and the walk goes on from there; otherwise the token is emitted and the walk ends.
    `match` draws it from the target's distribution, with noise that depends on the seed and the
    position alone. So do all rules for greedy requests and for drafts without `q`: for point masses
    no rule accepts more. Otherwise `rejection` and `block` choose an accepted child by the ratio of
    p and q, or else draw from the residual.

    Args:
        rule: one of `RULES`.
        logits: f32[K,V], raw, of the target.
        rows: one for each sequence, in the order of the logits; its nodes are the root and all
            drafted nodes, in order.
        q: one for each sequence: None if the drafts are point masses, else f32[R,V]: row 0 the
            distribution that the root's children were drawn from, row i+1 that of drafted node i's;
            siblings drawn without replacement, in sibling order.

    Returns:
        One for each sequence.

    Raises:
        ConfigError: `block` was given several sampled children of one node.
    """
    processed = process(logits, rows)
    start = np.cumsum([0, *(len(r) for r in rows)])
    choices, scores = _choose(RULES[rule], processed, rows, q, start)
    chosen = choices.tolist()
    spans = zip(rows, start[:-1].tolist(), start[1:].tolist(), strict=True)
    walks = [_walk(r.tree, chosen[lo:hi]) for r, lo, hi in spans]
    paths, tokens = [path for path, _ in walks], [emitted for _, emitted in walks]
    undrawn = [i for i, emitted in enumerate(tokens) if emitted[-1] == NO_CHILD]
    if undrawn:
        ends = np.array([start[i] + paths[i][-1] - paths[i][0] for i in undrawn])
        keys = torch.from_numpy(noise_keys(rows, Stream.CORRECT)[ends]).to(logits.device)
        drawn = gumbel_argmax(scores(ends), keys)
        for i, token in zip(undrawn, drawn.tolist(), strict=True):
            tokens[i][-1] = token
    logprobs = _logprobs(logits, rows, start, paths, tokens)
    return [
        Verification(np.array(path, dtype=np.int64), emitted, len(path) - 1, entries)
        for path, emitted, entries in zip(paths, tokens, logprobs, strict=True)
    ]


def _choose(
    rule: Rule | None,
    processed: Tensor,
    rows: Sequence[Rows],
    q: Sequence[Tensor | None],
    start: NDArray[np.int64],
) -> tuple[Tensor, Scores]:
    """What each node chooses, i64[K]: a token, or NO_CHILD to draw it from the node's scores."""
    by_ratio = {
        i: q_i
        for i, q_i in enumerate(q)
        if rule and q_i is not None and rows[i].tree.drafted and not rows[i].params.greedy
    }
    if not rule or not by_ratio:
        return draw(processed, rows), processed.__getitem__

    def tensor(indices: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(indices).to(processed.device)

    choices = torch.full((len(processed),), NO_CHILD, device=processed.device)
    by_match = [i for i in range(len(rows)) if i not in by_ratio]
    if by_match:
        at = tensor(np.concatenate([np.arange(start[i], start[i + 1]) for i in by_match]))
        choices[at] = draw(processed[at], [rows[i] for i in by_match])

    nodes, children, q_rows, lengths = _inner_nodes(
        [rows[i].tree for i in by_ratio], start[list(by_ratio)], [len(q) for q in by_ratio.values()]
    )
    handed = torch.cat(list(by_ratio.values()))
    in_place = len(q_rows) == len(handed)  # every row of every q belongs to an inner node
    tokens, keys = tensor(children), tensor(noise_keys(rows, Stream.ACCEPT)[nodes])
    inner = Inner(
        p=processed[tensor(nodes)].softmax(1),
        q=handed if in_place else handed[tensor(q_rows)],
        children=tokens,
        u=uniform(keys[:, None], tokens),
        lengths=lengths,
    )
    choices[tensor(nodes)], residual = rule(inner)
    inner_index = np.full(len(processed), -1)
    inner_index[nodes] = np.arange(len(nodes))

    def scores(ends: NDArray[np.int64]) -> Tensor:
        result = processed[tensor(ends)]  # below a leaf nothing was drafted: a bonus from p
        inner = inner_index[ends]
        result[tensor(np.flatnonzero(inner >= 0))] = residual(tensor(inner[inner >= 0])).log()
        return result

    return choices, scores


def _inner_nodes(
    trees: Sequence[TokenTree], start: NDArray[np.int64], q_lengths: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The nodes that have children.

    Args:
        trees: B trees.
        start: i64[B], row of each tree's root in the batch.
        q_lengths: [B], rows of each tree's q.

    Returns:
        Their rows in the batch, i64[I]; their children's tokens in sibling order, i64[I,C], filled
        up with NO_CHILD; their rows in the concatenated q, i64[I]; their number per tree, i64[B].
    """
    parents = [t.parents[t.trunk :] - t.root + s for t, s in zip(trees, start, strict=True)]
    tokens = np.concatenate([t.tokens[t.trunk :] for t in trees])
    nodes, index, counts = np.unique(
        np.concatenate(parents), return_inverse=True, return_counts=True
    )
    order = np.argsort(index, kind="stable")
    sibling = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    children = np.full((len(nodes), counts.max()), NO_CHILD)
    children[index[order], sibling] = tokens[order]
    tree = np.searchsorted(start, nodes, side="right") - 1
    q_start = np.cumsum([0, *q_lengths])
    return nodes, children, nodes - start[tree] + q_start[tree], np.bincount(tree)


def _walk(tree: TokenTree, choices: Sequence[int]) -> tuple[list[int], list[int]]:
    """The path from the root to the first node that chooses none of its children's tokens.

    Returns:
        Its nodes, and what each of them chose.
    """
    tokens, root = tree.tokens.tolist(), tree.root
    path, chosen = [root], [choices[0]]
    while True:
        child = next((c for c in tree.children(path[-1]) if tokens[c] == chosen[-1]), None)
        if child is None:
            return path, chosen
        path.append(child)
        chosen.append(choices[child - root])


def _logprobs(
    logits: Tensor,
    rows: Sequence[Rows],
    start: NDArray[np.int64],
    paths: list[list[int]],
    tokens: list[list[int]],
) -> list[list[TokenLogprobs] | None]:
    """Log-probabilities of each sequence's emitted tokens, None for those that want none."""
    wanted = [i for i, r in enumerate(rows) if r.params.logprobs is not None]
    if not wanted:
        return [None] * len(rows)
    at = [start[i] + node - paths[i][0] for i in wanted for node in paths[i]]
    counts = [rows[i].params.logprobs or 0 for i in wanted for _ in paths[i]]
    entries = token_logprobs(
        logits[torch.tensor(at, device=logits.device)],
        [token for i in wanted for token in tokens[i]],
        counts,
    )
    result: list[list[TokenLogprobs] | None] = [None] * len(rows)
    for i in wanted:
        result[i], entries = entries[: len(tokens[i])], entries[len(tokens[i]) :]
    return result
