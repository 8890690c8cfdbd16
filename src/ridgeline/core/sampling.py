"""From logits to tokens: the only copy of processing and drawing, for target and drafters alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ridgeline.core.groups import argmax, gumbel_argmax, gumbel_top
from ridgeline.core.noise import Stream, keys
from ridgeline.core.params import SamplingParams
from ridgeline.core.tree import TokenTree
from ridgeline.core.truncation import truncate

__all__ = [
    "Drafts",
    "Rows",
    "SamplingParams",
    "TokenLogprobs",
    "draw",
    "draw_drafts",
    "noise_keys",
    "process",
    "token_logprobs",
]


@dataclass(frozen=True, eq=False)
class Rows:
    """What the logit rows of one sequence belong to: row i predicts what follows `nodes[i]`."""

    params: SamplingParams
    seed: int
    tokens: Sequence[int]
    """committed tokens, prompt first; the last one is the tree's root"""
    prompt_len: int
    end_tokens: frozenset[int]
    """tokens that end this sequence"""
    tree: TokenTree
    nodes: NDArray[np.int64]
    """root or drafted nodes of the tree"""

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def ahead(self) -> NDArray[np.int64]:
        """i64[len]: drafted tokens between the last committed token and the one predicted."""
        # the trunk is a chain, so the root's depth is its index
        return self.tree.depth[self.nodes].astype(np.int64) - self.tree.root

    @property
    def drafted_path(self) -> NDArray[np.bool_]:
        """bool[len,D]: which of the tree's D drafted nodes lie on each row's path."""
        bits = np.arange(self.tree.drafted, dtype=np.uint64)
        return (self.tree.words[self.nodes, None] >> bits & np.uint64(1)).astype(np.bool_)


def noise_keys(rows: Sequence[Rows], stream: Stream) -> NDArray[np.int64]:
    """i64[K]: noise keys of the tokens that all these rows predict, in order."""
    repeats = [len(r) for r in rows]
    committed = np.repeat([len(r.tokens) for r in rows], repeats)
    seeds = np.repeat(np.array([r.seed for r in rows], dtype=np.uint64), repeats)
    return keys(seeds, committed + np.concatenate([r.ahead for r in rows]), stream, committed)


def process(logits: Tensor, rows: Sequence[Rows]) -> Tensor:
    """Turns raw logits into those of the distribution p = softmax(result) to draw from.

    One fixed order: repetition penalty, frequency and presence penalties, logit_bias, bad_words
    and min_tokens, which see the committed tokens and the drafted ones on the row's path; then
    temperature; then top_k, top_p and min_p. Greedy rows need only the first half.

    Args:
        logits: f32[K,V]; K is the total length of `rows`. Never changed.
        rows: one for each sequence, in the order of the logits.

    Returns:
        f32[K,V], excluded tokens at -inf; `logits` itself where nothing applies.
    """
    if any(_edits(r) for r in rows):
        logits = logits.clone()
        start = 0
        for r in rows:
            if _edits(r):
                _edit(logits[start : start + len(r)], r)
            start += len(r)
    if all(r.params.greedy for r in rows):
        return logits
    sampled = [r.params if not r.params.greedy else _NEUTRAL for r in rows]
    repeats = [len(r) for r in rows]
    temperature = np.repeat([p.temperature for p in sampled], repeats)
    if (temperature != 1).any():
        logits = logits / torch.from_numpy(temperature).float()[:, None].to(logits.device)
    return truncate(
        logits,
        np.repeat([p.top_k for p in sampled], repeats),
        np.repeat([p.top_p for p in sampled], repeats),
        np.repeat([p.min_p for p in sampled], repeats),
    )


_NEUTRAL = SamplingParams(temperature=1.0)
"""Changes no logit: stands in for greedy rows beside sampled ones."""


