"""Draft heads: the layouts they come in, what they draft, and that the text does not change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ridgeline import LLM, SamplingParams
from ridgeline.config import EngineConfig
from ridgeline.core.batch import Batch
from ridgeline.core.tree import DraftProposal
from ridgeline.draft import create_drafter, recurrent
from ridgeline.draft.base import DraftContext, Drafter, DraftRequest
from ridgeline.draft.paged_head import NativeHead, TorchHead
from ridgeline.draft.recurrent import RecurrentDrafter
from ridgeline.engine import Engine
from ridgeline.errors import ConfigError, ModelLoadError, RidgelineError, UnsupportedModelError
from ridgeline.model.load import LoadedModel, load_model
from tests.engines import random_prompts, tiny_loaded, torch_module
from tests.extension import native
from tests.heads import METHODS, write_head
from tests.tiny import FAMILIES, save_tiny

SEEDED = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8, seed=3)
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


def texts(target: LoadedModel, drafter: str, params: SamplingParams, **options: Any) -> list[Any]:
    llm = LLM(target, drafter=drafter, kv_tokens=4096, policy="fixed", **options)
    prompts = random_prompts(4, seed=5)
    return [o.token_ids for o in llm.generate(prompts, params)]


def check_texts(target: LoadedModel, drafter: str, depth: int) -> None:
    """Greedy and sampled texts are those of plain decoding, with chains and with trees."""
    for params in (GREEDY, SEEDED):
        plain = texts(target, "none", params)
        for nodes in (4, 12):
            options = {"depth": depth, "nodes": nodes, "confidence": 0.0}
            assert texts(target, drafter, params, **options) == plain


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_does_not_change(method: str, family: str, tmp_path: Path) -> None:
    target = tiny_loaded(family)
    check_texts(target, write_head(method, tmp_path, target), depth=4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("options", [{}, {"draft_vocab": 50}, {"pickled": True}])
def test_layouts(method: str, options: dict[str, Any], tmp_path: Path) -> None:
    if method == "mtp" and "draft_vocab" in options:
        pytest.skip("its layout has no draft vocabulary")
    target = tiny_loaded()
    spec = write_head(method, tmp_path, target, **options)
    assert texts(target, spec, GREEDY) == texts(target, "none", GREEDY)


class Recording:
    """Keeps what a drafter proposes, and to what."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.seen: list[tuple[list[int], DraftProposal]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftProposal]:
        proposals = self._drafter.propose(requests)
        for request, proposal in zip(requests, proposals, strict=True):
            self.seen.append((list(request.sequence.tokens), proposal))
        return proposals


def run(
    target: LoadedModel, spec: str, params: SamplingParams, longer: int = 0, **options: Any
) -> Recording:
    """Three texts, the last one `longer` tokens longer."""
    defaults = {"kv_tokens": 4096, "depth": 4, "confidence": 0.0, "policy": "fixed"}
    config = EngineConfig(**{**defaults, **options})
    context = DraftContext(
        target, True, config.depth, config.draft_nodes, 512, "float32", None, config.confidence
    )
    drafter = create_drafter(spec, context)
    assert drafter is not None
    recording = Recording(drafter)
    engine = Engine(target, recording, config)
    for prompt, more in zip(random_prompts(3, seed=7), (0, 0, longer), strict=True):
        engine.add(prompt, replace(params, max_tokens=params.max_tokens + more))
    while engine.has_work:
        engine.step()
    return recording


def hidden_states(target: LoadedModel, tokens: list[int]) -> tuple[Tensor, ...]:
    """[L,H] by index, as `Target.forward` numbers them, without a cache."""
    module = torch_module(target)
    module.set_attn_implementation("eager")
    states = module(
        torch.tensor([tokens]), output_hidden_states=True, use_cache=False
    ).hidden_states
    module.set_attn_implementation("ridgeline")
    return tuple(state[0] for state in states)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
