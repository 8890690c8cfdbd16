"""The native decoder: transformers' logits, and the same bits however a text is computed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from ridgeline import ConfigError
from ridgeline.core.batch import Entry, pack
from ridgeline.core.tree import DraftProposal, TokenTree, graft
from ridgeline.kv.store import KVStore
from ridgeline.model.load import load_model
from ridgeline.model.native import ModuleSource, NativeModel, obstacle
from ridgeline.model.target import Target
from tests.tiny import VOCAB_SIZE, save_tiny, tiny_model

native = pytest.importorskip("ridgeline._native")

SHAPE = {"hidden_size": 64, "head_dim": 16}
ROTARY = {
    "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 1e4,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 1e4,
    },
}
# Every feature of the family: window, biases, norms of queries and keys, tied heads, scalings.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "one key head": ("llama", {"num_key_value_heads": 1}),
    "wide heads": ("llama", {"head_dim": 32}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "qwen2": ("qwen2", {}),
    "qwen2, some layers windowed": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    **{name: ("llama", {"rope_parameters": rotary}) for name, rotary in ROTARY.items()},
}
LENGTH = 75
TOKENS = np.random.default_rng(5).integers(4, VOCAB_SIZE, LENGTH)
SLOTS = np.random.default_rng(6).permutation(256)
OTHER_SLOTS = SLOTS[128:]
FORMATS = ["fp32", "bf16", "int8", "int4"]


@cache
def eager(name: str) -> PreTrainedModel:
    family, changes = MODELS[name]
    return tiny_model(family, **{**SHAPE, **changes})


@cache
def model(name: str, number_format: str = "fp32") -> NativeModel:
    family, changes = MODELS[name]
    module = tiny_model(family, **{**SHAPE, **changes})
    bits = {"int8": 8, "int4": 4}.get(number_format)
    dtype = torch.bfloat16 if number_format == "bf16" else torch.float32
    return NativeModel(module.config, ModuleSource(module.to(dtype), bits), dtype)


def target(name: str, number_format: str = "fp32") -> Target:
    made = model(name, number_format)
    return made.bind(KVStore(made.layers, 16, 16, "cpu"))


def entry(
    tree: TokenTree,
    kv_len: int,
    slots: NDArray[np.int64] = SLOTS,
    keep: Sequence[int] | None = None,
) -> Entry:
    kept = np.arange(tree.size) if keep is None else np.array(keep, np.int64)
    return Entry(tree, kv_len, slots[: kv_len + tree.size], kept)


def run(to: Target, chunks: Sequence[int], start: int = 0) -> Tensor:
    """f32[sum of chunks, V] of TOKENS, so many in each pass."""
    logits = []
    for count in chunks:
        tree = TokenTree.plain(TOKENS[start : start + count])
        logits.append(to.forward(pack([entry(tree, start)])).logits)
        start += count
    return torch.cat(logits)


@pytest.fixture(autouse=True)
def _threads() -> None:
    native.set_threads(2)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_hidden_states_are_those_of_transformers(name: str) -> None:
    batch = pack([entry(TokenTree.plain(TOKENS), 0)])
    got = target(name).forward(batch, features=(3, 0, 1))
    with torch.inference_mode():
        want = eager(name)(torch.from_numpy(TOKENS[None]), output_hidden_states=True)
    assert want.logits.abs().max() > 4
    assert (got.logits - want.logits[0]).abs().max() < 2e-4
    for index, state in zip((3, 0, 1), got.features, strict=True):
        assert (state - want.hidden_states[index][0]).abs().max() < 2e-4


@pytest.mark.parametrize("number_format", ["int8", "int4"])
def test_rounded_weights_stay_near(number_format: str) -> None:
    exact, near = run(target("llama"), [LENGTH]), run(target("llama", number_format), [LENGTH])
    divergence = (exact.softmax(-1) * (exact.log_softmax(-1) - near.log_softmax(-1))).sum(-1)
    assert divergence.mean() < {"int8": 0.01, "int4": 1.0}[number_format]


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_chunks_and_threads_change_no_bit(name: str, number_format: str) -> None:
    whole = run(target(name, number_format), [LENGTH])
    for chunks in ([1] * LENGTH, [7] * 10 + [5], [64, 11], [33, 1, 41]):
        assert torch.equal(run(target(name, number_format), chunks), whole)
    for threads in (1, 3):
        native.set_threads(threads)
        assert torch.equal(run(target(name, number_format), [30, 45]), whole)


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_a_tree_changes_no_bit(name: str, number_format: str) -> None:
    start, trunk = 41, 2
    rng = np.random.default_rng(8)
    parents = np.array([max(-1, i - int(rng.integers(1, 5))) for i in range(40)], np.int32)
    parents[:12] = np.arange(-1, 11)  # a path that crosses a tile of positions
    drafted = rng.permutation(np.arange(4, VOCAB_SIZE))[:40]
    tree = graft(
        TOKENS[start : start + trunk].tolist(), DraftProposal(drafted, parents), VOCAB_SIZE
    )
    to = target(name, number_format)
    run(to, [start])
    got = to.forward(pack([entry(tree, start)])).logits
    for node in range(trunk, tree.size):
        path = [int(tree.tokens[other]) for other in tree.path(node)]
        plain = target(name, number_format)
        run(plain, [start])
        tokens = [*TOKENS[start : start + trunk].tolist(), *path]
        for i, token in enumerate(tokens):
            logits = plain.forward(pack([entry(TokenTree.plain([token]), start + i)])).logits
        assert torch.equal(got[node], logits[0])


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("others", [1, 3, 33])
def test_neighbours_change_no_bit(number_format: str, others: int) -> None:
    alone = run(target("qwen2", number_format), [20, 1, 5])
    made = model("qwen2", number_format)
    to = made.bind(KVStore(made.layers, 64, 16, "cpu"))
    rng = np.random.default_rng(others)
    slots = np.split(rng.permutation(1024), [60])
    places = [slots[0], *np.array_split(slots[1], others)]
    logits, start = [], 0
    for count in (20, 1, 5):
        entries = [entry(TokenTree.plain(TOKENS[start : start + count]), start, places[0])]
        for place in places[1:]:
            tokens = rng.integers(4, VOCAB_SIZE, int(rng.integers(1, 9)))
            entries.append(entry(TokenTree.plain(tokens), 0, place, keep=[0]))
        logits.append(to.forward(pack(entries)).logits[:count])
        start += count
    assert torch.equal(torch.cat(logits), alone)


def test_where_keys_lie_and_what_else_lies_there_changes_no_bit() -> None:
    made = model("llama")
    store = KVStore(made.layers, 16, 16, "cpu")
    for tensor in (*store.keys, *store.values):
        tensor.fill_(float("nan"))  # slots that nobody wrote
    to = made.bind(store)
    tree = TokenTree.plain(TOKENS[:50])
    logits = to.forward(pack([entry(tree, 0, OTHER_SLOTS)])).logits
    assert torch.equal(logits, run(target("llama"), [50]))


def test_layers_of_two_models_share_a_store() -> None:
    first, second = model("llama"), model("qwen3")
    store = KVStore((*first.layers, *second.layers), 16, 16, "cpu")
    a, b = first.bind(store), second.bind(store, len(first.layers))
    run(a, [40])
    run(b, [40])
    assert torch.equal(run(a, [5], 40), run(target("llama"), [45])[40:])
    assert torch.equal(run(b, [5], 40), run(target("qwen3"), [45])[40:])


def test_no_nan_far_into_a_context() -> None:
    module = tiny_model("llama", **SHAPE, max_position_embeddings=9000)
    made = NativeModel(module.config, ModuleSource(module, 4), torch.float16)
    to = made.bind(KVStore(made.layers, 520, 16, "cpu"))
    tokens = np.random.default_rng(9).integers(4, VOCAB_SIZE, 8200)
    for start in range(0, 8200, 512):
        tree = TokenTree.plain(tokens[start : start + 512])
        slots = np.arange(8320)
        logits = to.forward(pack([entry(tree, start, slots, keep=[tree.size - 1])])).logits
        assert torch.isfinite(logits).all()


def test_what_the_decoder_does_not_compute() -> None:
    def reason(family: str, **changes: Any) -> str:
        config = tiny_model(family, **{**SHAPE, **changes}).config
        return str(obstacle(config, torch.device("cpu")))

    assert reason("llama") == "None"
    assert "gemma2 is not of the Llama family" in reason("gemma2")
    assert "its MLP uses gelu" in reason("llama", hidden_act="gelu")
    assert "dimension 12 is no multiple of 16" in reason("llama", head_dim=12)
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert "(dynamic) are not implemented" in reason("llama", rope_parameters=dynamic)
    config = tiny_model("llama", **SHAPE).config
    assert "runs on cuda" in str(obstacle(config, torch.device("cuda")))


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_defaults_of_torch_change_no_bit(default: torch.dtype) -> None:
    # Loading another model in another thread sets them for a while.
    expected = run(target("llama"), [5, 1])
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(default)
        found = run(target("llama"), [5, 1])
    finally:
        torch.set_default_dtype(before)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


def test_a_pass_is_checked_before_it_runs() -> None:
    to = target("llama")
    with pytest.raises(ConfigError, match="hidden state 4 does not exist"):
        to.forward(pack([entry(TokenTree.plain(TOKENS[:3]), 0)]), features=(4,))
    with pytest.raises(ValueError, match="a slot is out of range"):
        to.forward(pack([entry(TokenTree.plain(TOKENS[:3]), 0, np.array([0, 1, 256]))]))
    bad = TokenTree(TOKENS[:3], np.array([-1, 0, 2], np.int32), 1)
    vars(bad)["depth"] = np.array([0, 1, 2], np.int32)
    with pytest.raises(ValueError, match="parent does not come before"):
        to.forward(pack([entry(bad, 0)]))


def test_no_later_token_reaches_an_earlier_one_through_an_infinite_value() -> None:
    """0 times infinity is no number: what a token does not see must not be weighed at all."""
    module = tiny_model("llama", **SHAPE)
    with torch.no_grad():
        embedding = module.model.embed_tokens.weight
        embedding[:, 0] = 0
        embedding[9] = torch.eye(SHAPE["hidden_size"])[0]
        # The values of token 9, and of no other, overflow a 16-bit cache.
        module.model.layers[0].self_attn.v_proj.weight[:, 0] = 1e5
    made = NativeModel(module.config, ModuleSource(module, None), torch.float16)

    def logits(lengths: Sequence[int]) -> Tensor:
        to = made.bind(KVStore(made.layers, 16, 16, "cpu"))
        parts, start = [], 0
        for length in lengths:
            tree = TokenTree.plain(tokens[start : start + length])
            parts.append(to.forward(pack([entry(tree, start)])).logits)
            start += length
        return torch.cat(parts)

    tokens = TOKENS[:24].copy()
    tokens[:20][tokens[:20] == 9] = 8
    tokens[20] = 9
    whole, single = logits([24]), logits([1] * 24)
    assert whole[:20].isfinite().all()
    assert torch.equal(whole[:20], single[:20])


def test_the_extension_refuses_what_would_crash_it() -> None:
    from ridgeline.model.linear import native_module

    none = np.empty(0, np.float32)
    shape = {"hidden": 32, "input": 32, "heads": 2, "kv_heads": 2, "dim": 16, "eps": 1e-5}
    made = native_module().Decoder(
        **shape, inverse_frequencies=np.ones(8, np.float32), rotary_scale=1.0
    )
    with pytest.raises(ValueError, match="seven matrices"):
        made.add_layer(none, np.ones(32, np.float32), none, none, [None] * 7, 0)
    with pytest.raises((ValueError, TypeError)):
        made.finish(none, None)
    with pytest.raises(ValueError, match="a first layer that reads both"):
        made.enter_by(none, none, None, False)
    ints, longs = np.zeros(1, np.int32), np.zeros(1, np.int64)
    space = torch.zeros(64)
    call = {
        "embeddings": space.data_ptr(),
        "embeddings_size": 32,
        "states": 0,
        "states_size": 0,
        "positions": longs,
        "sizes": ints + 1,
        "trunks": ints + 1,
        "kv_lens": longs,
        "slots": longs,
        "parents": ints - 1,
        "caches": np.empty(0, np.int64),
        "cache_type": native_module().F32,
        "cache_slots": 1,
        "keep": np.empty(0, np.int64),
        "logits": 0,
        "logits_size": 0,
        "features": np.zeros(2, np.int64),
    }
    with pytest.raises(ValueError, match="no head yet"):
        made.forward(**call)
    weights = torch.zeros(16, 32)
    head = native_module().dense(native_module().F32, weights.data_ptr(), 32, 0, 16, 32)
    made.finish(none, head)
    made.forward(**call)
    with pytest.raises(ValueError, match="a hidden state a row"):
        made.forward(**call | {"states": space.data_ptr(), "states_size": 32})
    with pytest.raises(ValueError, match="not aligned"):
        made.forward(**call | {"features": np.array([space.data_ptr() + 1, 0])})
    two = {
        "positions": np.array([0, 1]),
        "sizes": ints + 2,
        "trunks": ints + 2,
        "slots": np.array([0, 0]),
        "parents": np.array([-1, 0], np.int32),
        "embeddings_size": 64,
    }
    with pytest.raises(ValueError, match="two rows have the same slot"):
        made.forward(**call | two)
    with pytest.raises(ValueError, match="stride"):
        native_module().dense(native_module().F32, weights.data_ptr(), 1 << 62, 0, 2, 32)


def test_what_cannot_be_rounded_is_refused_or_left_as_it_is(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path, **{**SHAPE, "intermediate_size": 130})
    with pytest.raises(ConfigError, match=r"cannot be quantised here: .* rows of 130 weights"):
        load_model(str(folder), "float32", quantize="int4")
    assert load_model(str(folder), "float32", quantize="auto").model.computes.startswith("float32")
    whole = save_tiny("llama", tmp_path / "whole", **SHAPE)
    with pytest.raises(ConfigError, match="no float16 weights"):
        load_model(str(whole), "float16", quantize="int8")
