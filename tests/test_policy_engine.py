"""Policies in the engine: the drafter is asked no more than they say, and no text changes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, count
from types import SimpleNamespace

import pytest

from ridgeline import SamplingParams
from ridgeline.core.tree import DraftProposal
from ridgeline.draft.base import DraftContext, DraftRequest, register
from tests.draft_models import GREEDY, SAMPLED, finish, run, start
from tests.engines import SimpleDrafter, tiny_llm


class CountingDrafter(SimpleDrafter):
    """Drafts what is never right, and counts what it is asked."""

    name = "counting"

    def __init__(self) -> None:
        self.asked: list[int] = []

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftProposal]:
        self.asked.append(len(requests))
        return [DraftProposal.chain([3] * request.depth) for request in requests]


@register("counting")
def _counting(argument: str, context: DraftContext) -> CountingDrafter:
    return CountingDrafter()


LONG = SamplingParams(max_tokens=200, ignore_eos=True, bad_words=((3,),))
PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [20, 21, 22, 23, 24]]


def test_where_nothing_may_be_drafted_the_drafter_is_not_asked() -> None:
    llm = tiny_llm("llama", "counting", policy="table:1=0")
    texts = [output.token_ids for output in llm.generate(PROMPTS, LONG)]
    assert llm.drafter.asked == []  # type: ignore[union-attr]
    assert texts == [output.token_ids for output in tiny_llm().generate(PROMPTS, LONG)]


def test_a_drafter_that_is_never_right_is_hardly_asked() -> None:
    llm = tiny_llm("llama", "counting", policy="goodput")
    llm.generate(PROMPTS, LONG)
    asked = llm.drafter.asked  # type: ignore[union-attr]
    assert asked
    figures = [llm.generate([p], LONG)[0].completions[0].speculation for p in PROMPTS]
    for found in figures:
        assert found.accepted == 0
        assert found.drafted_steps < found.steps / 2


@pytest.mark.parametrize("policy", ["table:1=4,2=1", "goodput"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_policy_changes_the_text(policy: str, temperature: float) -> None:
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=5, ignore_eos=True)
    alone = [output.token_ids for output in tiny_llm().generate(PROMPTS, params)]
    llm = tiny_llm("llama", "ngram:min=1", policy=policy, max_batch=2)
    assert [output.token_ids for output in llm.generate(PROMPTS, params)] == alone
    assert llm.engine.policy is not None


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_seeded_texts_do_not_depend_on_the_clock(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for seed in (0, 1):
        ticks = accumulate(random.Random(seed).choice([1e-3, 1.0]) for _ in count())
        monkeypatch.setattr("ridgeline.engine.time", SimpleNamespace(perf_counter=ticks.__next__))
        engine, drafter = start(verify=rule, policy=None)
        long = replace(SAMPLED, max_tokens=60)
        texts.append([s.output for s in run(engine, PROMPTS, long)])
        assert sum(drafter.accepted) > 20
    assert texts[0] == texts[1]


def test_a_draft_model_catches_up_after_a_pause() -> None:
    """Every draft is compared with the draft model's own over the whole text."""
    engine, drafter = start(policy="table:1=4")
    lengths = zip(PROMPTS, (20, 20, 40), strict=True)
    requests = [engine.add(prompt, replace(GREEDY, max_tokens=most)) for prompt, most in lengths]
    plain = tiny_llm().generate(PROMPTS, replace(GREEDY, max_tokens=40))
    finish(engine)
    fed = [len(positions) for positions in drafter.fed]
    assert 20 in fed, "all that it missed, in one pass"
    assert sum(drafter.accepted) > 5
    for (sequence,), output in zip(requests, plain, strict=True):
        assert sequence.output == output.token_ids[: sequence.output_len]
