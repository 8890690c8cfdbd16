"""The draft model: every proposal is what the draft model alone would have written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ridgeline import DraftError, EngineConfig, SamplingParams
from ridgeline.core.sampling import Drafts, Rows, draw_drafts
from ridgeline.core.tree import DraftProposal, graft
from ridgeline.draft import levels
from ridgeline.draft.base import DraftRequest, Observation
from ridgeline.draft.likeliest import CANDIDATES
from ridgeline.draft.model import ModelDrafter
from ridgeline.draft.sampled import sampled_shape
from ridgeline.engine import Engine
from tests.draft_models import GREEDY, PENALTIES, SAMPLED, finish, relative, run, start
from tests.engines import random_prompts, tiny_loaded
from tests.tiny import EOS


@pytest.mark.parametrize(
    ("rule", "params"),
    [
        ("match", GREEDY),
        ("match", PENALTIES),
        ("rejection", GREEDY),
        ("rejection", PENALTIES),
        ("block", SAMPLED),
    ],
    ids=["match", "match-sampled", "rejection", "rejection-sampled", "block-sampled"],
)
def test_proposals_are_those_of_the_model_alone(rule: str, params: SamplingParams) -> None:
    engine, drafter = start(verify=rule, max_batch=3, nodes=8)
    run(engine, random_prompts(6, seed=1), params)
    assert {0, 4} < set(drafter.accepted)  # rejected, accepted in part, accepted as a whole
    assert not drafter._held


@pytest.mark.parametrize(
    ("options", "params"),
    [
        ({"kv_tokens": 112, "max_batch": 4}, GREEDY),  # preempts
        ({"max_batch_tokens": 5, "max_batch": 2}, SAMPLED),  # prompts in small pieces
        ({"nodes": 9}, GREEDY),  # siblings
        ({"nodes": 9, "depth": 2, "kv_tokens": 112}, SAMPLED),
        ({"nodes": 2}, GREEDY),
    ],
    ids=["preempted", "pieces", "siblings", "all", "short"],
)
def test_whatever_the_engine_does(options: dict[str, int], params: SamplingParams) -> None:
    engine, drafter = start(**options)
    prompts = random_prompts(3, seed=2)
    texts = [s.tokens for s in run(engine, [*prompts, prompts[1]], replace(params, n=2))]
    assert sum(drafter.accepted) > 10
    plain = Engine(tiny_loaded(), None, EngineConfig(kv_tokens=2048))
    assert texts == [s.tokens for s in run(plain, [*prompts, prompts[1]], replace(params, n=2))]


def test_a_wrong_length_of_the_drafts_cache_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    observe = ModelDrafter.observe

    def wrong(self: ModelDrafter, observations: Sequence[Observation]) -> None:
        observe(self, observations)
        for seen in observations:  # counts the chain's last node, which was never fed
            seen.sequence.draft_len = seen.sequence.kv_len

    monkeypatch.setattr(ModelDrafter, "observe", wrong)
    engine, _ = start(verify="rejection")
    with pytest.raises(DraftError, match="not close"):
        run(engine, random_prompts(5, seed=1), SAMPLED)


def test_a_long_prompt_stalls_nobody() -> None:
    engine, drafter = start(max_batch_tokens=16, max_batch=2, depth=3)
    short, long = ([0, *range(20, 20 + n)] for n in (4, 120))
    [first] = engine.add(short, replace(GREEDY, max_tokens=40))
    [second] = engine.add(long, GREEDY)
    finish(engine)
    assert max(map(len, drafter.fed)) <= 16
    together = [sizes for sizes in drafter.sizes if {first.id, second.id} <= sizes.keys()]
    assert together
    assert all(sizes[first.id] > 0 and sizes[second.id] > 0 for sizes in together)


def test_a_shared_prefix_is_not_computed_again() -> None:
    engine, drafter = start()
    prompt = random_prompts(1, seed=4, longest=40)[0] * 3
    run(engine, [[*prompt, 50]], GREEDY)
    first = sum(map(len, drafter.fed))
    drafter.fed.clear()
    run(engine, [[*prompt, 60]], GREEDY)
    assert sum(map(len, drafter.fed)) < first - len(prompt) // 16 * 16 + 32
    assert min(map(min, drafter.fed)) >= len(prompt) // 16 * 16


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_past_the_drafts_context_generation_goes_on(params: SamplingParams) -> None:
    draft = relative(max_position_embeddings=40)
    assert draft.context_len == 40
    engine, drafter = start(draft)
    prompts = [[0, *range(20, 49)], [0, *range(20, 79)]]
    long = replace(params, max_tokens=40)
    texts = [s.tokens for s in run(engine, prompts, long)]
    assert [len(text) for text in texts] == [70, 100]
    assert 38 <= max(map(max, drafter.fed)) < 40
    assert not any(sizes.get(1) for sizes in drafter.sizes)  # the second is too long from the start
    plain = Engine(tiny_loaded(), None, EngineConfig(kv_tokens=2048))
    assert texts == [s.tokens for s in run(plain, prompts, long)]


PROCESSED = [
    PENALTIES,
    replace(GREEDY, frequency_penalty=1.0, logit_bias={9: 5.0, 17: -9.0}),
    replace(SAMPLED, top_k=0, top_p=0.7, presence_penalty=-1.0),
    replace(SAMPLED, top_k=0, min_p=0.1, bad_words=((30,), (40, 41))),
]


@pytest.mark.parametrize("params", PROCESSED, ids=["all", "greedy", "top_p", "min_p"])
def test_drafts_are_processed_as_the_target_s_rows_are(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target itself drafts, so that each first choice is right; unprocessed it is not."""

    def missed() -> int:
        engine, _ = start(relative(0.0), nodes=8)
        drafter = engine.drafter
        assert drafter is not None
        monkeypatch.setattr(drafter, "_check", lambda *_: None)
        figures = [s.speculation for s in run(engine, random_prompts(6, seed=4), params)]
        assert sum(f.accepted for f in figures) > 30
        return sum(sum(f.reached) - sum(f.passed) for f in figures)

    def unprocessed(logits: Tensor, rows: Sequence[Rows], *args: Any, **options: Any) -> Drafts:
        plain = SamplingParams(temperature=params.temperature)
        rows = [replace(r, params=plain) for r in rows]
        return draw_drafts(logits, rows, *args, **{**options, "count": 1})

    assert missed() == 0
    monkeypatch.setattr(levels, "draw_drafts", unprocessed)
    assert missed() > 0


