"""The draft model: what its vocabulary and tokenizer must have in common with the target's."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ridgeline import ConfigError, EngineConfig, ModelLoadError
from ridgeline.draft import model as model_module
from ridgeline.draft.base import create_drafter
from ridgeline.engine import Engine
from tests.draft_models import GREEDY, SAMPLED, padded, relative, run, start
from tests.engines import random_prompts, tiny_loaded
from tests.tiny import tiny_tokenizer


@pytest.mark.parametrize("rule", ["match", "rejection"])
@pytest.mark.parametrize("wider", ["target", "draft"])
def test_vocabularies_may_differ_by_padding(wider: str, rule: str) -> None:
    target, draft = tiny_loaded(), relative()
    if wider == "target":
        target = padded(target, 320)
    else:
        draft = padded(draft, 320)
    engine, drafter = start(draft, target, verify=rule, nodes=6)
    prompts = random_prompts(2, seed=6)
    run(engine, prompts, GREEDY)
    hot = replace(SAMPLED, top_k=0, temperature=1.5)
    texts = [s.output for s in run(engine, prompts, hot)]
    assert sum(drafter.accepted) > 10
    if wider == "target":
        assert max(map(max, texts)) >= 272  # an id that the draft model does not have was fed


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_vocabularies_of_151936_and_152064(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of Qwen's small and large models, which have the same tokenizer."""
    target = padded(tiny_loaded(), 151_936)
    draft = padded(target, 152_064)  # gives weight to ids that the target does not have
    monkeypatch.setattr(model_module, "load_model", lambda *_, **__: draft)
    engine, drafter = start(draft, target, verify=rule, nodes=6, max_batch=2)
    assert create_drafter("model:other", drafter._context) is not None
    prompts = random_prompts(2, seed=6)
    plain = Engine(target, None, EngineConfig(kv_tokens=2048))
    expected = [s.output for s in run(plain, prompts, GREEDY)]
    assert [s.output for s in run(engine, prompts, GREEDY)] == expected
    assert sum(drafter.accepted) > 10
    texts = [s.output for s in run(engine, prompts, SAMPLED)]
    if rule == "match":
        assert texts == [s.output for s in run(plain, prompts, SAMPLED)]


def retokenized(change: str) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    inner = tokenizer.backend_tokenizer
    if change == "padding":
        tokenizer.add_tokens([f"[PAD{i}]" for i in range(5)])
    elif change == "spaces":
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex("."), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    elif change == "order":
        state = inner.to_str().replace('"th": 260', '"th": 261').replace('"in": 261', '"in": 260')
        state = state.replace('"th":260', '"th":261').replace('"in":261', '"in":260')
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=type(inner).from_str(state))
    return tokenizer


@pytest.mark.parametrize("change", ["none", "padding", "spaces", "order"])
def test_another_tokenizer_is_refused(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(relative(), tokenizer=retokenized(change))
    monkeypatch.setattr(model_module, "load_model", lambda *_, **__: other)
    context = start()[1]._context
    if change in ("none", "padding"):
        assert create_drafter("model:other", context) is not None
        return
    reason = {"spaces": "they encode 'Hello", "order": "token 26[01] is '"}[change]
    with pytest.raises(ConfigError, match="tokenizer than the target tiny-llama: " + reason):
        create_drafter("model:other", context)


def test_a_path_is_needed() -> None:
    context = start()[1]._context
    with pytest.raises(ConfigError, match="model:PATH"):
        create_drafter("model", context)
    with pytest.raises(ModelLoadError, match="no-such-model"):
        create_drafter("model:./no-such-model", context)
