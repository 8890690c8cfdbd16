"""A real model: speculation, batching and prefix sharing change no token, in any number format."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.draft.heads import SHIPPED
from ridgeline.model.fetch import demo_model
from ridgeline.model.load import LoadedModel, load_model

pytestmark = pytest.mark.smollm2

PROMPTS = [
    "Repeat this list twice: red, green, blue, yellow, purple.",
    "Write a JSON array of three objects with the keys id, name and email.",
    "Why is the sky blue? Answer in two sentences.",
]
SAMPLED = [
    SamplingParams(max_tokens=40),
    SamplingParams(max_tokens=40, temperature=0.8, seed=1),
    SamplingParams(max_tokens=40, temperature=1.0, top_p=0.9, seed=2, repetition_penalty=1.1),
]
SHORT = [SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=1.0, seed=3)]
HEADS = sorted(file.parent for file in SHIPPED.glob("smollm2-135m-instruct/*/config.json"))
FORMATS: dict[str, dict[str, str]] = {
    "4 bit": {},
    "int8": {"dtype": "float32", "quantize": "int8"},
    "bf16": {"dtype": "bfloat16"},
    "fp32": {"dtype": "float32"},
}


@pytest.fixture(scope="module", params=FORMATS)
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return load_model(str(demo_model()), **FORMATS[request.param])


def run(llm: LLM, params: SamplingParams) -> tuple[list[list[int]], int]:
    """The texts' tokens, and how many drafts were accepted."""
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    outputs = llm.generate(chats, params)
    accepted = sum(output.completions[0].speculation.accepted for output in outputs)
    return [output.token_ids for output in outputs], accepted


@pytest.fixture(scope="module")
def plain(loaded: LoadedModel) -> list[list[list[int]]]:
    llm = LLM(loaded, kv_tokens=4096, max_batch=1)
    return [run(llm, params)[0] for params in SAMPLED]


@pytest.mark.parametrize(("drafter", "nodes"), [("ngram", 8), ("ngram", 16), ("model", 4)])
@pytest.mark.parametrize("batch", [1, 3])
def test_text_is_the_plain_one(
    loaded: LoadedModel, plain: list[list[list[int]]], drafter: str, nodes: int, batch: int
) -> None:
    spec = f"model:{demo_model()}" if drafter == "model" else drafter
    llm = LLM(
        loaded, drafter=spec, policy="fixed", nodes=nodes, max_batch=batch, kv_tokens=4096, depth=4
    )
    for params, expected in zip(SAMPLED, plain, strict=True):
        for _ in range(2):  # the second time from cached blocks
            tokens, accepted = run(llm, params)
            assert tokens == expected
            assert accepted > 0 or not params.greedy


@pytest.fixture(scope="module")
def short(loaded: LoadedModel) -> list[list[list[int]]]:
    llm = LLM(loaded, kv_tokens=4096)
    return [run(llm, params)[0] for params in SHORT]


@pytest.mark.parametrize("loaded", ["4 bit", "bf16"], indirect=True)
@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.name)
@pytest.mark.parametrize("nodes", [3, 8], ids=["chain", "tree"])
def test_text_with_a_shipped_head_is_the_plain_one(
    loaded: LoadedModel, short: list[list[list[int]]], head: Path, nodes: int
) -> None:
    llm = LLM(
        loaded,
        drafter=f"{head.name}:{head}",
        policy="fixed",
        nodes=nodes,
        depth=3,
        confidence=0.0,
        kv_tokens=4096,
    )
    for params, expected in zip(SHORT, short, strict=True):
        tokens, accepted = run(llm, params)
        assert tokens == expected
        assert accepted > 0


def test_a_head_ships() -> None:
    assert HEADS, "else the test above checks nothing"


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["ngram", "model"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_two_hundred_texts_are_the_plain_ones(
    loaded: LoadedModel, drafter: str, temperature: float
) -> None:
    spec = f"model:{demo_model()}" if drafter == "model" else drafter
    words = ("rivers", "code", "a poem", "numbers", "a letter", "history", "food", "a table")
    prompts = [f"{i}. Tell me about {words[i % 8]} in {i + 2} words." for i in range(200)]
    params = SamplingParams(max_tokens=128, temperature=temperature, seed=7)
    texts = [
        [
            output.token_ids
            for output in LLM(loaded, drafter=name, depth=4, policy="fixed").generate(
                prompts, params
            )
        ]
        for name in ("none", spec)
    ]
    assert texts[0] == texts[1]
