"""The engine's promises beyond token equality: seeds, stops, limits, memory, sharing, figures."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.core.batch import Batch
from ridgeline.core.tree import DraftProposal
from ridgeline.draft.base import DraftContext, DraftRequest, Needs, Observation, register
from ridgeline.errors import ConfigError, DraftError, RequestError
from ridgeline.kv.store import KVStore
from ridgeline.model.target import Target, TargetOutput
from tests.engines import TRUTH, random_prompts, tiny_llm, tiny_loaded
from tests.tiny import EOS

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


class FixedDrafter:
    """Proposes the same chain at every step, cut to what is allowed unless it is stubborn."""

    needs = Needs()

    def __init__(self, name: str, tokens: list[int]) -> None:
        self.name = name
        self._tokens = tokens

    def bind(self, store: KVStore, first_layer: int) -> None:
        pass

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftProposal]:
        return [
            DraftProposal.chain(self._tokens[: None if self.name == "stubborn" else request.depth])
            for request in requests
        ]

    def observe(self, observations: Sequence[Observation]) -> None:
        pass

    def forget(self, sequence_id: int) -> None:
        pass


for _name in ("fixed", "stubborn"):

    @register(_name)
    def _fixed(argument: str, context: DraftContext, name: str = _name) -> FixedDrafter:
        return FixedDrafter(name, [int(token) for token in argument.split(",")])


def plain_output(prompt: list[int], params: SamplingParams) -> list[int]:
    """The undrafted output, made known to the oracle drafter."""
    output = tiny_llm().generate([prompt], params)[0].token_ids
    TRUTH[tuple(prompt)] = prompt + output
    return output


def oracle(nodes: int = 12, depth: int = 8, **options: object) -> LLM:
    return tiny_llm("llama", "oracle:5", nodes=nodes, depth=depth, **options)


# Seeds


def test_same_seed_same_text_alone_and_in_a_batch() -> None:
    prompts = random_prompts(4, seed=1)
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=20, ignore_eos=True)
        for seed in (1, 2, 3, 1)
    ]
    llm = tiny_llm("llama", "ngram")
    together = [output.token_ids for output in llm.generate(prompts, params)]
    alone = [llm.generate([p], q)[0].token_ids for p, q in zip(prompts, params, strict=True)]
    assert together == alone


def test_without_a_seed_texts_differ() -> None:
    params = SamplingParams(temperature=1.5, max_tokens=20, ignore_eos=True)
    llm = tiny_llm()
    outputs = llm.generate([[5, 6, 7]] * 3, params)
    assert len({tuple(output.token_ids) for output in outputs}) == 3


@pytest.mark.parametrize("drafter", ["none", "ngram", "oracle:2"])
def test_n_samples_differ_and_come_again(drafter: str) -> None:
    prompt = random_prompts(2, seed=8)[1]
    params = SamplingParams(temperature=1.0, seed=5, n=4, max_tokens=16, ignore_eos=True)
    llm = tiny_llm("llama", drafter)
    first, second = (llm.generate([prompt], params)[0].completions for _ in range(2))
    samples = [completion.token_ids for completion in first]
    assert len({tuple(sample) for sample in samples}) == 4
    assert [completion.token_ids for completion in second] == samples
    one = SamplingParams(temperature=1.0, seed=5, max_tokens=16, ignore_eos=True)
    assert tiny_llm().generate([prompt], one)[0].token_ids == samples[0]


def test_n_samples_share_the_prompts_blocks() -> None:
    prompt = [5 + i % 200 for i in range(100)]  # six full blocks and a part of one
    llm = tiny_llm(prefix_sharing=False)
    params = SamplingParams(temperature=1.0, seed=5, n=4, max_tokens=8, ignore_eos=True)
    used = [llm.engine.pool.used for _ in llm.stream([prompt], params)]
    # Each sample writes into its own copy of the part, at most one block more later.
    assert max(used) <= 6 + 4 * 2
    assert llm.engine.pool.used == 0


# Stopping


def test_stop_inside_an_accepted_block() -> None:
    prompt = random_prompts(1, seed=2)[0]
    output = plain_output(prompt, GREEDY)
    stop = next(i for i in range(2, 20) if output[i] not in output[:i])
    params = SamplingParams(max_tokens=stop + 3, stop_token_ids=(output[stop],), ignore_eos=True)
    for llm in (tiny_llm(), tiny_llm("llama", "fixed:" + ",".join(map(str, output[1:9])), depth=8)):
        completion = llm.generate([prompt], params)[0].completions[0]
        assert completion.finish_reason == "stop"
        assert completion.token_ids == output[: stop + 1]
        assert completion.speculation.accepted <= stop
        follow = prompt + completion.token_ids + [9, 8, 7]
        fresh = tiny_llm(prefix_sharing=False).generate([follow], GREEDY)[0].token_ids
        assert llm.generate([follow], GREEDY)[0].token_ids == fresh


def test_rejected_end_token_does_not_end() -> None:
    prompt = random_prompts(1, seed=2)[0]
    params = SamplingParams(max_tokens=24)
    plain = tiny_llm().generate([prompt], params)[0]
    drafted = tiny_llm("llama", f"fixed:{EOS}").generate([prompt], params)[0]
    assert drafted.token_ids == plain.token_ids
    assert drafted.completions[0].finish_reason == plain.completions[0].finish_reason == "length"


def test_min_tokens_holds_off_a_drafted_end_token() -> None:
    prompt = random_prompts(1, seed=4)[0]
    ending = {EOS: 100.0}
    params = SamplingParams(max_tokens=24, logit_bias=ending)
    assert tiny_llm().generate([prompt], params)[0].token_ids == [EOS]
    params = SamplingParams(max_tokens=24, logit_bias=ending, min_tokens=7)
    for drafter in ("none", f"fixed:{EOS}", "oracle:3"):
        output = tiny_llm("llama", drafter).generate([prompt], params)[0].token_ids
        assert len(output) == 8
        assert output[7] == EOS
        assert EOS not in output[:7]


def test_stop_string_over_tokens_and_steps() -> None:
    prompt = random_prompts(1, seed=6)[0]
    output = plain_output(prompt, GREEDY)
    llm = tiny_llm()
    text = llm.generate([prompt], GREEDY)[0].text
    tokenizer = llm.loaded.tokenizer
    assert tokenizer is not None
    for start in range(4, 14):
        stop = text[start : start + 4]
        if "\ufffd" in stop or text.find(stop) != start:
            continue
        params = SamplingParams(max_tokens=24, stop=(stop, "never this"), ignore_eos=True)
        for engine in (tiny_llm(), oracle(), tiny_llm("llama", "ngram")):
            events = list(engine.stream([prompt], params))
            completion = events[-1].completion
            assert completion is not None
            assert completion.finish_reason == "stop"
            assert completion.text == text[:start]
            assert "".join(p.text for e in events for p in e.pieces) == text[:start]
            assert completion.token_ids == output[: len(completion.token_ids)]
            kept = tokenizer.decode(completion.token_ids)
            assert stop in kept
            assert stop not in tokenizer.decode(completion.token_ids[:-1])
        return
    pytest.fail("no readable stop string in the output")


@pytest.mark.parametrize("drafter", ["none", "oracle:4"])
def test_stream_adds_up_to_the_text(drafter: str) -> None:
    prompts = random_prompts(6, seed=9)
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
    llm = tiny_llm("llama", drafter, max_batch=4)
    shown = [""] * len(prompts)
    for event in llm.stream(prompts, params):
        shown[event.index] += "".join(piece.text for piece in event.pieces)
        if event.completion:
            assert event.completion.text == shown[event.index]
            assert llm.loaded.tokenizer is not None
            ids = event.completion.token_ids
            assert shown[event.index] == llm.loaded.tokenizer.decode(ids, skip_special_tokens=True)


# Limits


def test_depth_is_clamped_at_the_context() -> None:
    loaded = tiny_loaded(max_position_embeddings=128)
    prompt = [5 + i % 50 for i in range(124)]
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    llm = LLM(loaded, drafter="stubborn:5,6,7,8,9,10,11,12", depth=8, kv_tokens=256)
    with pytest.raises(DraftError, match=r"drafter stubborn: 8 nodes, 8 deep"):
        llm.generate([prompt], params)
    llm = LLM(loaded, drafter="fixed:1,2,3,4,5,6,7,8", depth=8, kv_tokens=128)
    completion = llm.generate([prompt], params)[0]
    assert completion.completions[0].finish_reason == "length"
    assert len(completion.token_ids) == 4
    with pytest.raises(RequestError, match="context of 128 leaves room for a prompt of at most"):
        llm.request([5] * 128)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], SamplingParams(), "the prompt is empty"),
        ("", SamplingParams(), "the prompt is empty"),
        ([5, 272], SamplingParams(), "token id 272 is outside the vocabulary, 0..271"),
        ([5], SamplingParams(logit_bias={999: 1.0}), "token id 999"),
        ([5], SamplingParams(bad_words=((3, 400),)), "token id 400"),
        ([5] * 40, SamplingParams(max_tokens=100), "make 140 tokens; the cache holds 64"),
    ],
)
def test_wrong_requests_are_refused(
    prompt: list[int] | str, params: SamplingParams, message: str
) -> None:
    llm = tiny_llm(kv_tokens=64)
    with pytest.raises(RequestError, match=message):
        llm.generate([prompt], params)
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": -1}, "depth is -1; it must be at least 0"),
        ({"nodes": 65}, "nodes is 65; at most 64"),
        ({"verify": "typical"}, "must be one of match, rejection, block"),
        ({"kv_tokens": 0}, "kv_tokens is 0"),
        ({"max_batch": 0}, "max_batch is 0"),
        ({"max_batch": 64, "max_batch_tokens": 32}, "max_batch_tokens is 32"),
        ({"tree": 3}, "no option 'tree'"),
        ({"drafter": "oracel"}, "no drafter 'oracel'; the drafters are"),
        ({"threads": 0}, "threads is 0"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(tiny_loaded(), **options)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [("300", "token 300 is outside 0..271"), ("-1", "token -1 is outside")],
)
def test_malformed_drafts_name_the_drafter(tokens: str, message: str) -> None:
    with pytest.raises(DraftError, match=f"drafter fixed: node 0: {message}"):
        tiny_llm("llama", f"fixed:{tokens}").generate([[5, 6]], GREEDY)


# Memory


@pytest.mark.parametrize("drafter", ["none", "ngram", "oracle:6"])
def test_storm_of_requests_leaves_nothing_behind(drafter: str) -> None:
    rng = random.Random(0)
    prompts = random_prompts(200, seed=12, longest=60)
    params = [
        SamplingParams(
            max_tokens=rng.randint(1, 40), temperature=rng.choice([0.0, 1.0]), seed=i, n=1 + i % 2
        )
        for i in range(200)
    ]
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
    solo = tiny_llm(prefix_sharing=False)
    for i in rng.sample(range(200), 40):
        alone = solo.generate([prompts[i]], params[i])[0].completions
        for sequence, completion in zip(queued[i], alone, strict=True):
            if sequence.finish_reason and sequence.finish_reason.value != "abort":
                assert sequence.output == completion.token_ids


def count_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every forward pass from now on."""
    counts: list[int] = []
    forward = Target.forward

    def counted(target: Target, batch: Batch, features: Sequence[int] = ()) -> TargetOutput:
        counts.append(len(batch.tokens))
        return forward(target, batch, features)

    monkeypatch.setattr(Target, "forward", counted)
    return counts


