"""The engine's promises beyond token equality: seeds, stops, limits."""

from __future__ import annotations

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.errors import DraftError, RequestError
from tests.engines import GREEDY, oracle, plain_output, random_prompts, tiny_llm, tiny_loaded
from tests.tiny import EOS

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
    llm = LLM(loaded, drafter="stubborn:5,6,7,8,9,10,11,12", depth=8, kv_tokens=256, policy="fixed")
    with pytest.raises(DraftError, match=r"drafter stubborn: 8 nodes, 8 deep"):
        llm.generate([prompt], params)
    llm = LLM(loaded, drafter="fixed:1,2,3,4,5,6,7,8", depth=8, kv_tokens=128, policy="fixed")
    completion = llm.generate([prompt], params)[0]
    assert completion.completions[0].finish_reason == "length"
    assert len(completion.token_ids) == 4
    with pytest.raises(RequestError, match="context of 128 leaves room for a prompt of at most"):
        llm.request([5] * 128)


def test_one_stream_at_a_time() -> None:
    llm = tiny_llm()
    stream = llm.stream([[5, 6, 7]], SamplingParams(max_tokens=8, ignore_eos=True))
    next(stream)
    with pytest.raises(RequestError, match="generating already; finish or close that stream"):
        llm.generate([[5, 6]], SamplingParams(max_tokens=2))
    rest = [event.completion for event in stream]
    assert rest[-1] is not None
    assert len(rest[-1].token_ids) == 8
    llm.generate([[5, 6]], SamplingParams(max_tokens=2))
