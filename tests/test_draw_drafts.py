"""What drafters draw: processed as the target's rows are, by the target's noise or their own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ridgeline.core import groups
from ridgeline.core.groups import gumbel_argmax, gumbel_top
from ridgeline.core.noise import GROUP, gumbel
from ridgeline.core.sampling import SamplingParams, draw, draw_drafts, process
from tests.simulation import assert_counts
from tests.test_sampling import V, random_logits, reference_truncation, rows_of

PENALTIES = {
    "repetition_penalty": 1.5,
    "frequency_penalty": 0.5,
    "presence_penalty": -1.0,
    "logit_bias": {3: 9.0, 11: -4.0},
    "bad_words": ((8, 12), (9,)),
}


@pytest.mark.parametrize("first_look", [1, 32])
@pytest.mark.parametrize("width", [5, 64, 2500])
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
def test_gumbel_argmax_equals_brute_force(
    first_look: int, width: int, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "FIRST_LOOK", first_look)
    scores = random_logits(400, width, scale=scale)
    scores[::3, : width // 2] = -torch.inf
    keys = torch.arange(400) * 2**55
    noise = gumbel(keys[:, None], torch.arange(width // GROUP + 1)).flatten(1)[:, :width]
    everything = scores + noise
    assert torch.equal(gumbel_argmax(scores, keys), everything.argmax(1))
    tokens, values = gumbel_top(scores, keys, 4)
    best = everything.topk(4)
    assert torch.equal(values, best.values)
    possible = best.values > -torch.inf
    assert torch.equal(tokens[possible], best.indices[possible])


@pytest.mark.parametrize("width", [V - 8, V, V + 8])
def test_coupled_drafts_are_what_the_target_would_draw(width: int) -> None:
    rows = rows_of(SamplingParams(temperature=0.9, top_k=9, frequency_penalty=0.5))
    logits = random_logits(len(rows), width)
    drafts = draw_drafts(logits, [rows], V, coupled=True)
    assert drafts.q is None
    target = torch.full((len(rows), V), -torch.inf)
    target[:, : min(width, V)] = logits[:, :V]
    assert torch.equal(drafts.tokens[:, 0], draw(process(target, [rows]), [rows]))


@pytest.mark.parametrize("width", [V - 8, V, V + 8])
def test_independent_drafts_come_with_their_distribution(width: int) -> None:
    params = SamplingParams(temperature=0.8, top_k=10)
    one = rows_of(params, [0])
    many = [replace(one, seed=seed) for seed in range(5_000)]
    logits = random_logits(1, width).expand(len(many), -1)
    drafts = draw_drafts(logits, many, V, coupled=False)
    tokens, q = drafts.tokens[:, 0], drafts.q
    assert q is not None
    assert q.shape == (len(many), V)
    assert int((q[0] > 0).sum()) == 10
    padded = torch.full((V,), -torch.inf)
    padded[: min(width, V)] = logits[0, :V]
    processed = reference_truncation(padded.double() / 0.8, params).softmax(0)
    torch.testing.assert_close(q[0].double(), processed, rtol=1e-5, atol=1e-6)
    frequencies = torch.bincount(tokens, minlength=V) / len(many)
    assert (frequencies - q[0]).abs().max() < 0.03
    # and are not what the target's own noise would have drawn
    coupled = draw_drafts(logits, many, V, coupled=True)
    assert (coupled.tokens[:, 0] == tokens).float().mean() < 0.9


def test_greedy_drafts_are_point_masses() -> None:
    rows = rows_of(SamplingParams())
    drafts = draw_drafts(random_logits(len(rows)), [rows], V, coupled=False)
    assert drafts.q is not None
    assert torch.equal(drafts.q, torch.nn.functional.one_hot(drafts.tokens[:, 0], V).float())


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("edits", [{}, PENALTIES], ids=["plain", "penalties"])
@pytest.mark.parametrize("top_k", [0, 6])
def test_some_ids_only(temperature: float, edits: dict[str, object], top_k: int) -> None:
    """The others are as if they had no probability; all else is as with the whole vocabulary."""
    params = SamplingParams(temperature=temperature, top_k=top_k, **edits)  # type: ignore[arg-type]
    rows = rows_of(params)
    ids = torch.tensor([3, 5, 8, 9, 10, 11, 12, 14, 20, 30])
    logits = random_logits(len(rows), len(ids))
    wide = torch.full((len(rows), V), -torch.inf)
    wide[:, ids] = logits
    processed = process(wide, [rows])
    drafts = draw_drafts(logits, [rows], V, coupled=True, count=4, ids=ids)
    assert drafts.q is None
    assert torch.equal(drafts.tokens[:, 0], draw(processed, [rows]))
    if temperature:
        drafts = draw_drafts(logits, [rows], V, coupled=False, count=4, ids=ids)
        assert drafts.q is not None
        assert torch.equal(drafts.q, processed.softmax(1))
        outside = torch.ones(V, dtype=torch.bool).index_fill(0, ids, False)
        assert not drafts.q[:, outside].any()
    else:
        assert torch.equal(drafts.tokens, processed.topk(4).indices)


def test_excluded_tokens_are_never_drafted() -> None:
    rows = rows_of(SamplingParams(temperature=1.0, top_k=2))
    for coupled in (True, False):
        drafts = draw_drafts(random_logits(len(rows)), [rows], V, coupled, count=5)
        assert (drafts.scores > -torch.inf).sum(1).tolist() == [2] * len(rows)
        assert (drafts.scores[:, :2] > -torch.inf).all()


def test_siblings_are_drawn_without_replacement() -> None:
    """Pairs in draw order, as drawing the second from what is left after the first gives them."""
    one = rows_of(SamplingParams(temperature=1.0), [0])
    many = [replace(one, seed=seed) for seed in range(20_000)]
    logits = random_logits(1, 5, scale=1.0).expand(len(many), -1)
    drafts = draw_drafts(logits, many, V, coupled=False, count=2)
    p = logits[0].double().softmax(0).numpy()
    expected = np.zeros((V, V))
    expected[:5, :5] = p[:, None] * p / (1 - p[:, None])
    np.fill_diagonal(expected, 0.0)
    first, second = drafts.tokens.numpy().T
    assert_counts(first * V + second, expected.flatten())
