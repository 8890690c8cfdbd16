"""New draft heads for a target, and how they are written down."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn
from transformers import LlamaConfig

from ridgeline.draft.checkpoint import EAGLE, EAGLE3, MTP, hidden_size
from ridgeline.draft.eagle3 import default_features
from ridgeline.draft.int8 import CONFIG, rounded
from ridgeline.draft.medusa import MedusaHeads
from ridgeline.draft.network import HeadShape, RecurrentHead
from ridgeline.errors import ConfigError
from ridgeline.model.load import LoadedModel
from ridgeline.train.medusa import medusa_losses
from ridgeline.train.run import Task
from ridgeline.train.unroll import unrolled

FEATURE_WEIGHT = 0.1
"""Of EAGLE's loss between hidden states; its token loss has 1, for acceptance is what counts."""


def new_task(
    method: str,
    target: LoadedModel,
    ids: Tensor,
    steps: int,
    intermediate: int | None,
    seed: int,
) -> Task:
    """A network with random weights and its loss.

    Args:
        method: one of METHODS.
        target: whose hidden states it reads.
        ids: i64[Vd], the tokens that it can draft.
        steps: drafting steps to train on, or Medusa's number of heads.
        intermediate: width of the MLP; None: 8/3 of the hidden size.
        seed: of the weights.
    """
    layers, width = len(target.model.layers), hidden_size(target)
    head = target.model.head_rows(ids)
    torch.manual_seed(seed)
    if method == "medusa":
        medusa = MedusaHeads(steps, 1, width, None)
        for blocks in medusa.layers:
            for block in blocks:
                nn.init.zeros_(block.weight)  # so that training starts from the LM head itself
        medusa.to(target.model.device)
        return Task(
            medusa,
            ids,
            head_features(method, layers),
            layers,
            lambda batch: medusa_losses(medusa, head, batch),
        )
    shape = _shape(method, target, len(ids), intermediate or width * 8 // 3 // 32 * 32)
    # Made on the CPU, so that a seed gives the same weights everywhere.
    network = RecurrentHead(shape).to(target.model.device)
    feature_weight = FEATURE_WEIGHT if method == "eagle" else 0.0
    return Task(
        network,
        ids,
        shape.features,
        layers,
        lambda batch: unrolled(network, head, batch, steps, feature_weight),
    )


def head_features(method: str, layers: int) -> tuple[int, ...]:
    """Hidden states of a target with so many layers that a head reads."""
    if method == "eagle3":
        return default_features(layers)
    return (layers,)


def _shape(method: str, target: LoadedModel, vocab: int, intermediate: int) -> HeadShape:
    layers, width = len(target.model.layers), hidden_size(target)
    kv_heads, dim = target.model.layers[0].key
    shared_by = max(1, width // dim // kv_heads)  # query heads to each of them
    layer = LlamaConfig(
        hidden_size=width,
        intermediate_size=intermediate,
        num_attention_heads=kv_heads * shared_by,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        max_position_embeddings=target.context_len,
        rms_norm_eps=1e-5,
        attention_bias=False,
    )
    shared: dict[str, Any] = {
        "layer": layer,
        "features": head_features(method, layers),
        "target_hidden": width,
        "vocab_size": vocab,
        "own_head": False,
    }
    if method == "eagle":
        return HeadShape(projected=True, **shared)
    if method == "mtp":
        norms = frozenset(("embedding_norm", "feature_norm", "attention_norm", "norm"))
        return HeadShape(projected=True, norms=norms, **shared)
    norms = frozenset(("embedding_norm", "feature_norm", "norm"))
    return HeadShape(projected=False, norms=norms, fused=True, **shared)


def frequent_ids(tokens: np.ndarray, weights: np.ndarray, count: int, vocab_size: int) -> Tensor:
    """i64[Vd], sorted: the tokens that the target wrote most often."""
    written = np.bincount(tokens[weights > 0], minlength=vocab_size)
    order = np.argsort(-written, kind="stable")[: min(count, vocab_size)]
    return torch.from_numpy(np.sort(order))


def save_head(
    folder: Path,
    method: str,
    network: nn.Module,
    ids: Tensor,
    target: LoadedModel,
    provenance: Mapping[str, Any],
    compact: bool,
    bits: int,
) -> None:
    """Writes model.safetensors, config.json and provenance.json in the public layout.

    `compact` leaves out the LM head, whose rows are the target's own: other engines need it.
    `bits` of a weight are 16 (bf16) or 8.

    Raises:
        ConfigError: a weight is no finite number.
    """
    tensors: dict[str, Tensor] = {"d2t": ids - torch.arange(len(ids))}
    if isinstance(network, MedusaHeads):
        for i, blocks in enumerate(network.layers):
            for j, block in enumerate(blocks):
                tensors[f"{i}.{j}.linear.weight"] = block.weight.bfloat16()
                tensors[f"{i}.{j}.linear.bias"] = block.bias.bfloat16()
            if not compact:
                tensors[f"{i}.{len(blocks)}.weight"] = target.model.head_rows(ids).bfloat16()
        config: dict[str, Any] = {
            "medusa_num_heads": len(network.layers),
            "medusa_num_layers": len(network.layers[0]),
        }
    else:
        assert isinstance(network, RecurrentHead)
        tensors |= _named(method, network)
        if not compact:
            name = "shared_head.head" if method == "mtp" else "lm_head"
            tensors[f"{name}.weight"] = target.model.head_rows(ids).bfloat16()
            t2d = torch.zeros(target.vocab_size, dtype=torch.bool)
            tensors["t2d"] = t2d.index_fill(0, ids, True)
        if method == "mtp":
            place = f"model.layers.{len(target.model.layers)}."
            tensors = {place + name: tensor for name, tensor in tensors.items()}
        config = network.shape.layer.to_dict() | {
            "vocab_size": target.vocab_size,
            "draft_vocab_size": len(ids),
            "architectures": [f"{method}-head"],
        }
        if method == "eagle3":
            layers = list(network.shape.features)
            config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": layers}
    tensors = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise ConfigError(
            "the head has weights that are no finite numbers and is not saved; use a lower "
            "--learning-rate, in another --out folder"
        )
    config["base_model_name_or_path"] = target.name
    if bits == 8:
        tensors, config["quantization_config"] = rounded(tensors), CONFIG
    folder.mkdir(parents=True, exist_ok=True)
    # Not save_file, whose files only their owner can read.
    (folder / "model.safetensors").write_bytes(save(tensors))
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n")
    (folder / "provenance.json").write_text(json.dumps(provenance, indent=2, default=str) + "\n")


def _named(method: str, network: RecurrentHead) -> dict[str, Tensor]:
    """The network's weights under the layout's names."""
    layout = {"eagle": EAGLE, "eagle3": EAGLE3, "mtp": MTP}[method]
    names = {part: name for name, part in layout.items()}
    tensors = {}
    for name, parameter in network.named_parameters():
        part, _, kind = name.rpartition(".")
        tensors[f"{names[part]}.{kind}"] = parameter.detach().bfloat16()
    return tensors