def test_the_end_of_the_text_ends_the_chain() -> None:
    params = SamplingParams(max_tokens=24, logit_bias={EOS: 9.0})
    engine, drafter = start()
    proposals: list[DraftProposal] = []
    propose = drafter.propose
    drafter.propose = lambda requests: proposals.extend(made := propose(requests)) or made  # type: ignore[method-assign,func-returns-value]
    run(engine, random_prompts(8, seed=7), params)
    parents = {int(p.tokens[i]) for p in proposals for i in p.parents if i >= 0}
    assert any(EOS in p.tokens for p in proposals)
    assert len(parents) > 3
    assert EOS not in parents


def test_a_draft_that_will_hardly_be_accepted_ends() -> None:
    def inner_paths(confidence: float) -> list[float]:
        """The draft model's own probability of every path that was drafted on."""
        engine, drafter = start(depth=4, nodes=12, confidence=confidence)
        found: list[float] = []
        propose = drafter.propose

        def noted(requests: Sequence[DraftRequest]) -> list[DraftProposal]:
            proposals = propose(requests)
            for request, proposal in zip(requests, proposals, strict=True):
                tokens = request.sequence.tokens
                tree = graft(tokens[-1:], proposal, tiny_loaded().vocab_size)
                for node in set(proposal.parents[proposal.parents >= 0].tolist()):
                    path = tree.tokens[tree.path(node + 1)]
                    text = torch.tensor([[*tokens, *path]])
                    logprobs = drafter.alone(input_ids=text).logits[0].log_softmax(1)
                    along = logprobs[-len(path) - 1 : -1].gather(1, text[:, -len(path) :].T)
                    found.append(float(along.sum().exp()))
            return proposals

        drafter.propose = noted  # type: ignore[method-assign]
        run(engine, random_prompts(6, seed=12), GREEDY)
        return found

    # The estimate is among the likeliest candidates alone, so it lies above the probability.
    assert min(inner_paths(0.2)) >= 0.1
    assert min(inner_paths(0.0)) < 0.1


