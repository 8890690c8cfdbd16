"""Target.forward over packed token trees against transformers' own eager forward passes.

Two ragged sequences over randomly scattered slots: a trunk of two with a tree of eight drafted
nodes beside a plain root. Every node must get the logits that its root-to-leaf path gets as a
plain sequence; each planted fault in positions, slots or masks must show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ridgeline.attention.interface import ATTENTION
from ridgeline.core.batch import Batch, Entry, pack
from ridgeline.core.tree import DraftProposal, TokenTree, graft
from ridgeline.errors import ConfigError
from ridgeline.kv.store import KVStore
from ridgeline.model.target import TargetOutput
from ridgeline.model.torch_target import TorchTarget, layer_shapes
from tests import tiny

TOLERANCE = 1e-4  # logits are about 15 in magnitude
WINDOWED = ("mistral", "gemma2", "gemma3")  # windows of 8
PREFIXES = (70, 9)
BLOCK, BLOCKS = 16, 12
_rng = np.random.default_rng(7)
TOKENS = [_rng.integers(4, tiny.VOCAB_SIZE, n + 2) for n in PREFIXES]
SLOTS = np.split(_rng.permutation(BLOCK * BLOCKS), [100])
PROPOSAL = DraftProposal(
    _rng.permutation(np.arange(4, tiny.VOCAB_SIZE))[:8],
    np.array([-1, -1, 0, 0, 1, 2, 5, 4], np.int32),
)
TREES = (
    graft(TOKENS[0][PREFIXES[0] :], PROPOSAL, tiny.VOCAB_SIZE),
    TokenTree.plain(TOKENS[1][PREFIXES[1] : PREFIXES[1] + 1]),
)


@cache
def eager(family: str) -> PreTrainedModel:
    return tiny.tiny_model(family)


@cache
def ours(family: str) -> PreTrainedModel:
    model = tiny.tiny_model(family)
    model.set_attn_implementation(ATTENTION)
    return model


def new_target(family: str) -> TorchTarget:
    model = ours(family)
    return TorchTarget(model, KVStore(layer_shapes(model), BLOCKS, BLOCK, "cpu"))


def entry(index: int, tree: TokenTree, kv_len: int, keep: Sequence[int] | None = None) -> Entry:
    nodes = np.arange(tree.size) if keep is None else np.array(keep, np.int64)
    return Entry(tree, kv_len, SLOTS[index][: kv_len + tree.size], nodes)


def prefill(target: TorchTarget, chunk: int) -> None:
    """Both prefixes, `chunk` tokens of each a step, in one batch as long as both have some."""
    for start in range(0, max(PREFIXES), chunk):
        ends = [min(start + chunk, length) for length in PREFIXES]
        batch = pack(
            [
                entry(index, TokenTree.plain(TOKENS[index][start:end]), start, keep=[])
                for index, end in enumerate(ends)
                if start < end
            ]
        )
        assert target.forward(batch).logits.shape == (0, tiny.VOCAB_SIZE)


def tree_batch() -> Batch:
    return pack([entry(i, TREES[i], PREFIXES[i]) for i in range(2)])


@cache
def expected(family: str, features: tuple[int, ...] = ()) -> TargetOutput:
    """What eager transformers gives each node of TREES, run as the plain sequence to that node."""
    logits, states = [], []
    for index, tree in enumerate(TREES):
        trunk = TOKENS[index][: PREFIXES[index]].tolist() + tree.tokens[: tree.trunk].tolist()
        for node in range(tree.size):
            path = [int(tree.tokens[other]) for other in tree.path(node)]
            sequence = trunk[: PREFIXES[index] + min(node + 1, tree.trunk)] + path
            with torch.inference_mode():
                output = eager(family)(
                    input_ids=torch.tensor([sequence]), use_cache=False, output_hidden_states=True
                )
            logits.append(output.logits[0, -1])
            states.append([output.hidden_states[i][0, -1] for i in features])
    return TargetOutput(
        torch.stack(logits), tuple(torch.stack(rows) for rows in zip(*states, strict=True))
    )


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max())


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_every_node_equals_its_path_run_plainly(family: str, chunk: int) -> None:
    target = new_target(family)
    prefill(target, chunk)
    output = target.forward(tree_batch())
    assert output.logits.dtype == torch.float32
    assert output.features == ()
    want = expected(family).logits
    assert want.abs().max() > 4
    assert error(output.logits, want) < TOLERANCE


# Faults in the part of sequence 0, whose tree is the last (longest) of the only group.
KV_LEN, SIZE = PREFIXES[0], TREES[0].size
TREE_KEYS = slice(KV_LEN, KV_LEN + SIZE)


def hide_last_committed(batch: Batch) -> Batch:
    """The mask off by one: the last committed key is not seen."""
    visible = batch.groups[0].visible.clone()
    visible[-1, :, KV_LEN - 1] = False
    return replace_group(batch, visible=visible)


def show_siblings(batch: Batch) -> Batch:
    """Every drafted node sees all before it, as if the tree were a chain."""
    visible = batch.groups[0].visible.clone()
    visible[-1, :, TREE_KEYS] = torch.ones(SIZE, SIZE, dtype=torch.bool).tril()
    return replace_group(batch, visible=visible)


def position_as_slot(batch: Batch) -> Batch:
    """A node's key goes where its position, not its index, says; siblings share the place."""
    wrong = torch.from_numpy(SLOTS[0][KV_LEN + TREES[0].depth])
    slots, keys = batch.slots.clone(), batch.groups[0].slots.clone()
    slots[:SIZE] = keys[-1, TREE_KEYS] = wrong
    return replace_group(replace(batch, slots=slots), slots=keys)