@pytest.mark.parametrize("drafter", ["none", "ngram", "oracle:7"])
def test_shared_prefix_is_computed_once(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = [5 + i * 7 % 250 for i in range(200)]
    llm = tiny_llm("llama", drafter)
    llm.generate([[*prefix, 9]], GREEDY)
    counts = count_tokens(monkeypatch)
    output = llm.generate([[*prefix, 10, 11]], GREEDY)[0].token_ids
    assert counts[0] == 202 - 192  # twelve blocks of sixteen are there
    alone = tiny_llm(prefix_sharing=False).generate([[*prefix, 10, 11]], GREEDY)[0].token_ids
    assert output == alone


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


class FeatureDrafter:
    """Reads hidden states, keeps them by token index, and drafts from their last row."""

    name = "feature"

    def __init__(self) -> None:
        self.needs = Needs(features=(1, 3))
        self.seen: dict[int, dict[int, torch.Tensor]] = {}

    def bind(self, store: KVStore, first_layer: int) -> None:
        pass

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

    def forget(self, sequence_id: int) -> None:
        pass


@register("feature")
def _feature(argument: str, context: DraftContext) -> FeatureDrafter:
    return FeatureDrafter()


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_prompt_with_a_drafter_that_reads_features(chunk: int) -> None:
    prompt = random_prompts(2, seed=30, longest=60)[1]
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
