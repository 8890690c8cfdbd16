"""A real model: speculation changes no greedy token, and prefix sharing none either (fp32)."""

from __future__ import annotations

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.model.fetch import demo_model
from ridgeline.model.load import LoadedModel, load_model

pytestmark = pytest.mark.smollm2

PROMPTS = [
    "Repeat this list twice: red, green, blue, yellow, purple.",
    "Write a JSON array of three objects with the keys id, name and email.",
    "Why is the sky blue? Answer in two sentences.",
]
PARAMS = SamplingParams(max_tokens=48)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(str(demo_model()), "float32")


def run(llm: LLM) -> tuple[list[list[int]], int]:
    """The texts' tokens, and how many drafts were accepted."""
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    outputs = llm.generate(chats, PARAMS)
    accepted = sum(output.completions[0].speculation.accepted for output in outputs)
    return [output.token_ids for output in outputs], accepted


@pytest.fixture(scope="module")
def plain(loaded: LoadedModel) -> list[list[int]]:
    return run(LLM(loaded, kv_tokens=4096))[0]


@pytest.mark.parametrize(("drafter", "nodes"), [("ngram", 8), ("ngram", 16), ("model", 4)])
@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_text_is_the_plain_one(
    loaded: LoadedModel, plain: list[list[int]], drafter: str, nodes: int, batch: int
) -> None:
    spec = f"model:{demo_model()}" if drafter == "model" else drafter
    llm = LLM(loaded, drafter=spec, nodes=nodes, max_batch=batch, kv_tokens=4096, depth=4)
    for _ in range(2):  # the second time from cached blocks
        tokens, accepted = run(llm)
        assert tokens == plain
        assert accepted > 0