def index_as_position(batch: Batch) -> Batch:
    """RoPE sees kv_len + index instead of kv_len + depth."""
    positions = batch.positions.clone()
    positions[:SIZE] = KV_LEN + torch.arange(SIZE)
    return replace(batch, positions=positions)


def window_by_slot(batch: Batch) -> Batch:
    """The window counts places in the table instead of positions."""
    query, key = batch.groups[0].query_positions.clone(), batch.groups[0].key_positions.clone()
    query[-1] = KV_LEN + torch.arange(SIZE)
    key[-1, TREE_KEYS] = KV_LEN + torch.arange(SIZE)
    return replace_group(batch, query_positions=query, key_positions=key)


def replace_group(batch: Batch, **changes: Tensor) -> Batch:
    changed = replace(batch)
    vars(changed)["groups"] = (replace(batch.groups[0], **changes),)  # in the place of the cached
    return changed


FAULTS = [hide_last_committed, show_siblings, position_as_slot, index_as_position]


@pytest.mark.parametrize(
    ("family", "fault"),
    [(family, fault) for family in tiny.FAMILIES for fault in FAULTS]
    + [(family, window_by_slot) for family in WINDOWED],
)
def test_a_planted_fault_shows(family: str, fault: Callable[[Batch], Batch]) -> None:
    target = new_target(family)
    prefill(target, 1000)
    batch = tree_batch()
    assert len(batch.groups) == 1
    batch = fault(batch)
    assert error(target.forward(batch).logits, expected(family).logits) > 1000 * TOLERANCE


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_features_are_transformers_hidden_states(family: str) -> None:
    target = new_target(family)
    prefill(target, 1000)
    count = len(target.store.layers)
    features = (count, 0, 2)
    output = target.forward(tree_batch(), features)
    want = expected(family, features)
    assert error(output.logits, want.logits) < TOLERANCE
    for got, state in zip(output.features, want.features, strict=True):
        assert got.shape == (11, 48)
        assert error(got, state) < TOLERANCE
    assert not any(layer._forward_pre_hooks for layer in target.module.modules())
    assert not any(layer._forward_hooks for layer in target.module.get_decoder().children())


def test_a_feature_that_does_not_exist_is_refused() -> None:
    target = new_target("llama")
    with pytest.raises(ConfigError, match="hidden state 4 does not exist: the model has 0 to 3"):
        target.forward(tree_batch(), (0, 4))
    assert not target.module.get_decoder().layers[0]._forward_pre_hooks, "hooks are taken back"


def test_only_kept_rows_get_logits() -> None:
    target = new_target("llama")
    prefill(target, 1000)
    parts = [entry(0, TREES[0], PREFIXES[0], [1, 4]), entry(1, TREES[1], PREFIXES[1], [0])]
    logits = target.forward(pack(parts)).logits
    assert error(logits, expected("llama").logits[[1, 4, 10]]) < TOLERANCE


def test_models_of_one_process_do_not_disturb_each_other() -> None:
    """A target and a draft model share a store and its slots; a third has a store of its own."""
    first, second = ours("gemma2"), ours("deepseek_v3")
    shapes = (*layer_shapes(first), *layer_shapes(second))
    store = KVStore(shapes, BLOCKS, BLOCK, "cpu")
    targets = {
        "gemma2": TorchTarget(first, store),
        "deepseek_v3": TorchTarget(second, store, first_layer=len(layer_shapes(first))),
        "llama": new_target("llama"),
    }
    for target in targets.values():
        prefill(target, 1000)
    for _ in range(2):
        for family, target in targets.items():
            logits = target.forward(tree_batch()).logits
            assert error(logits, expected(family).logits) < TOLERANCE
    assert eager("gemma2").config._attn_implementation == "eager"


def test_bf16_stays_near_transformers_in_bf16() -> None:
    model = tiny.tiny_model("llama").to(torch.bfloat16)
    reference = tiny.tiny_model("llama").to(torch.bfloat16)
    model.set_attn_implementation(ATTENTION)
    shapes = layer_shapes(model)
    assert {shape.dtype for shape in shapes} == {torch.bfloat16}
    tokens = torch.from_numpy(TOKENS[0])
    target = TorchTarget(model, KVStore(shapes, BLOCKS, BLOCK, "cpu"))
    part = entry(0, TokenTree.plain(TOKENS[0]), 0)
    logits = target.forward(pack([part])).logits
    with torch.inference_mode():
        theirs = reference(tokens[None], use_cache=False).logits[0].float()
        exact = eager("llama")(tokens[None], use_cache=False).logits[0]
    assert logits.dtype == torch.float32
    assert error(theirs, exact) > 0.02, "bf16 rounds visibly, so the bound below means something"
    assert (logits - exact).norm() < 1.2 * (theirs - exact).norm()
