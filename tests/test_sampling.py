"""Processing, truncation and drawing against references that do it the slow and obvious way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from ridgeline.core import groups, truncation
from ridgeline.core.groups import argmax
from ridgeline.core.noise import Stream
from ridgeline.core.sampling import (
    Rows,
    SamplingParams,
    draw,
    noise_keys,
    process,
    token_logprobs,
)
from ridgeline.core.tree import DraftProposal, TokenTree, graft
from ridgeline.core.truncation import truncate
from ridgeline.prove.faults import last_token_penalised

PROMPT, OUTPUT = [5, 6, 7, 5], [8, 9, 8]
V = 40
# 10 -> (11 -> 13, 12), 14 -> 10: a tree in which depth and index differ, and tokens repeat
DRAFTS = DraftProposal(np.array([10, 14, 11, 12, 10, 8]), np.array([-1, -1, 0, 0, 1, 2], np.int32))


def rows_of(params: SamplingParams, nodes: list[int] | None = None, seed: int = 3) -> Rows:
    tree = graft(OUTPUT[-1:], DRAFTS, V)
    order = np.arange(tree.size) if nodes is None else np.array(nodes)
    return Rows(params, seed, PROMPT + OUTPUT, len(PROMPT), frozenset([2, 3]), tree, order)


def undrafted(rows: Rows, index: int) -> Rows:
    """The row as plain decoding would see it: every token on its path is committed."""
    path = [int(rows.tree.tokens[n]) for n in rows.tree.path(int(rows.nodes[index]))]
    tokens = [*rows.tokens, *path]
    return replace(rows, tokens=tokens, tree=TokenTree.plain(tokens[-1:]), nodes=np.array([0]))


def random_logits(rows: int, width: int = V, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * scale


def reference(logits: Tensor, rows: Rows) -> Tensor:
    """One row, one token after another, from the definitions; rows must be undrafted."""
    p, x = rows.params, logits.double().clone()
    tokens = list(rows.tokens)
    output = tokens[rows.prompt_len :]
    for token in range(len(x)):
        if token in tokens:
            x[token] = (
                x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
            )
        x[token] -= p.frequency_penalty * output.count(token)
        x[token] -= p.presence_penalty * (token in output)
        x[token] += p.logit_bias.get(token, 0.0)
        for word in p.bad_words:
            if word[-1] == token and tokens[len(tokens) - len(word) + 1 :] == list(word[:-1]):
                x[token] = -torch.inf
    if len(output) < p.min_tokens:
        x[list(rows.end_tokens)] = -torch.inf
    return x if p.greedy else reference_truncation(x / p.temperature, p)


def reference_truncation(x: Tensor, p: SamplingParams) -> Tensor:
    x = x.clone()
    if 0 < p.top_k < len(x):
        x[x < x.sort(descending=True).values[p.top_k - 1]] = -torch.inf
    if p.top_p < 1:
        probabilities = x.softmax(0).sort(descending=True).values
        needed = int((probabilities.cumsum(0) < p.top_p).sum())
        x[x.softmax(0) < probabilities[min(needed, len(x) - 1)]] = -torch.inf
    if p.min_p > 0:
        x[x < x.max() + np.log(p.min_p)] = -torch.inf
    return x


EDITS = {
    "repetition": {"repetition_penalty": 1.3},
    "repetition below 1": {"repetition_penalty": 0.7},
    "frequency +2": {"frequency_penalty": 2.0},
    "frequency -2": {"frequency_penalty": -2.0},
    "presence": {"presence_penalty": 1.5},
    "bias": {"logit_bias": {4: 5.0, 11: -100.0}},
    "bad words": {"bad_words": ((1,), (8, 10), (8, 10, 11), (9, 8, 14), (10, 12, 3))},
    "min_tokens": {"min_tokens": 5},
    "all": {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.3,
        "logit_bias": {8: -1.0},
        "bad_words": ((8, 14),),
        "min_tokens": 4,
    },
}
CUTS = {
    "none": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "all": {"top_k": 12, "top_p": 0.9, "min_p": 0.02},
}


def assert_per_node(params: SamplingParams) -> None:
    """Each node of a tree is processed as plain decoding would, the whole path counted."""
    rows = rows_of(params)
    logits = random_logits(len(rows))
    before = logits.clone()
    processed = process(logits, [rows])
    assert torch.equal(logits, before)
    for i in range(len(rows)):
        expected = reference(logits[i], undrafted(rows, i))
        torch.testing.assert_close(processed[i].double(), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(processed[i], process(logits[i : i + 1], [undrafted(rows, i)])[0])


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_edits_act_per_node(edit: str, temperature: float) -> None:
    assert_per_node(SamplingParams(temperature=temperature, **EDITS[edit]))


@pytest.mark.parametrize("cut", CUTS)
def test_truncation_follows_edits_and_temperature(cut: str) -> None:
    assert_per_node(SamplingParams(temperature=0.7, **EDITS["all"], **CUTS[cut]))


def test_fault_penalties_that_see_the_last_token_only() -> None:
    with last_token_penalised(), pytest.raises(AssertionError):
        assert_per_node(SamplingParams(frequency_penalty=1.0))


def test_fault_min_tokens_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Rows.ahead.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Rows, "ahead", property(lambda rows: right(rows) + 1))
    with pytest.raises(AssertionError):
        assert_per_node(SamplingParams(min_tokens=5))


def test_untouched_where_nothing_applies() -> None:
    logits = random_logits(14)
    plain = rows_of(SamplingParams(temperature=1.0, top_k=V, min_tokens=3))
    greedy = rows_of(SamplingParams(top_k=1, top_p=0.1, min_p=0.5))
    assert process(logits, [plain, greedy]) is logits


def test_sequences_do_not_touch_each_other() -> None:
    many = [
        rows_of(SamplingParams()),
        rows_of(SamplingParams(temperature=0.7, **EDITS["all"]), [2, 4]),
        rows_of(SamplingParams(temperature=1.0)),
        rows_of(SamplingParams(temperature=1.3, **CUTS["all"]), [0]),
        rows_of(SamplingParams(**EDITS["repetition"])),
    ]
    logits = random_logits(sum(map(len, many)))
    together = process(logits, many)
    start = 0
    for rows in many:
        end = start + len(rows)
        assert torch.equal(together[start:end], process(logits[start:end], [rows]))
        start = end


@pytest.mark.parametrize("first_look", [1, 32])
@pytest.mark.parametrize("width", [7, 32, 1000, 5003])
@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0, 200.0])
def test_truncation_equals_sorting(
    first_look: int, width: int, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the first look is too narrow, and where many logits are equal (rounded ones)."""
    monkeypatch.setattr(groups, "FIRST_LOOK", first_look)
    monkeypatch.setattr(truncation, "NUCLEUS", first_look)
    params = [
        SamplingParams(temperature=1.0, top_k=k, top_p=p, min_p=m)
        for k in (0, 1, 6, 40)
        for p in (1.0, 0.999999, 0.9, 0.3, 1e-6)
        for m in (0.0, 0.05, 1.0)
    ]
    exact = random_logits(len(params), width, scale=scale)
    for logits in (exact, exact.round()):
        kept = truncate(
            logits,
            np.array([p.top_k for p in params]),
            np.array([p.top_p for p in params]),
            np.array([p.min_p for p in params]),
        )
        for i, p in enumerate(params):
            assert_same_cut(logits[i], kept[i], p)


