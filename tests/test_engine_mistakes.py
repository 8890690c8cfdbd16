"""Wrong requests, options and drafters: each is refused in one line that names it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.core.tree import DraftProposal
from ridgeline.errors import ConfigError, DraftError, RequestError, UnsupportedModelError
from tests.engines import GREEDY, FixedDrafter, tiny_llm, tiny_loaded, torch_module


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
        ({"depth": -1}, "depth is -1; it must be an integer, at least 0"),
        ({"depth": "3"}, "depth is '3'; it must be an integer"),
        ({"depth": None}, "depth is None; it must be an integer"),
        ({"kv_tokens": 1e6}, "kv_tokens is 1000000.0; it must be an integer"),
        ({"prefix_sharing": 1}, "prefix_sharing is 1; it must be true or false"),
        ({"verify": ["match"]}, "must be one of match, rejection, block"),
        ({"drafter": None}, "drafter is None; it must be a string"),
        ({"threads": "2"}, "threads is '2'; it must be an integer"),
        ({"nodes": 65}, "nodes is 65; at most 64"),
        ({"verify": "typical"}, "must be one of match, rejection, block"),
        ({"kv_tokens": 0}, "kv_tokens is 0"),
        ({"max_batch": 0}, "max_batch is 0"),
        ({"max_batch": 64, "max_batch_tokens": 32}, "max_batch is 64; it must be at most"),
        ({"tree": 3}, "no option 'tree'"),
        ({"drafter": "oracel"}, "no drafter 'oracel'; the drafters are"),
        ({"threads": 0}, "threads is 0"),
        ({"threads": True}, "threads is True; it must be an integer"),
        ({"draft_quantize": ["int8"]}, "must be int8, int4 or none"),
        ({"draft_dtype": None}, "dtype is None; it must be auto, bfloat16"),
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


def test_siblings_that_bear_the_same_token_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = DraftProposal(np.array([7, 8, 7]), np.array([-1, -1, -1], np.int32))
    monkeypatch.setattr(FixedDrafter, "propose", lambda self, requests: [twins])
    with pytest.raises(DraftError, match="drafter fixed: two siblings bear the same token"):
        tiny_llm("llama", "fixed:5").generate([[5, 6]], GREEDY)


def test_a_model_that_is_no_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="model is None; it must be a hub id"):
        LLM(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", [None, 5, 2.5, b"text", [None], [[5, "six"]], [5, "six"], [{}]])
def test_what_is_no_prompt_is_refused(prompt: object) -> None:
    llm = tiny_llm()
    with pytest.raises(RequestError):
        llm.generate(prompt, GREEDY)  # type: ignore[arg-type]
    assert not llm.engine.has_work


@pytest.mark.parametrize("params", ["greedy", 3, [3], {}, [GREEDY, GREEDY]])
def test_what_are_no_parameters_is_refused(params: object) -> None:
    with pytest.raises(RequestError, match=r"^params is |^1 prompts but 2 sets"):
        tiny_llm().generate([[5, 6]], params)  # type: ignore[arg-type]


def test_prompts_may_be_arrays_and_tensors() -> None:
    llm, ids = tiny_llm(), [5, 6, 7]
    expected = llm.generate(ids, GREEDY)[0].token_ids
    for prompt in (tuple(ids), np.array(ids), torch.tensor(ids), torch.tensor([ids])):
        assert llm.generate(prompt, GREEDY)[0].token_ids == expected


@pytest.mark.parametrize(
    ("proposals", "message"),
    [
        (None, "returned NoneType for 1 requests"),
        ([], "returned 0 for 1 requests"),
        ([None], "drafter fixed: "),
        ([[7, 8]], "drafter fixed: "),
        (RuntimeError("two\nlines"), "drafter fixed failed: RuntimeError: two lines"),
    ],
)
def test_a_drafter_that_fails_is_named(
    proposals: object, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def propose(self: FixedDrafter, requests: object) -> object:
        if isinstance(proposals, Exception):
            raise proposals
        return proposals

    monkeypatch.setattr(FixedDrafter, "propose", propose)
    with pytest.raises(DraftError, match=message):
        tiny_llm("llama", "fixed:5").generate([[5, 6]], GREEDY)


@pytest.mark.parametrize("method", ["observe", "forget"])
def test_a_drafter_that_fails_after_a_step_is_named(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("lost")

    monkeypatch.setattr(FixedDrafter, method, fail)
    with pytest.raises(DraftError, match="drafter fixed failed: KeyError"):
        tiny_llm("llama", "fixed:5").generate([[5, 6]], GREEDY)


@pytest.mark.parametrize(
    ("q", "message"),
    [
        (torch.full((1, 272), torch.nan), "row 0 of q has the smallest value nan"),
        (torch.ones(1, 272), "the sum 272; it must be a distribution"),
        (torch.cat([torch.tensor([[-1.0, 2.0]]), torch.zeros(1, 270)], 1), "the smallest value -1"),
        (torch.full((1, 272), 1 / 272, dtype=torch.float64), "q is of torch.float64"),
    ],
)
def test_a_q_that_is_no_distribution_is_refused(
    q: torch.Tensor, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposal = DraftProposal.chain([7], q)
    monkeypatch.setattr(FixedDrafter, "propose", lambda self, requests: [proposal] * len(requests))
    llm = tiny_llm("llama", "fixed:5", verify="block")
    with pytest.raises(DraftError, match=message):
        llm.generate([[5, 6]], SamplingParams(temperature=1.0, seed=1))


def test_drafts_that_are_no_integers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    proposal = DraftProposal(np.array([7.5]), np.array([-1], np.int32))  # type: ignore[arg-type]
    monkeypatch.setattr(FixedDrafter, "propose", lambda self, requests: [proposal] * len(requests))
    with pytest.raises(DraftError, match=r"tokens are float64\[1\]; they must be integers"):
        tiny_llm("llama", "fixed:5").generate([[5, 6]], GREEDY)


def test_logits_that_are_no_numbers_are_refused() -> None:
    loaded = tiny_loaded(seed=77)
    for parameter in torch_module(loaded).parameters():
        parameter.fill_(torch.nan)
    with pytest.raises(UnsupportedModelError, match="logits are not finite numbers"):
        LLM(loaded, kv_tokens=64).generate([[5, 6]], GREEDY)


def test_a_loaded_model_has_its_number_format() -> None:
    with pytest.raises(ConfigError, match="loaded already"):
        LLM(tiny_loaded(), dtype="float32", kv_tokens=64)
    with pytest.raises(ConfigError, match="quantize is 'auto'"):
        LLM("model", quantize="auto")


def test_a_cache_beyond_the_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_tokens is 10000000000000, which takes .* are free"):
        tiny_llm(kv_tokens=10**13)


def test_text_that_is_not_unicode_is_refused() -> None:
    for prompt in ("caf\udce9", [{"role": "user", "content": "\ud800"}]):
        with pytest.raises(RequestError, match="not valid Unicode at its character"):
            tiny_llm().generate(prompt)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (None, "bad_words is None; it must be a list of texts"),
        ("word", "bad_words is 'word'; it must be a list of texts"),
        ([1], "bad_words holds 1; each word must be a text"),
        ([None], "bad_words holds None; each word must be a text"),
        ([""], "bad_words holds an empty text"),
    ],
)
def test_bad_words_that_are_no_texts_are_refused(words: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        tiny_llm().bad_words(words)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["draft_dtype", "draft_quantize"])
def test_options_of_absent_draft_weights_are_checked_too(name: str) -> None:
    with pytest.raises(ConfigError, match="'zz'"):
        tiny_llm(**{name: "zz"})
