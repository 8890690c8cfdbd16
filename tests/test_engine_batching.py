"""Memory, prefix sharing, batching, features and figures of the engine."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.core.batch import Batch
from ridgeline.core.sequence import FinishReason
from ridgeline.core.tree import DraftProposal
from ridgeline.draft.base import DraftContext, DraftRequest, Needs, Observation, register
from ridgeline.errors import RequestError
from ridgeline.model.target import TargetOutput
from ridgeline.model.torch_target import TorchTarget
from tests.engines import (
    GREEDY,
    TRUTH,
    SimpleDrafter,
    oracle,
    plain_output,
    random_prompts,
    tiny_llm,
    tiny_loaded,
)

# Memory


@cache
def storm() -> tuple[list[list[int]], list[SamplingParams], list[list[list[int]]]]:
    """200 prompts, their parameters, and what each gives alone; known to the oracle drafter."""
    rng = random.Random(0)
    prompts = random_prompts(200, seed=12, longest=60)
    params = [
        SamplingParams(
            max_tokens=rng.randint(1, 40), temperature=rng.choice([0.0, 1.0]), seed=i, n=1 + i % 2
        )
        for i in range(200)
    ]
    solo = tiny_llm(prefix_sharing=False)
    alone = []
    for prompt, one in zip(prompts, params, strict=True):
        alone.append([c.token_ids for c in solo.generate([prompt], one)[0].completions])
        TRUTH[tuple(prompt)] = prompt + alone[-1][0]
    return prompts, params, alone


@pytest.mark.parametrize("drafter", ["none", "ngram", "oracle:6"])
def test_storm_of_requests_leaves_nothing_behind(drafter: str) -> None:
    prompts, params, alone = storm()
    rng = random.Random(0)
    llm = tiny_llm("llama", drafter, kv_tokens=16 * 14, max_batch=8, max_batch_tokens=48)
    engine = llm.engine
    queued = [engine.add(p, q) for p, q in zip(prompts, params, strict=True)]
    doomed = [s for group in queued for s in group if rng.random() < 1 / 3]
    preempted = set()
    while engine.has_work:
        engine.step()
        preempted |= {s.id for s in engine.scheduler.waiting if s.output_len}
        if doomed and rng.random() < 0.4:
            engine.abort(doomed.pop(rng.randrange(len(doomed))))
    assert preempted
    assert engine.pool.used == 0
    assert engine.pool.free == engine.pool.num_blocks
    aborted, drafts = 0, 0
    for group, outputs in zip(queued, alone, strict=True):
        for sequence, output in zip(group, outputs, strict=True):
            drafts += sequence.speculation.accepted
            if sequence.finish_reason is FinishReason.ABORT:
                aborted += 1
                assert sequence.output == output[: sequence.output_len]
            else:
                assert sequence.output == output
    assert aborted > 50
    assert (drafts > 0) == (drafter != "none")


def count_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every forward pass from now on."""
    counts: list[int] = []
    forward = TorchTarget.forward

    def counted(target: TorchTarget, batch: Batch, features: Sequence[int] = ()) -> TargetOutput:
        counts.append(len(batch.tokens))
        return forward(target, batch, features)

    monkeypatch.setattr(TorchTarget, "forward", counted)
    return counts


