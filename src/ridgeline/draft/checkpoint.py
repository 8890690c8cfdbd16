"""Checkpoints of draft heads in the layouts that others publish, as one network.

Which parts a head has is read off its tensors; config.json says the rest. Layouts: EAGLE-1/2 and
EAGLE-3 (github.com/SafeAILab/EAGLE), the same two as speculators folders
(github.com/vllm-project/speculators), and MTP modules as DeepSeek-V3 names their parts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from ridgeline.draft.head_files import HeadFiles
from ridgeline.draft.network import NORMS, HeadShape, RecurrentHead
from ridgeline.errors import ConfigError, ModelLoadError, UnsupportedModelError, reason
from ridgeline.model.load import LoadedModel

_BLOCK = {
    **{f"self_attn.{p[0]}_proj": p for p in ("query", "key", "value")},
    "self_attn.o_proj": "output",
    "self_attn.q_norm": "query_norm",
    "self_attn.k_norm": "key_norm",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
    "post_attention_layernorm": "mlp_norm",
}
_IDS = {"d2t": "d2t"}
EAGLE = {
    **{f"layers.0.{name}": part for name, part in _BLOCK.items()},
    **_IDS,
    "layers.0.input_layernorm": "attention_norm",
    "embedding_layernorm": "embedding_norm",
    "pre_lm_head_layernorm": "norm",
    "fc": "project",
    "lm_head": "head",
}
EAGLE3 = {
    **{f"midlayer.{name}": part for name, part in _BLOCK.items()},
    **_IDS,
    "midlayer.hidden_norm": "feature_norm",
    "midlayer.input_layernorm": "embedding_norm",
    "fc": "fuse",
    "norm": "norm",
    "lm_head": "head",
}
MTP = {
    **_BLOCK,
    **_IDS,
    "input_layernorm": "attention_norm",
    "enorm": "embedding_norm",
    "hnorm": "feature_norm",
    "eh_proj": "project",
    "shared_head.norm": "norm",
    "shared_head.head": "head",
}
# Copies of the target's own embedding, and what only training needs.
_LEFT_OUT = ("embed_tokens.weight", "t2d", "rotary_emb.inv_freq", "verifier_norm.weight")
# Speculators' names for parts of the same heads.
_RENAMED = (
    (r"^transformer\.", "layers.0."),
    (r"^fusion_fc\.", "fc."),
    (r"^verifier_lm_head", "t2d"),
)


@dataclass(frozen=True)
class LoadedHead:
    """A head ready to be run beside its target."""

    network: RecurrentHead
    draft_ids: Tensor | None
    """i64[Vd]: the tokens that its logits stand for; None: all ids in order"""


def load_recurrent(
    files: HeadFiles,
    layout: Mapping[str, str],
    target: LoadedModel,
    features: tuple[int, ...],
    **shape: Any,
) -> LoadedHead:
    """The network of a recurrent head, held against its target.

    Args:
        files: its config and tensors.
        layout: tensor names of the layout, without ".weight", and the network's parts.
        target: whose hidden states it reads, whose embedding and LM head it shares.
        features: target layers whose input hidden states it reads.
        shape: further fields of `HeadShape`.

    Raises:
        ModelLoadError: tensors are missing, or their sizes contradict each other.
        ConfigError: it was made for another target.
        UnsupportedModelError: it has parts that are not implemented.
    """
    parts = _named(files, layout)
    layer = _layer(files, parts)
    draft_ids = absolute_ids(files, parts.pop("d2t", None), target)
    width = hidden_size(target)
    if "head.weight" not in parts and draft_ids is not None:
        parts["head.weight"] = target.model.head_rows(draft_ids)
    head = parts.get("head.weight")
    made = HeadShape(
        layer=layer,
        features=features,
        target_hidden=width,
        vocab_size=target.vocab_size if head is None else len(head),
        projected="project.weight" in parts,
        norms=frozenset(name for name in NORMS if f"{name}.weight" in parts),
        fused="fuse.weight" in parts,
        own_head=head is not None,
        project_bias="project.bias" in parts,
        **shape,
    )
    with torch.device("meta"):
        network = RecurrentHead(made)
    fill(network, parts, files, target)
    check_vocabulary(files, head, draft_ids, target)
    if head is None and layer.hidden_size != width:
        raise ConfigError(
            f"{files.path} has hidden size {layer.hidden_size} and no LM head of its own; "
            f"{target.name} has {width}: use a head made for this model"
        )
    network.rotary = type(network.rotary)(layer)  # computed, not stored
    return LoadedHead(network.requires_grad_(False), draft_ids)


def _named(files: HeadFiles, layout: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors under the network's names."""
    parts: dict[str, Tensor] = {}
    unknown = []
    for name, tensor in files.tensors.items():
        for pattern, other in _RENAMED:
            name = re.sub(pattern, other, name)
        if "midlayer.hidden_norm" in layout:
            name = re.sub(r"^layers\.0\.", "midlayer.", name)
        module, dot, kind = name.rpartition(".")
        if name in layout:
            parts[layout[name]] = tensor
        elif module in layout and kind in ("weight", "bias"):
            parts[layout[module] + dot + kind] = tensor
        elif not name.endswith(_LEFT_OUT):
            unknown.append(name)
    if unknown:
        raise UnsupportedModelError(
            f"{files.path} has parts that are not implemented: {', '.join(sorted(unknown)[:3])}"
        )
    return parts