def test_trees_are_the_likeliest() -> None:
    """EAGLE-2 by brute force: two nodes of each level expanded, the eight best of all kept."""
    engine, drafter = start(depth=3, nodes=8)
    [sequence] = engine.add(random_prompts(1, seed=8)[0], GREEDY)
    proposals = []
    propose = drafter.propose
    drafter.propose = lambda requests: proposals.append(propose(requests)) or proposals[-1]  # type: ignore[method-assign]
    engine.step()
    tokens = list(sequence.tokens)
    engine.step()
    [[proposal]] = proposals
    level: list[tuple[float, list[int]]] = [(0.0, [])]
    drafted = []
    for _ in range(3):
        below = []
        for score, path in level:
            logits = drafter.alone(input_ids=torch.tensor([[*tokens, *path]])).logits[0, -1]
            best = logits.topk(CANDIDATES)
            logprobs = best.values.log_softmax(0).tolist()
            pairs = zip(logprobs, best.indices.tolist(), strict=True)
            below += [(score + logprob, [*path, token]) for logprob, token in pairs]
        drafted += below
        level = sorted(below, reverse=True)[:2]
    expected = [path for _, path in sorted(drafted, reverse=True)[:8]]
    tree = graft(tokens[-1:], proposal, tiny_loaded().vocab_size)
    found = [tree.tokens[tree.path(node)].tolist() for node in range(1, tree.size)]
    assert sorted(found) == sorted(expected)
    assert len({len(path) for path in found}) > 1


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_keys_and_values_of_accepted_nodes_are_kept(rule: str) -> None:
    """On any branch; but for nodes that lie behind one that was expanded and not kept."""
    engine, drafter = start(depth=4, nodes=16, verify=rule)
    run(engine, random_prompts(6, seed=9), replace(SAMPLED, max_tokens=40))
    behind = np.array(drafter.behind)
    assert behind.mean() < 2 < 1 + np.mean(drafter.accepted)
    if rule == "rejection":  # keeps all that it draws: only a leaf and the target's own are left
        assert set(behind.tolist()) == {1, 2}


def test_siblings_raise_acceptance_of_sampled_drafts_too() -> None:
    mean = {}
    for nodes in (3, 12):
        engine, drafter = start(depth=3, nodes=nodes)
        run(engine, random_prompts(6, seed=9), replace(SAMPLED, temperature=1.0, top_k=0))
        mean[nodes] = np.mean(drafter.accepted)
    assert mean[12] > mean[3]


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_sampled_drafts_are_of_a_fixed_shape(rule: str) -> None:
    engine, drafter = start(depth=3, nodes=9, verify=rule)
    run(engine, random_prompts(3, seed=1), replace(SAMPLED, ignore_eos=True))
    sizes = {size for sizes in drafter.sizes for size in sizes.values()}
    # less deep where the text's length is reached
    whole = {len(sampled_shape(9, depth)) - 1 for depth in range(4)}
    assert sizes <= (whole if rule == "rejection" else {0, 1, 2, 3})
    assert max(sizes) == (9 if rule == "rejection" else 3)


def test_an_aborted_sequence_is_forgotten() -> None:
    engine, drafter = start()
    [sequence] = engine.add([0, 20, 21], GREEDY)
    for _ in range(3):
        engine.step()
    engine.abort(sequence)
    assert not drafter._held
    assert not engine.has_work