def assert_same_cut(logits: Tensor, kept: Tensor, params: SamplingParams) -> None:
    survives = kept > -torch.inf
    assert torch.equal(kept[survives], logits[survives])
    expected = reference_truncation(logits.double(), params)
    if torch.equal(survives, expected > -torch.inf):
        return
    # otherwise rounding decided, and only upon tokens of next to no probability
    odd = survives != (expected > -torch.inf)
    assert logits.double().softmax(0)[odd].sum() < 1e-5


def test_a_row_is_cut_alike_alone_and_in_a_batch() -> None:
    logits = random_logits(9, 3000)
    k, p, m = np.tile([0, 20, 0], 3), np.tile([0.95, 0.8, 1.0], 3), np.tile([0.0, 0.0, 0.01], 3)
    together = truncate(logits, k, p, m)
    for i in range(9):
        alone = truncate(logits[i : i + 1], k[i : i + 1], p[i : i + 1], m[i : i + 1])
        assert torch.equal(alone[0], together[i])


def test_argmax_takes_the_first_of_equals() -> None:
    logits = random_logits(50, 333).round()
    logits[0] = 0.0
    first = [int((row == row.max()).nonzero()[0]) for row in logits]
    assert argmax(logits).tolist() == first


def test_draw_is_a_function_of_seed_position_and_row() -> None:
    """Alone or in a batch, beside greedy rows, in a tree or undrafted: the same token."""
    sampled = rows_of(SamplingParams(temperature=1.0), seed=11)
    other = rows_of(SamplingParams(temperature=1.0), seed=12)
    greedy = rows_of(SamplingParams())
    logits = random_logits(7, scale=1.0)
    together = draw(logits.repeat(3, 1), [sampled, greedy, other]).split(7)
    assert torch.equal(together[0], draw(logits, [sampled]))
    assert torch.equal(together[1], logits.argmax(1))
    assert torch.equal(together[2], draw(logits, [other]))
    assert not torch.equal(together[0], together[2])
    for i in range(7):
        assert draw(logits[i : i + 1], [undrafted(sampled, i)]) == together[0][i]


def test_streams_differ() -> None:
    rows = rows_of(SamplingParams(temperature=1.0))
    assert len({tuple(noise_keys([rows], stream)) for stream in Stream}) == len(Stream)


def test_logprobs_of_raw_logits() -> None:
    logits = random_logits(3)
    expected = logits.log_softmax(1)
    entries = token_logprobs(logits, [4, 0, 39], [2, 0, 5])
    for row, entry, token, n in zip(expected, entries, [4, 0, 39], [2, 0, 5], strict=True):
        assert entry.token == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-6)
        best = row.topk(n)
        assert [i for i, _ in entry.top] == best.indices.tolist()
        assert [v for _, v in entry.top] == pytest.approx(best.values.tolist(), abs=1e-6)


def test_no_overflow_at_the_smallest_temperatures() -> None:
    logits = random_logits(1, 1000, scale=1.0)
    logits *= 80 / logits.abs().max()
    for temperature in (1e-6, 1e-5, 1e-3, 0.05):
        rows = rows_of(SamplingParams(temperature=temperature, top_p=0.9, min_p=0.01), [0])
        processed = process(logits, [rows])
        assert not processed.isnan().any()
        assert int(draw(processed, [rows])) == int(logits.argmax()) or temperature == 0.05