def draw(processed: Tensor, rows: Sequence[Rows], stream: Stream = Stream.TARGET) -> Tensor:
    """Draws one token per row: the argmax of greedy rows, else the argmax of logit + keyed noise.

    Args:
        processed: f32[K,V] from `process`.
        rows: as for `process`.
        stream: what the draw is for. TARGET makes it a function of the row's logits, the
            sequence's seed and the position alone.

    Returns:
        i64[K]
    """
    sampled = [not r.params.greedy for r in rows]
    if not any(sampled):
        return argmax(processed)
    key = torch.from_numpy(noise_keys(rows, stream)).to(processed.device)
    if all(sampled):
        return gumbel_argmax(processed, key)
    tokens = argmax(processed)
    where = np.flatnonzero(np.repeat(sampled, [len(r) for r in rows]))
    picked = torch.from_numpy(where).to(processed.device)
    return tokens.index_copy_(0, picked, gumbel_argmax(processed[picked], key[picked]))


@dataclass(frozen=True, eq=False)
class Drafts:
    """What `draw_drafts` found to follow K nodes."""

    tokens: Tensor
    """i64[K,C] on the CPU, the likeliest first; drawn ones in draw order"""
    scores: Tensor
    """f64[K,C] on the CPU: log-probabilities among these C, noise included; -inf: no more tokens"""
    q: Tensor | None
    """f32[K,V]: what the tokens were drawn from, without replacement; None: point masses"""


def draw_drafts(
    logits: Tensor,
    rows: Sequence[Rows],
    vocab_size: int,
    coupled: bool,
    count: int = 1,
    ids: Tensor | None = None,
) -> Drafts:
    """Finds the tokens to draft after each row, from a drafter's own logits.

    The request's sampling parameters apply to the draft's distribution as they do to the target's.
    A drafter hangs what it has drafted so far into `rows`' tree and asks for the nodes to go on
    from.

    Args:
        logits: f32[K,W] of the drafter. A vocabulary W other than the target's is cut to it, or
            filled up with tokens that are never drafted.
        rows: as for `process`.
        vocab_size: V, the target's.
        coupled: True for the rule `match`: the noise that the target will draw with at the same
            position, so that both mostly pick the same token. It would bias every other rule:
            False draws independently, without replacement, and returns the distribution that they
            need. Greedy requests draw nothing either way.
        count: tokens wanted after each row. Of a coupled row the first is certain to be its draw;
            the others are the best of those looked at. All others are exact.
        ids: i64[W], the tokens that the columns stand for, where the drafter has not all of them.
    """
    sampled = np.repeat([not r.params.greedy for r in rows], [len(r) for r in rows])
    if not coupled or sampled.any() or any(_edits(r) for r in rows):
        processed, ids = process(_widened(logits, vocab_size, ids), rows), None
    else:
        processed = logits[:, :vocab_size]
    shape, device = (len(logits), min(count, processed.shape[1])), logits.device
    # Small arrays: each of torch's operators would take longer than the sums themselves.
    tokens, scores = np.empty(shape, np.int64), np.empty(shape, np.float64)
    q = None if coupled else processed.softmax(1)
    if not sampled.all():
        greedy = torch.from_numpy(np.flatnonzero(~sampled)).to(device)
        best = (processed[greedy] if sampled.any() else processed).topk(shape[1])
        tokens[~sampled] = best.indices.numpy(force=True)
        scores[~sampled] = best.values.numpy(force=True)
        if q is not None:
            q[greedy] = F.one_hot(best.indices[:, 0], vocab_size).float()
    if sampled.any():
        drawn = torch.from_numpy(np.flatnonzero(sampled)).to(device)
        keys = noise_keys(rows, Stream.TARGET if coupled else Stream.DRAFT)[sampled]
        found, noisy = gumbel_top(
            processed if sampled.all() else processed[drawn],
            torch.from_numpy(keys).to(device),
            shape[1],
            1 if coupled else None,
        )
        tokens[sampled], scores[sampled] = found.numpy(force=True), noisy.numpy(force=True)
    with np.errstate(invalid="ignore"):  # nothing may follow a row of -inf
        scores -= np.logaddexp.reduce(scores, axis=1, keepdims=True)
    if ids is not None:
        tokens = ids.numpy(force=True)[tokens]
    return Drafts(torch.from_numpy(tokens), torch.from_numpy(scores), q)


def _widened(logits: Tensor, vocab_size: int, ids: Tensor | None) -> Tensor:
    """f32[K,V] of f32[K,W]: a column for every token of the target, -inf where there was none."""
    if ids is not None:
        wide = logits.new_full((len(logits), vocab_size), -torch.inf)
        wide[:, ids] = logits
        return wide
    missing = vocab_size - logits.shape[1]
    return F.pad(logits, (0, missing), value=-torch.inf) if missing else logits


