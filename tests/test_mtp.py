"""MTP modules: several in turn, both layouts, layers of other families, and the model's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ridgeline import LLM
from ridgeline.core.sequence import Sequence
from ridgeline.draft.block import BlockHead
from ridgeline.draft.paged_head import NativeHead, TorchHead
from ridgeline.errors import ConfigError, ModelLoadError, UnsupportedModelError
from ridgeline.model.load import LoadedModel, load_model
from ridgeline.schedule.scheduler import Scheduler
from tests.engines import tiny_loaded
from tests.extension import native
from tests.heads import write_head, write_modules
from tests.test_heads import (
    GREEDY,
    WIDE,
    Recording,
    alone,
    check_texts,
    hidden_states,
    run,
    texts,
)
from tests.tiny import FAMILIES, save_tiny

Module = Callable[[list[int], Tensor], tuple[Tensor, Tensor]]
"""From tokens [L] and hidden states [L,H], logits [L,V] and what the next step reads [L,H]."""
LAYOUTS = [{"modules": 1}, {"modules": 2}, {"modules": 3}, {"modules": 2, "qwen": True}]


def chain_alone(
    modules: list[Module], target: LoadedModel, tokens: list[int], depth: int
) -> list[int]:
    """Greedy drafts after `tokens`, every module computed over the whole text at every step.

    Module k's row for token i reads module k-1's row for token i-1; below the last token, whose
    state the target has not computed, module 0 reads what predicted.
    """
    states, fed, chain = hidden_states(target, tokens[:-1])[-1], list(tokens), []
    for step in range(depth):
        hidden = states
        for k, module in enumerate(modules):
            logits, after = module(fed[k + 1 :], hidden)
            if k == step % len(modules):
                chain.append(int(logits[-1].argmax()))
                states = torch.cat([states, after[-1:]])
            hidden = after[:-1]
        fed.append(chain[-1])
    return chain


def module_of(head: TorchHead, target: LoadedModel) -> Module:
    """A head of our own network, without pages."""
    return lambda tokens, hidden: alone(head._network, target, tokens, hidden)


def check_drafts(recording: Recording, target: LoadedModel, modules: list[Module]) -> int:
    """Compares the likeliest path of every proposal; returns the number of tokens compared."""
    checked = 0
    for tokens, proposal in recording.seen:
        if not len(proposal):
            continue
        found, node = [], -1
        while len(children := np.flatnonzero(proposal.parents == node)):
            node = int(children[0])  # the likeliest comes first
            found.append(int(proposal.tokens[node]))
        assert found == chain_alone(modules, target, tokens, len(found))
        checked += len(found)
    return checked


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("max_batch_tokens", [512, 9])
def test_drafts_are_those_of_the_modules_alone(
    layout: dict[str, Any], max_batch_tokens: int, tmp_path: Path
) -> None:
    target = tiny_loaded()
    spec = write_head("mtp", tmp_path, target, **layout)
    options = {"nodes": 4, "max_batch": 3, "max_batch_tokens": max_batch_tokens}
    recording = run(target, spec, GREEDY, prefix_sharing=False, **options)
    modules = [module_of(head, target) for head in recording._drafter._heads]
    assert len(modules) == layout["modules"]
    assert check_drafts(recording, target, modules) > 80


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_does_not_change(layout: dict[str, Any], family: str, tmp_path: Path) -> None:
    target = tiny_loaded(family)
    check_texts(target, write_head("mtp", tmp_path, target, **layout), depth=5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sequences_computed_again_draft_as_before(
    layout: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted, preempt = [], Scheduler._preempt

    def counted(scheduler: Scheduler, sequence: Sequence) -> None:
        preempted.append(sequence.output_len)
        preempt(scheduler, sequence)

    monkeypatch.setattr(Scheduler, "_preempt", counted)
    target = tiny_loaded()
    spec = write_head("mtp", tmp_path, target, **layout)
    recording = run(target, spec, GREEDY, prefix_sharing=False, kv_tokens=112, nodes=4)
    assert max(preempted) > 2
    modules = [module_of(head, target) for head in recording._drafter._heads]
    assert check_drafts(recording, target, modules) > 80


@pytest.mark.skipif(native is None, reason="the extension is not built")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_native_path_drafts_the_same(layout: dict[str, Any], tmp_path: Path) -> None:
    target = load_model(str(save_tiny("llama", tmp_path / "target", **WIDE)), "float32")
    spec = write_head("mtp", tmp_path / "head", target, **layout)
    fast = run(target, spec, GREEDY, nodes=6)
    assert isinstance(fast._drafter._heads[-1], NativeHead)
    other = run(tiny_loaded("llama", **WIDE), spec, GREEDY, nodes=6)
    assert len(fast.seen) == len(other.seen) > 10
    for (tokens, drafted), (same, expected) in zip(fast.seen, other.seen, strict=True):
        assert tokens == same
        assert drafted.tokens.tolist() == expected.tokens.tolist()
        assert drafted.parents.tolist() == expected.parents.tolist()


@pytest.mark.parametrize(
    ("family", "modules", "qwen"),
    [
        ("deepseek_v3", 1, False),
        ("deepseek_v3", 2, False),
        ("qwen3_moe", 1, False),
        ("glm4_moe_lite", 1, False),
        ("qwen3_next", 1, True),
        ("qwen3_next", 2, True),
    ],
)
def test_a_models_own_modules(family: str, modules: int, qwen: bool, tmp_path: Path) -> None:
    """Latent and gated attention, experts: against the family's own layers on the whole text."""
    model, around = write_modules(family, tmp_path, modules, qwen)
    if qwen:  # its linear layers, which real ones have, cannot run
        target = replace(tiny_loaded(family), source=str(tmp_path))
    else:
        target = load_model(str(tmp_path), "float32")
        assert len(target.model.layers) == 3
    plain = texts(target, "none", GREEDY)
    assert texts(target, "mtp", GREEDY, depth=3, nodes=8, confidence=0.0) == plain

    def module(k: int) -> Module:
        def compute(tokens: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
            return _layer_alone(model, around, k, qwen, target, tokens, hidden)

        return compute

    recording = run(target, "mtp", GREEDY, nodes=4, prefix_sharing=False)
    assert isinstance(recording._drafter._heads[0], BlockHead)
    assert check_drafts(recording, target, [module(k) for k in range(modules)]) > 80


def _layer_alone(
    model: Any,
    around: dict[str, Tensor],
    k: int,
    qwen: bool,
    target: LoadedModel,
    tokens: list[int],
    hidden: Tensor,
) -> tuple[Tensor, Tensor]:
    """Module k over a whole text, by transformers' eager attention."""
    decoder, eps = model.model, model.config.rms_norm_eps
    place = "mtp." if qwen else f"model.layers.{3 + k}."
    e, h, projection, final = (
        ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        if qwen
        else ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    )

    def normed(x: Tensor, name: str) -> Tensor:
        weight = around[f"{place}{name}.weight"] + (1 if qwen else 0)  # around 0, as Qwen3-Next's
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight

    embedding = target.model.embed(torch.tensor(tokens))
    x = torch.cat([normed(embedding, e), normed(hidden, h)], -1)
    x = (x @ around[f"{place}{projection}.weight"].T)[None]
    positions = torch.arange(len(tokens))[None]
    mask = torch.full((1, 1, len(tokens), len(tokens)), -torch.inf).triu(1)
    rotary = decoder.rotary_emb(x, positions)
    carried = decoder.layers[3 + k](
        x, position_embeddings=rotary, attention_mask=mask, position_ids=positions
    )[0]
    out = normed(carried, final)
    logits = (
        target.model.unembed(out) if qwen else out @ around[place + "shared_head.head.weight"].T
    )
    return logits, out if qwen else carried


def test_rotary_frequencies_and_expert_biases_stay_exact(tmp_path: Path) -> None:
    write_modules("deepseek_v3", tmp_path, 1)
    target = load_model(str(tmp_path), "bfloat16")
    (head,) = run(target, "mtp", GREEDY)._drafter._heads
    (other,) = run(load_model(str(tmp_path), "float32"), "mtp", GREEDY)._drafter._heads
    assert {p.dtype for p in head._network.parameters()} == {torch.bfloat16}
    exact = dict(other._network.named_buffers())
    assert any("inv_freq" in name for name in exact)
    for name, buffer in head._network.named_buffers():
        assert torch.equal(buffer, exact[name]), name


def test_modules_that_cannot_be_used(tmp_path: Path) -> None:
    target = tiny_loaded()
    with pytest.raises(
        ConfigError, match="no mtp head is known for tiny-llama; give the folder of one"
    ):
        LLM(target, drafter="mtp")
    folder = save_tiny("llama", tmp_path / "plain")
    with pytest.raises(ModelLoadError, match="holds no MTP module"):
        LLM(load_model(str(folder), "float32"), drafter="mtp")
    spec = write_head("mtp", tmp_path / "a", target, config={"model_type": "no_such"})
    with pytest.raises(UnsupportedModelError, match="no MTP module can be made of a no_such layer"):
        LLM(target, drafter=spec)
    spec = write_head("mtp", tmp_path / "b", target, config={"model_type": "deepseek_v3"})
    with pytest.raises(UnsupportedModelError, match=r"does not have: .*k_proj"):
        LLM(target, drafter=spec)
    write_modules("qwen3_next", tmp_path / "d", 1, qwen=True)
    held = load_file(tmp_path / "d" / "model.safetensors")
    held["mtp.layers.0.linear_attn.A_log"] = torch.zeros(4)
    save_file(held, tmp_path / "d" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"qwen3_next layer does not have: linear_attn"):
        LLM(tiny_loaded("qwen3_next"), drafter=f"mtp:{tmp_path / 'd'}")
    write_modules("deepseek_v3", tmp_path / "c", 1)
    wide = tiny_loaded("llama", hidden_size=96)
    with pytest.raises(ConfigError, match="hidden size 48, tiny-llama has 96; use a module made"):
        LLM(wide, drafter=f"mtp:{tmp_path / 'c'}")
    held = load_file(tmp_path / "c" / "model.safetensors")
    name = "model.layers.3.mlp.experts.5.up_proj.weight"
    del held[name]
    save_file(held, tmp_path / "c" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match="some of whose experts are missing"):
        LLM(target, drafter=f"mtp:{tmp_path / 'c'}")
    del held["model.layers.3.hnorm.weight"]
    held[name] = held[name.replace("5.up", "4.up")].clone()
    save_file(held, tmp_path / "c" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match="lacks the weights of feature_norm"):
        LLM(target, drafter=f"mtp:{tmp_path / 'c'}")