def _layer(files: HeadFiles, parts: Mapping[str, Tensor]) -> LlamaConfig:
    """The layer's configuration; a speculators folder nests it."""
    stated = files.config.get("transformer_layer_config", files.config)
    fields = (
        *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters"),
        *("max_position_embeddings", "hidden_act"),
    )
    try:
        config = LlamaConfig(**{name: stated[name] for name in fields if name in stated})
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelLoadError(f"{files.path}/config.json: {reason(error)}") from error
    if config.hidden_act != "silu":
        raise UnsupportedModelError(f"{files.path} has an MLP with {config.hidden_act}")
    config.attention_bias = "query.bias" in parts
    return config


def hidden_size(target: LoadedModel) -> int:
    """Width of the target's hidden states."""
    return int(target.model.embed(torch.zeros(1, dtype=torch.int64)).shape[-1])


def absolute_ids(files: HeadFiles, d2t: Tensor | None, target: LoadedModel) -> Tensor | None:
    """i64[Vd]: the target's tokens that a head's logits stand for; `d2t` holds their distances.

    Raises:
        ConfigError: they are not the target's, or not distinct.
    """
    if d2t is None:
        return None
    ids = d2t.long() + torch.arange(len(d2t))
    if len({*ids.tolist()}) < len(ids) or int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size:
        raise ConfigError(
            f"{files.path}: d2t names ids outside 0..{target.vocab_size - 1} or twice; use a head "
            f"made for {target.name}"
        )
    return ids


def fill(
    network: nn.Module, parts: Mapping[str, Tensor], files: HeadFiles, target: LoadedModel
) -> None:
    """Gives a network that was made without memory its weights, as fp32.

    Raises:
        ModelLoadError: some are missing.
        ConfigError: some have the sizes of another model's.
    """
    wanted = network.state_dict(keep_vars=True)
    missing = sorted(wanted.keys() - parts.keys())
    if missing:
        raise ModelLoadError(f"{files.path} lacks the weights of {', '.join(missing[:3])}")
    for name, parameter in wanted.items():
        if parts[name].shape != parameter.shape:
            raise ConfigError(
                f"{files.path}: {name} is {list(parts[name].shape)} where a head for {target.name} "
                f"(hidden size {hidden_size(target)}) has {list(parameter.shape)}; use a head made "
                "for this model"
            )
    network.load_state_dict({name: parts[name].float() for name in wanted}, assign=True)


def check_vocabulary(
    files: HeadFiles, head: Tensor | None, ids: Tensor | None, target: LoadedModel
) -> None:
    """Refuses an LM head [Vd,H] that does not fit the ids it drafts, or the target.

    Raises:
        ModelLoadError, ConfigError.
    """
    if ids is not None and (head is None or len(ids) != len(head)):
        raise ModelLoadError(f"{files.path}: d2t and the LM head have different lengths")
    if ids is None and head is not None and len(head) > target.vocab_size:
        raise ConfigError(
            f"{files.path} drafts {len(head)} ids and {target.name} has {target.vocab_size}; use a "
            "head made for this model"
        )