@dataclass(frozen=True)
class TokenLogprobs:
    """How probable one emitted token was to the model, before any processing."""

    token: int
    logprob: float
    """natural logarithm"""
    top: tuple[tuple[int, float], ...]
    """the most probable tokens and their log-probabilities, best first"""


def token_logprobs(
    logits: Tensor, tokens: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """Log-probabilities of tokens under raw logits.

    Args:
        logits: f32[L,V], unprocessed.
        tokens: [L], the token emitted at each row.
        counts: [L], how many of the most probable tokens to report for each row.
    """
    logprobs = logits.log_softmax(1)
    chosen = torch.tensor(tokens, device=logits.device)[:, None]
    top = logprobs.topk(min(max(counts), logits.shape[1]))
    # f64 holds token ids exactly, so one transfer brings everything
    packed = torch.cat([logprobs.gather(1, chosen), top.values, top.indices], 1).double().tolist()
    half = top.indices.shape[1]
    return [
        TokenLogprobs(
            token,
            row[0],
            tuple((int(i), v) for v, i in zip(row[1 : n + 1], row[half + 1 :], strict=False)),
        )
        for token, n, row in zip(tokens, counts, packed, strict=True)
    ]


def _edits(r: Rows) -> bool:
    """Whether penalties, biases or exclusions touch these rows."""
    p = r.params
    penalised = p.repetition_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0
    return penalised or bool(p.logit_bias or p.bad_words) or _too_short(r, 0)


def _too_short(r: Rows, ahead: int) -> bool:
    return len(r.tokens) - r.prompt_len + ahead < r.params.min_tokens


def _edit(logits: Tensor, r: Rows) -> None:
    """The first half of `process`, in place, on the rows f32[len,V] of one sequence."""
    p = r.params
    if p.repetition_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0:
        _penalise(logits, r)
    if p.logit_bias:
        ids = torch.tensor(list(p.logit_bias), device=logits.device)
        logits[:, ids] += torch.tensor(list(p.logit_bias.values()), device=logits.device)
    for row, (node, ahead) in enumerate(zip(r.nodes.tolist(), r.ahead.tolist(), strict=True)):
        excluded = list(r.end_tokens) if _too_short(r, ahead) else []
        if p.bad_words:
            longest = max(map(len, p.bad_words)) - 1
            drafted = [int(r.tree.tokens[n]) for n in r.tree.path(node)]
            recent = [*r.tokens[max(0, len(r.tokens) - longest) :], *drafted]
            excluded += [w[-1] for w in p.bad_words if _ends_with(recent, w[:-1])]
        if excluded:
            logits[row, torch.tensor(excluded, device=logits.device)] = -torch.inf


def _ends_with(tokens: list[int], word: tuple[int, ...]) -> bool:
    return tuple(tokens[len(tokens) - len(word) :]) == word


def _penalise(logits: Tensor, r: Rows) -> None:
    """Repetition penalty (CTRL, arXiv 1909.05858, section 4.1), then frequency and presence."""
    p, tree = r.params, r.tree
    tokens = np.asarray(r.tokens, dtype=np.int64)
    committed = len(tokens)
    ids, where = np.unique(np.concatenate([tokens, tree.tokens[tree.trunk :]]), return_inverse=True)
    # occurrences in the output, per row: committed ones and those on the row's drafted path
    counts = np.zeros((len(r), len(ids)), dtype=np.float32)
    counts += np.bincount(where[r.prompt_len : committed], minlength=len(ids))
    np.add.at(counts.T, where[committed:], r.drafted_path.T)
    seen = (counts > 0) | (np.bincount(where[: r.prompt_len], minlength=len(ids)) > 0)

    device = logits.device
    at = torch.from_numpy(ids).to(device)
    values, occurrences = logits[:, at], torch.from_numpy(counts).to(device)
    repeated = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    values = torch.where(torch.from_numpy(seen).to(device), repeated, values)
    values -= p.frequency_penalty * occurrences + p.presence_penalty * (occurrences > 0)
    logits[:, at] = values
