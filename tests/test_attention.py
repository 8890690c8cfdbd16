"""The reference attention against a loop over queries and keys, and the registered function."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ridgeline.attention import interface, reference
from ridgeline.attention.interface import ATTENTION, AttentionContext, attention
from ridgeline.core.batch import Batch, Entry, pack
from ridgeline.core.tree import DraftProposal, TokenTree, graft
from ridgeline.errors import ConfigError, UnsupportedModelError
from ridgeline.kv.store import KVStore, LayerShape
from ridgeline.model.torch_target import layer_shapes

SLOTS, HEADS, KV_HEADS, DIM, VALUE_DIM = 256, 6, 2, 8, 5
TREE = DraftProposal(np.arange(7), np.array([-1, -1, 0, 0, 1, 2, 4], np.int32))


def entries(rng: np.random.Generator) -> list[Entry]:
    """A tree below a trunk of three, a plain root, and a prefill chunk long enough for itself."""
    trees = [graft([1, 2, 3], TREE, 99), TokenTree.plain([5]), TokenTree.plain(range(70))]
    slots = np.split(rng.permutation(SLOTS), [30, 60])
    return [
        Entry(tree, kv_len, own[: kv_len + tree.size], np.array([tree.root]))
        for tree, kv_len, own in zip(trees, (12, 20, 9), slots, strict=True)
    ]


def filled(shape: LayerShape, seed: int = 0) -> KVStore:
    store = KVStore([shape], SLOTS // 16, 16, "cpu")
    generator = torch.Generator().manual_seed(seed)
    for plane in (store.keys[0], store.values[0]):
        plane.copy_(torch.randn(plane.shape, generator=generator))
    return store


def attend(
    query: Tensor, store: KVStore, batch: Batch, window: int | None, softcap: float | None
) -> Tensor:
    dtype = reference.compute_dtype(query)
    biases = [reference.mask_bias(group, window, dtype) for group in batch.groups]
    return reference.tree_attention(query[None], store, 0, batch, biases, 0.3, softcap)[0]


def looped(
    query: Tensor,
    store: KVStore,
    parts: list[Entry],
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """[T,H,Dv] in fp64, one query and one key at a time, from the trees themselves."""
    keys, values = store.keys[0].double(), store.values[0].double()
    values = values if values.shape[-1] else keys
    share = len(query) // keys.shape[1]
    rows, output = iter(query.double().unbind(1)), []
    for part in parts:
        depth = part.tree.depth
        for node in range(part.tree.size):
            position = part.kv_len + depth[node]
            seen = [(index, index) for index in range(part.kv_len)]
            seen += [
                (part.kv_len + other, part.kv_len + depth[other])
                for other in np.flatnonzero(part.tree.ancestors[node])
            ]
            slots = [part.slots[i] for i, at in seen if window is None or position - at < window]
            row = next(rows)
            heads = []
            for head in range(len(row)):
                scores = [0.3 * float(row[head] @ keys[slot, head // share]) for slot in slots]
                if softcap:
                    scores = [softcap * math.tanh(score / softcap) for score in scores]
                weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
                heads.append(weights @ values[slots, head // share])
            output.append(torch.stack(heads))
    return torch.stack(output)


def random_query(batch: Batch, dim: int = DIM) -> Tensor:
    return torch.randn(HEADS, len(batch.tokens), dim, generator=torch.Generator().manual_seed(1))


GQA = LayerShape((KV_HEADS, DIM), (KV_HEADS, VALUE_DIM), torch.float32)
LATENT = LayerShape((1, DIM), (1, 0), torch.float32)


@pytest.mark.parametrize("shape", [GQA, LATENT], ids=["gqa", "latent"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (None, 2.0), (1, 2.0)])
def test_grouped_attention_equals_a_loop_over_keys(
    shape: LayerShape, window: int | None, softcap: float | None
) -> None:
    parts = entries(np.random.default_rng(0))
    store, batch = filled(shape), pack(parts)
    assert [group.rows.shape for group in batch.groups] == [(1, 70), (2, 10)]
    query = random_query(batch)
    got = attend(query, store, batch, window, softcap)
    assert got.shape == (81, HEADS, shape.value[1] or DIM)
    torch.testing.assert_close(got, looped(query, store, parts, window, softcap).float())


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_sequence_alone_equals_the_same_in_a_batch(index: int) -> None:
    parts = entries(np.random.default_rng(2))
    store, batch = filled(GQA), pack(parts)
    query = random_query(batch)
    together = attend(query, store, batch, 4, None)
    start = sum(part.tree.size for part in parts[:index])
    own = slice(start, start + parts[index].tree.size)
    alone = attend(query[:, own], store, pack([parts[index]]), 4, None)
    torch.testing.assert_close(alone, together[own])


def test_long_spans_are_tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = entries(np.random.default_rng(3))
    store, batch = filled(GQA), pack(parts)
    query = random_query(batch)
    whole = attend(query, store, batch, 30, None)
    calls = []
    tile = reference._tile
    monkeypatch.setattr(reference, "_tile", lambda *args: calls.append(0) or tile(*args))
    monkeypatch.setattr(reference, "SCORES", HEADS * 79 * 9)  # nine rows of the long span
    torch.testing.assert_close(attend(query, store, batch, 30, None), whole)
    assert len(calls) == 8 + 1, "70 rows by nines; the short spans at once"


def test_half_precision_is_computed_in_fp32_on_the_cpu() -> None:
    parts = entries(np.random.default_rng(4))
    store, batch = filled(replace(GQA, dtype=torch.bfloat16)), pack(parts)
    query = random_query(batch).bfloat16()
    got = attend(query, store, batch, None, None)
    exact = looped(query, store, parts)
    # Rounded once, at the end: within half a unit in the last of bf16's eight places.
    assert ((got.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()


class Layer(torch.nn.Module):
    """An attention layer as far as the function looks at one."""

    def __init__(self, layer_idx: int, **attributes: object) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        for name, value in attributes.items():
            setattr(self, name, value)


def test_context_writes_then_attends_and_shares_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = entries(np.random.default_rng(5))
    batch, store = pack(parts), KVStore([GQA] * 4, SLOTS // 16, 16, "cpu")
    for plane in (*store.keys, *store.values):
        plane.zero_()
    made = []
    mask_bias = interface.mask_bias
    monkeypatch.setattr(
        interface, "mask_bias", lambda *args: made.append(args[1]) or mask_bias(*args)
    )
    context = AttentionContext(store, batch, first_layer=2)
    total = len(batch.tokens)
    for layer_idx, window in ((0, None), (1, 6), (0, None), (1, 6)):
        generator = torch.Generator().manual_seed(layer_idx)
        key = torch.randn(1, KV_HEADS, total, DIM, generator=generator)
        value = torch.randn(1, KV_HEADS, total, VALUE_DIM, generator=generator)
        query = random_query(batch)[None]
        output, _ = attention(
            Layer(layer_idx), query, key, value, None, 0.3, sliding_window=window, ctx=context
        )
        own = replace(GQA)
        view = KVStore([own], SLOTS // 16, 16, "cpu")
        view.keys[0].copy_(store.keys[2 + layer_idx])
        view.values[0].copy_(store.values[2 + layer_idx])
        torch.testing.assert_close(store.keys[2 + layer_idx][batch.slots], key[0].transpose(0, 1))
        torch.testing.assert_close(output[0], attend(query[0], view, batch, window, None))
        assert output.is_contiguous()
    assert made == [None, None, 6, 6], "one mask for each group and distinct window"
    assert not store.keys[0].any(), "layers before the first are somebody else's"
    assert not store.values[1].any()


class Recorder:
    """A context that notes what reaches it."""

    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        self.scale, self.window, self.softcap = scale, window, softcap
        return query.transpose(1, 2)


STATES = torch.zeros(1, 2, 3, 16)


def test_neutral_keywords_pass_and_the_scale_has_a_default() -> None:
    recorder = Recorder()
    attention(
        *(Layer(0), STATES, STATES, STATES, None),
        ctx=recorder,
        dropout=0.0,
        position_ids=torch.arange(3),
        use_cache=False,
        output_attentions=False,
        is_causal=True,
        s_aux=None,
    )
    assert (recorder.scale, recorder.window, recorder.softcap) == (0.25, None, None)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"s_aux": torch.zeros(2)}, r"layer 7 \(Layer\) needs `s_aux`"),
        ({"sinks": torch.zeros(2)}, "needs `sinks`"),
        ({"position_bias": torch.zeros(2)}, "needs `position_bias`"),
        ({"indices": torch.zeros(2)}, "needs `indices`"),
        ({"is_causal": False}, "not causal"),
        ({"attention_mask": torch.zeros(3, 3)}, "mask of its own"),
        ({"ctx": None}, "got no ctx"),
    ],
)
def test_what_would_change_the_result_is_refused(keywords: dict[str, object], message: str) -> None:
    call = {"attention_mask": None, "ctx": Recorder(), **keywords}
    with pytest.raises(UnsupportedModelError, match=message):
        attention(Layer(7), STATES, STATES, STATES, **call)


def test_a_layer_that_sees_later_tokens_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="not causal"):
        attention(Layer(7, is_causal=False), STATES, STATES, STATES, None, ctx=Recorder())


def random_model(model_type: str, **changes: object) -> PreTrainedModel:
    fields = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "pad_token_id": 0,
        **changes,
    }
    config = AutoConfig.for_model(model_type, **fields)
    return AutoModelForCausalLM.from_config(
        config, attn_implementation=ATTENTION, experts_implementation="eager"
    ).eval()


MOE = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1}


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("gpt_oss", MOE, r"layer 0 \(GptOssAttention\) needs `s_aux`"),
        ("lfm2", {"layer_types": ["full_attention", "conv"]}, "layer 1 .* keeps no keys"),
        ("phimoe", {**MOE, "sliding_window": 4}, "layer 0 .* masks with window 4, but"),
        ("llama4_text", MOE, "layer 0 .* of type 'chunked_attention'"),
        ("mpt", {"d_model": 16, "n_heads": 2, "n_layers": 2}, "MptForCausalLM cannot run"),
    ],
)
def test_models_that_cannot_run_are_refused_by_layer(
    model_type: str, changes: dict[str, object], message: str
) -> None:
    model = random_model(model_type, **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        layer_shapes(model)


def test_layer_shapes_are_what_the_layers_hand_over() -> None:
    shapes = layer_shapes(random_model("llama", num_key_value_heads=1))
    assert shapes == (LayerShape((1, 8), (1, 8), torch.float32),) * 2
    with torch.device("meta"):
        model = random_model("qwen3", head_dim=24).to(torch.bfloat16)
    assert layer_shapes(model) == (LayerShape((2, 24), (2, 24), torch.bfloat16),) * 2


def test_a_model_with_another_attention_is_refused() -> None:
    model = random_model("llama")
    model.set_attn_implementation("sdpa")
    with pytest.raises(ConfigError, match="attn_implementation='ridgeline'"):
        layer_shapes(model)