@pytest.mark.parametrize("max_batch_tokens", [512, 9])
def test_drafts_are_those_of_the_head_alone(
    method: str, max_batch_tokens: int, tmp_path: Path
) -> None:
    """The paged, step by step computation against one over the whole text."""
    target = tiny_loaded()
    spec = write_head(method, tmp_path, target)
    options = {"nodes": 4, "max_batch": 3, "max_batch_tokens": max_batch_tokens}
    recording = run(target, spec, GREEDY, prefix_sharing=False, **options)
    assert check_drafts(target, spec, recording) > 80


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
@pytest.mark.parametrize("most_waiting", [1024, 7])
def test_drafts_after_a_pause(
    method: str, most_waiting: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is drafted until two of three texts have ended; then the third lacks nothing."""
    monkeypatch.setattr(recurrent, "MOST_WAITING", most_waiting)
    rows: list[int] = []
    original = TorchHead.run

    def counted(head: TorchHead, batch: Batch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        rows.append(len(batch.tokens))
        return original(head, batch, hidden)

    monkeypatch.setattr(TorchHead, "run", counted)
    target = tiny_loaded()
    spec = write_head(method, tmp_path, target)
    options = {"policy": "table:1=4", "nodes": 4, "prefix_sharing": False}
    recording = run(target, spec, GREEDY, longer=16, **options)
    monkeypatch.undo()
    _prompts, *waited = rows
    if most_waiting == 1024:
        assert waited[0] == GREEDY.max_tokens, "no pass before the first draft"
    else:
        assert waited[:3] == [7, 8, 9], "one text a step"
    assert check_drafts(target, spec, recording) > 12


def check_drafts(target: LoadedModel, spec: str, recording: Recording) -> int:
    """Every drafted chain against one pass over the whole text; how many tokens it compared."""
    context = DraftContext(target, True, 4, 4, 512, "float32", None)
    drafter = create_drafter(spec, context)
    assert isinstance(drafter, RecurrentDrafter)
    (head,), (ids,) = drafter._heads, drafter._draft_ids
    assert isinstance(head, TorchHead)
    network = head._network
    checked = 0
    for tokens, proposal in recording.seen:
        if not len(proposal):
            continue
        states = hidden_states(target, tokens[:-1])
        features = torch.cat([states[i] for i in network.shape.features], -1)
        hidden, fed = network.hidden_from(features), tokens[1:]
        chain: list[int] = []
        for _ in range(4):
            logits, after = alone(network, target, fed, hidden)
            best = int(logits[-1].argmax())
            chain.append(best if ids is None else int(ids[best]))
            hidden = torch.cat([hidden, after[-1:]])
            fed = [*fed, chain[-1]]
        found, node = [], -1
        while len(found) < 4:
            children = np.flatnonzero(proposal.parents == node)
            if not len(children):
                break
            node = int(children[0])  # the likeliest comes first
            found.append(int(proposal.tokens[node]))
        assert found == chain[: len(found)]
        checked += len(found)
    return checked


def alone(network: Any, target: LoadedModel, tokens: list[int], hidden: Tensor) -> Any:
    """Logits [L,V] and next hidden states [L,H] of a causal pass over (token, hidden state)."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        share = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(share, 1).transpose(0, 1) for x in (key, value))
        result = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1), key, value, is_causal=True
        )
        return result.transpose(0, 1)

    embedding = target.model.embed(torch.tensor(tokens))
    carried = network(embedding, hidden, torch.arange(len(tokens)), attend)
    normed = network.normed(carried)
    logits = network.head(normed) if network.head else target.model.unembed(normed)
    return logits, network.next_hidden(carried)


@pytest.mark.skipif(native is None, reason="the extension is not built")
@pytest.mark.parametrize("method", METHODS)
def test_the_native_path_drafts_the_same(method: str, tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "target", **WIDE)
    target = load_model(str(folder), "float32")
    slow = tiny_loaded("llama", **WIDE)
    spec = write_head(method, tmp_path / "head", target)
    fast = run(target, spec, GREEDY, nodes=6)
    if method != "medusa":
        assert isinstance(fast._drafter._heads[0], NativeHead)
    other = run(slow, spec, GREEDY, nodes=6)
    assert len(fast.seen) == len(other.seen) > 10
    for (tokens, drafted), (same, expected) in zip(fast.seen, other.seen, strict=True):
        assert tokens == same
        assert drafted.tokens.tolist() == expected.tokens.tolist()
        assert drafted.parents.tolist() == expected.parents.tolist()


@pytest.mark.parametrize("method", METHODS)
def test_heads_of_other_models_are_refused_in_a_line(method: str, tmp_path: Path) -> None:
    target = tiny_loaded()
    spec = write_head(method, tmp_path / "wide", target, hidden=96)
    with pytest.raises(RidgelineError, match="made for this model"):
        LLM(target, drafter=spec)
    spec = write_head(method, tmp_path / "vocab", target, vocab=target.vocab_size + 40)
    if method in ("eagle3", "mtp", "medusa"):
        with pytest.raises(ConfigError, match="made for"):
            LLM(target, drafter=spec)


@pytest.mark.parametrize("method", METHODS)
def test_files_that_are_no_heads(method: str, tmp_path: Path) -> None:
    target = tiny_loaded()
    for content in (None, "[]", "{"):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(ModelLoadError):
            LLM(target, drafter=f"{method}:{tmp_path}")
    with pytest.raises(ConfigError, match=f"{method}:PATH"):
        LLM(target, drafter=method)
    (tmp_path / "config.json").write_text("{}")
    torch.save({"x": print}, tmp_path / "model.bin")  # code: a pickle that must not be run
    with pytest.raises(ModelLoadError, match="cannot be read"):
        LLM(target, drafter=f"{method}:{tmp_path}")


def test_unknown_parts_are_named(tmp_path: Path) -> None:
    target = tiny_loaded()
    spec = write_head("eagle3", tmp_path, target)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"extra.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"extra\.weight"):
        LLM(target, drafter=spec)
