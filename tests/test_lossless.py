"""Speculation changes no token: every drafter, every family, greedy and sampled (fp32)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ridgeline import LLM, SamplingParams
from tests.engines import TRUTH, random_prompts, tiny_llm, tiny_loaded
from tests.tiny import EOS, FAMILIES, save_tiny

TOKENS = 24
PARAMS = {
    "greedy": SamplingParams(max_tokens=TOKENS, ignore_eos=True),
    "seeded": SamplingParams(
        max_tokens=TOKENS, temperature=0.9, top_k=40, top_p=0.95, seed=7, ignore_eos=True
    ),
    "penalties": SamplingParams(
        max_tokens=TOKENS,
        temperature=0.7,
        min_p=0.01,
        seed=11,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        presence_penalty=-0.3,
        logit_bias={9: 1.5, 17: -4.0},
        bad_words=((30,), (40, 41)),
        min_tokens=8,
    ),
}


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Draft models of each family: the target's own weights, and other ones."""
    folder = tmp_path_factory.mktemp("drafts")
    return {
        f"{family}-{seed}": save_tiny(family, folder / f"{family}-{seed}", seed)
        for family in FAMILIES
        for seed in (0, 1)
    }


def run(llm: LLM, kind: str) -> list[list[int]]:
    outputs = llm.generate(random_prompts(4, seed=3), PARAMS[kind])
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_drafter_gives_the_plain_output(
    family: str, kind: str, drafts: dict[str, Path]
) -> None:
    prompts = random_prompts(4, seed=3)
    plain = run(tiny_llm(family), kind)
    for prompt, output in zip(prompts, plain, strict=True):
        TRUTH[tuple(prompt)] = prompt + output
    same, other = drafts[f"{family}-0"], drafts[f"{family}-1"]
    accepted = {}
    for drafter, nodes in [
        ("ngram", 4),
        ("ngram", 12),
        ("oracle:1", 16),
        (f"model:{same}", 4),
        (f"model:{other}", 4),
        (f"model:{same}", 10),
    ]:
        llm = tiny_llm(family, drafter, depth=4, nodes=nodes, max_batch=3, draft_dtype="float32")
        outputs = llm.generate(prompts, PARAMS[kind])
        assert [output.token_ids for output in outputs] == plain, drafter
        accepted[drafter, nodes] = sum(o.completions[0].speculation.accepted for o in outputs)
    assert accepted["oracle:1", 16] > 0
    assert accepted[f"model:{same}", 4] > accepted[f"model:{other}", 4]


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_greedy_is_the_same_under_every_rule(rule: str, drafts: dict[str, Path]) -> None:
    plain = run(tiny_llm(), "greedy")
    for drafter in ("ngram", f"model:{drafts['llama-0']}", f"model:{drafts['llama-1']}"):
        llm = tiny_llm("llama", drafter, verify=rule, depth=4, draft_dtype="float32")
        assert run(llm, "greedy") == plain, drafter


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 8, 16])
def test_repeated_prompt_with_any_depth(depth: int) -> None:
    loaded = tiny_loaded(max_position_embeddings=512)
    prompt = "serving" * 48
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    plain = LLM(loaded, kv_tokens=512).generate([prompt], params)[0].token_ids
    drafted = LLM(loaded, drafter="ngram", depth=depth, kv_tokens=512, policy="fixed").generate(
        [prompt], params
    )[0]
    assert drafted.token_ids == plain
    assert drafted.completions[0].speculation.drafted > 0


@pytest.mark.parametrize(
    "edit",
    [
        {"min_p": 0.1},
        {"logit_bias": {9: 2.5, 17: -100.0}},
        {"bad_words": ((30,), (40, 41))},
        {"frequency_penalty": 2.0},
        {"frequency_penalty": -2.0},
        {"presence_penalty": 1.5},
        {"repetition_penalty": 1.3},
        {"min_tokens": 20, "logit_bias": {EOS: 3.0}, "ignore_eos": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_each_parameter_with_several_drafts_accepted_a_step(
    edit: dict[str, Any], temperature: float
) -> None:
    prompts = random_prompts(4, seed=3)
    params = SamplingParams(
        **{"max_tokens": 40, "temperature": temperature, "seed": 7, "ignore_eos": True, **edit}
    )
    plain = [output.token_ids for output in tiny_llm().generate(prompts, params)]
    for prompt, output in zip(prompts, plain, strict=True):
        TRUTH[tuple(prompt)] = prompt + output
    outputs = tiny_llm("llama", "oracle:1", depth=6, nodes=16).generate(prompts, params)
    assert [output.token_ids for output in outputs] == plain
    for output in outputs:
        figures = output.completions[0].speculation
        assert figures.accepted > figures.steps  # more than one draft a step