@pytest.mark.parametrize("drafter", ["none", "ngram", "oracle:7"])
def test_shared_prefix_is_computed_once(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = [5 + i * 7 % 250 for i in range(1000)]
    first, second = [*prefix, 9], [*prefix, 10, 11]
    loaded = tiny_loaded(max_position_embeddings=1200)
    plain = LLM(loaded, prefix_sharing=False, kv_tokens=1200)
    alone = plain.generate([second], GREEDY)[0].token_ids
    TRUTH[tuple(second)] = second + alone
    llm = LLM(loaded, drafter=drafter, kv_tokens=1200, max_batch_tokens=2048, policy="fixed")
    llm.generate([first], GREEDY)
    counts = count_tokens(monkeypatch)
    output = llm.generate([second], GREEDY)[0]
    assert counts[0] == 1002 - 992  # 62 blocks of sixteen are there
    assert output.token_ids == alone
    if drafter.startswith("oracle"):
        assert output.completions[0].speculation.accepted > 0


# Batching


def test_decoding_never_waits_for_prefill_or_drafts() -> None:
    llm = tiny_llm("llama", "oracle:8", max_batch=6, max_batch_tokens=8, nodes=8, depth=4)
    engine = llm.engine
    first = [engine.add([5, 6, 7 + i], GREEDY)[0] for i in range(3)]
    while any(sequence.output_len == 0 for sequence in first):
        engine.step()
    engine.add([5 + i % 90 for i in range(150)], GREEDY)  # nineteen chunks and more
    while engine.has_work:
        before = [sequence.output_len for sequence in first]
        running = [sequence.finish_reason is None for sequence in first]
        engine.step()
        for sequence, count, runs in zip(first, before, running, strict=True):
            assert sequence.output_len > count or not runs


def test_requests_join_and_leave_at_any_step() -> None:
    prompts = random_prompts(6, seed=21)
    alone = [tiny_llm().generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
    engine = tiny_llm("llama", "ngram").engine
    sequences = []
    for prompt in prompts:
        sequences += engine.add(prompt, GREEDY)
        engine.step()
        engine.step()
    while engine.has_work:
        engine.step()
    assert [sequence.output for sequence in sequences] == alone


class FeatureDrafter(SimpleDrafter):
    """Reads hidden states, keeps them by token index, and drafts from their last row."""

    name = "feature"

    def __init__(self) -> None:
        self.needs = Needs(features=(1, 3))
        self.seen: dict[int, dict[int, torch.Tensor]] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftProposal]:
        proposals = []
        for request in requests:
            rows = self.seen[request.sequence.id]
            row = rows[len(request.sequence.tokens) - 2]
            proposals.append(DraftProposal.chain([int(row.argmax()) % 200]))
        return proposals

    def observe(self, observations: Sequence[Observation]) -> None:
        for seen in observations:
            rows = self.seen.setdefault(seen.sequence.id, {})
            path = np.arange(seen.tree.trunk)
            if seen.check:
                path = np.concatenate([path, seen.check.path[1:]])
            features = torch.cat(seen.features, dim=-1)
            for i, node in enumerate(path.tolist()):
                rows[seen.start + i] = features[node]


@register("feature")
def _feature(argument: str, context: DraftContext) -> FeatureDrafter:
    return FeatureDrafter()


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_prompt_with_a_drafter_that_reads_features(chunk: int) -> None:
    prompt = [5 + i * i % 250 for i in range(150)]
    whole = tiny_llm("llama", "feature")
    pieces = tiny_llm("llama", "feature", max_batch=1, max_batch_tokens=chunk)
    outputs = [llm.generate([prompt], GREEDY)[0].token_ids for llm in (whole, pieces)]
    assert outputs[0] == outputs[1] == plain_output(prompt, GREEDY)
    seen = [llm.drafter.seen[0] for llm in (whole, pieces)]  # type: ignore[union-attr]
    assert set(range(len(prompt))) <= seen[0].keys()
    for i in range(len(prompt)):
        torch.testing.assert_close(seen[0][i], seen[1][i], atol=1e-4, rtol=1e-4)


def test_interrupt_keeps_what_was_written() -> None:
    prompts = random_prompts(3, seed=40)
    llm = tiny_llm("llama", "ngram", max_batch=2)
    whole = [output.token_ids for output in tiny_llm().generate(prompts, GREEDY)]
    completions = {}
    for i, event in enumerate(llm.stream(prompts, GREEDY)):
        if i == 5:
            llm.interrupt()
        if event.completion:
            completions[event.index] = event.completion
    assert {completion.finish_reason for completion in completions.values()} == {"abort"}
    for index, completion in completions.items():
        assert completion.token_ids == whole[index][: len(completion.token_ids)]
    assert not llm.engine.has_work
    assert llm.engine.pool.used == 0


def test_interrupt_shows_what_was_held_back() -> None:
    prompt = random_prompts(1, seed=41)[0]
    text = tiny_llm().generate([prompt], GREEDY)[0].text
    # A stop string that the text begins to spell out, and never ends: all of it is held back.
    llm = tiny_llm()
    shown = ""
    for i, event in enumerate(llm.stream([prompt], replace(GREEDY, stop=(text + "?",)))):
        shown += event.text
        if i == 5:
            assert shown == ""
            llm.interrupt()
    assert event.completion
    assert shown == event.completion.text
    assert len(shown) > 2
    assert text.startswith(shown)


def test_one_stream_at_a_time_whatever_the_threads() -> None:
    llm = tiny_llm()
    prompts = random_prompts(4, seed=42)
    expected = llm.generate(prompts, GREEDY)
    barrier, refused, done = threading.Barrier(6), [], []

    def generate() -> None:
        barrier.wait()
        try:
            done.append(llm.generate(prompts, GREEDY))
        except RequestError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=generate) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) + len(done) == 6
    assert all("is generating already" in message for message in refused)
    for outputs in done:
        assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert llm.engine.pool.used == 0


# Figures


def test_all_rejected_is_one_token_a_step() -> None:
    prompt = random_prompts(1, seed=2)[0]
    output = plain_output(prompt, GREEDY)
    wrong = next(token for token in range(4, 260) if token not in output)
    completion = tiny_llm("llama", f"fixed:{wrong}").generate([prompt], GREEDY)[0].completions[0]
    figures = completion.speculation
    assert figures.steps == 23  # the first token comes from the prompt's own pass
    assert (figures.drafted, figures.accepted) == (22, 0)  # none where one token is left
    assert figures.acceptance_by_position == [0.0]


def test_figures_of_a_perfect_chain() -> None:
    prompt = random_prompts(1, seed=2)[0]
    output = plain_output(prompt, GREEDY)
    chain = ",".join(map(str, output[1:4]))
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    completion = tiny_llm("llama", f"fixed:{chain}", depth=3).generate([prompt], params)[0]
    figures = completion.completions[0].speculation
    assert (figures.steps, figures.drafted, figures.accepted) == (1, 3, 3)
    assert figures.acceptance_by_position == [1.0, 1.0, 1.0]


def test_depth_zero_is_no_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = random_prompts(1, seed=2)[0]
    llm = tiny_llm("llama", "fixed:5,6", depth=0)
    assert llm.drafter is None
    counts = count_tokens(monkeypatch)
    llm.generate([prompt], GREEDY)
    assert counts == [len(prompt)] + [1] * 23


@pytest.mark.parametrize("top", [0, 3])
def test_logprobs_equal_undrafted_ones(top: int) -> None:
    prompt = random_prompts(2, seed=14)[1]
    params = SamplingParams(
        max_tokens=24, temperature=0.8, seed=1, logprobs=top, repetition_penalty=1.2
    )
    plain = tiny_llm().generate([prompt], params)[0].completions[0]
    TRUTH[tuple(prompt)] = prompt + plain.token_ids
    drafted = oracle().generate([prompt], params)[0].completions[0]
    assert drafted.speculation.accepted > 0
    assert plain.logprobs is not None
    assert drafted.logprobs is not None
    assert len(drafted.logprobs) == len(drafted.token_ids) == len(plain.logprobs)
    for one, other in zip(plain.logprobs, drafted.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [t for t, _ in one.top] == [t for t, _ in other.top]
        assert len(one.top) == top
