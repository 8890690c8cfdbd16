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

from ridgeline.draft.head_config import check_lossless, layer_config
from ridgeline.draft.head_files import HeadFiles
from ridgeline.draft.network import NORMS, HeadShape, RecurrentHead
from ridgeline.errors import ConfigError, ModelLoadError, UnsupportedModelError
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
_WHOLE = (torch.int64, torch.int32, torch.int16)
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
        UnsupportedModelError: it has parts that are not implemented, or asks for a lossy
            verification.
    """
    check_lossless(files)
    parts = _named(files, layout)
    layer = layer_config(files, biased="query.bias" in parts)
    draft_ids = absolute_ids(files, parts.pop("d2t", None), target)
    width = hidden_size(target)
    if "head.weight" not in parts and draft_ids is not None:
        parts["head.weight"] = target.model.head_rows(draft_ids)
    head = parts.get("head.weight")
    check_vocabulary(files, head, draft_ids, target)
    fused = "fuse.weight" in parts
    if "fuse" in layout.values() and not fused and layer.hidden_size != len(features) * width:
        raise ModelLoadError(f"{files.path} lacks fc.weight, which fuses {len(features)} features")
    if layer.hidden_size != width and (head is None or not fused):
        without = " and no LM head of its own" if head is None else ""
        raise ConfigError(
            f"{files.path} has hidden size {layer.hidden_size}{without}; {target.name} has "
            f"{width}: use a head made for this model"
        )
    made = HeadShape(
        layer=layer,
        features=features,
        target_hidden=width,
        vocab_size=target.vocab_size if head is None else len(head),
        projected="project.weight" in parts,
        norms=frozenset(name for name in NORMS if f"{name}.weight" in parts),
        fused=fused,
        own_head=head is not None,
        project_bias="project.bias" in parts,
        **shape,
    )
    with torch.device("meta"):
        network = RecurrentHead(made)
    fill(network, parts, files, target)
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
        names = ", ".join(sorted(unknown)[:3])
        raise UnsupportedModelError(
            f"{files.path} has parts that are not implemented: {names:.200}"
        )
    return parts


def hidden_size(target: LoadedModel) -> int:
    """Width of the target's hidden states."""
    token = torch.zeros(1, dtype=torch.int64, device=target.model.device)
    return int(target.model.embed(token).shape[-1])


def absolute_ids(files: HeadFiles, d2t: Tensor | None, target: LoadedModel) -> Tensor | None:
    """i64[Vd]: the target's tokens that a head's logits stand for; `d2t` holds their distances.

    Raises:
        ModelLoadError: they are no list of whole numbers.
        ConfigError: they are not the target's, or not distinct.
    """
    if d2t is None:
        return None
    if d2t.dim() != 1 or not len(d2t) or d2t.dtype not in _WHOLE:
        raise ModelLoadError(
            f"{files.path}: d2t is {str(d2t.dtype).removeprefix('torch.')} {list(d2t.shape)}; it "
            "must be a whole number for each of the head's ids"
        )
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
        ModelLoadError: some are missing, or hold NaN or infinity.
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
    weights = {name: parts[name].float() for name in wanted}
    for name, weight in weights.items():
        if not all(torch.isfinite(extreme) for extreme in weight.aminmax()):
            raise ModelLoadError(f"{files.path}: {name} holds NaN or infinity; the head is damaged")
    network.load_state_dict(weights, assign=True)


def check_vocabulary(
    files: HeadFiles, head: Tensor | None, ids: Tensor | None, target: LoadedModel
) -> None:
    """Refuses an LM head [Vd,H] that does not fit the ids it drafts, or the target.

    Raises:
        ModelLoadError: it is no matrix, or has another number of ids than d2t.
        ConfigError: it has more ids than the target.
    """
    if head is not None and (head.dim() != 2 or not head.numel()):
        raise ModelLoadError(f"{files.path}: the LM head is {list(head.shape)}, which is no matrix")
    if ids is not None and (head is None or len(ids) != len(head)):
        raise ModelLoadError(f"{files.path}: d2t and the LM head have different lengths")
    if ids is None and head is not None and len(head) > target.vocab_size:
        raise ConfigError(
            f"{files.path} drafts {len(head)} ids and {target.name} has {target.vocab_size}; use a "
            "head made for this model"
        )
