"""An MTP module whose decoder layer is transformers' own, run over the paged cache.

So it holds whatever layer a family has that transformers knows: DeepSeek-V3's latent attention and
experts, Qwen3-Next's gated attention. A decoder of one layer is made of the module's configuration
and reads vectors instead of tokens; its final norm is the module's.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig

from ridgeline.attention.interface import ATTENTION, AttentionContext, LayerContext
from ridgeline.core.batch import Batch
from ridgeline.draft.checkpoint import check_vocabulary, fill, hidden_size
from ridgeline.draft.head_files import HeadFiles
from ridgeline.draft.paged_head import place
from ridgeline.errors import (
    ConfigError,
    ModelLoadError,
    RidgelineError,
    UnsupportedModelError,
    reason,
)
from ridgeline.kv.store import KVStore, LayerShape
from ridgeline.model.linear import pack_linears, weight_bytes
from ridgeline.model.load import LoadedModel
from ridgeline.model.target import Model
from ridgeline.model.torch_target import ShapeProbe

_LAYER = "decoder.layers.0."
_NAMES = {
    "enorm.weight": "embedding_norm.weight",
    "hnorm.weight": "feature_norm.weight",
    "eh_proj.weight": "project.weight",
    "shared_head.norm.weight": "norm.weight",
    "shared_head.head.weight": "head.weight",
}
_BY_LAYER = ("layer_types", "mlp_layer_types")
"""Fields that say something of each layer of the model."""
_EXPERT = re.compile(r"mlp\.experts\.(\d{1,6})\.(gate|up|down)_proj\.weight")


class Block(nn.Module):
    """x = project([embedding_norm(embedding); feature_norm(hidden)]); hidden = layer(x)."""

    def __init__(self, config: PreTrainedConfig, vocab_size: int | None) -> None:
        """Without memory for weights; `vocab_size` None: the LM head is the target's."""
        super().__init__()
        hidden = config.hidden_size
        with torch.device("meta"):
            decoder = AutoModel.from_config(
                config, attn_implementation=ATTENTION, experts_implementation="eager"
            )
            self.norm = decoder.norm
            eps = config.rms_norm_eps
            self.embedding_norm = type(self.norm)(hidden, eps=eps)
            self.feature_norm = type(self.norm)(hidden, eps=eps)
            self.project = nn.Linear(2 * hidden, hidden, bias=False)
            self.head = nn.Linear(hidden, vocab_size, bias=False) if vocab_size else None
        decoder.norm = nn.Identity()
        decoder.set_input_embeddings(None)
        for name, part in list(decoder.named_children()):
            if "rotary" in name:
                setattr(decoder, name, type(part)(config))  # computed, not stored
        self.decoder = decoder
        self.config = config
        self.latent = any(hasattr(part, "kv_b_proj") for part in decoder.modules())

    def forward(
        self, embedding: Tensor, hidden: Tensor, positions: Tensor, context: LayerContext
    ) -> Tensor:
        """The hidden states [T,H] for embeddings [T,H], hidden states [T,H], positions i64[T]."""
        both = torch.cat([self.embedding_norm(embedding), self.feature_norm(hidden)], -1)
        result: Tensor = self.decoder(
            inputs_embeds=self.project(both)[None],
            position_ids=positions[None],
            use_cache=False,
            ctx=context,
            **({"cache": context} if self.latent else {}),
        ).last_hidden_state
        return result[0]


class BlockHead:
    """A `PagedHead` of transformers' layer."""

    def __init__(self, network: Block, target: Model, carries_normed: bool) -> None:
        """`carries_normed`: whether the next step reads the normed hidden state.

        Raises:
            UnsupportedModelError: the layer cannot run over pages.
        """
        self.device = target.device
        fp16_cache = self.device.type == "cpu" and target.dtype == torch.float16
        self._dtype = torch.float32 if fp16_cache else target.dtype
        place(network, self.device, self._dtype)
        self._network = network.eval()
        self._target = target
        self._carries_normed = carries_normed
        pack_linears(self._network)
        self.nbytes = weight_bytes(self._network)
        self.kv = self._rehearse()

    def bind(self, store: KVStore, layer: int) -> None:
        """See `PagedHead.bind`."""
        self._store, self._layer = store, layer

    def hidden_from(self, features: Tensor) -> Tensor:
        """See `PagedHead.hidden_from`."""
        return features.to(self._dtype)

    @torch.inference_mode()
    def _rehearse(self) -> LayerShape:
        """What the layer keeps of a token, found by running it on one."""
        config = self._network.config
        probe = ShapeProbe(config)
        nothing = torch.zeros(1, config.hidden_size, dtype=self._dtype, device=self.device)
        position = torch.zeros(1, dtype=torch.int64, device=self.device)
        try:
            self._network(nothing, nothing, position, probe)
            return probe.shapes[0]
        except RidgelineError:
            raise
        except Exception as error:  # whatever a layer makes of its configuration
            raise UnsupportedModelError(
                f"a {config.model_type} layer cannot draft on Ridgeline's cache: {reason(error)}"
            ) from error

    @torch.inference_mode()
    def run(self, batch: Batch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See `PagedHead.run`."""
        network = self._network
        embedding = self._target.embed(batch.tokens).to(self._dtype)
        context = AttentionContext(self._store, batch, self._layer)
        carried = network(embedding, hidden, batch.positions, context)
        normed = network.norm(carried)
        kept = normed[batch.keep]
        logits = network.head(kept).float() if network.head else self._target.unembed(kept)
        return logits, normed if self._carries_normed else carried


def load_block(files: HeadFiles, target: LoadedModel) -> Block:
    """A module whose layer is of the family that its configuration names.

    Args:
        files: its configuration, and its tensors under DeepSeek-V3's names.
        target: whose hidden states it reads.

    Raises:
        ModelLoadError: tensors are missing.
        ConfigError: it was made for another target.
        UnsupportedModelError: transformers has no such layer, or it has other parts.
    """
    width = hidden_size(target)
    if files.config.get("hidden_size") != width:
        raise ConfigError(
            f"{files.path} has hidden size {files.config.get('hidden_size')}, {target.name} has "
            f"{width}; use a module made for this model"
        )
    parts = {_NAMES.get(name, _LAYER + name): t for name, t in _fused(files).items()}
    parts.pop(f"{_LAYER}embed_tokens.weight", None)  # a copy of the target's
    head = parts.get("head.weight")
    check_vocabulary(files, head, None, target)
    family = files.config.get("model_type")
    try:
        config = _config(files, any(".experts." in name for name in parts))
        network = Block(config, None if head is None else len(head))
    except Exception as error:  # whatever a class makes of a configuration
        raise UnsupportedModelError(
            f"{files.path}: no MTP module can be made of a {family} layer: {reason(error)}"
        ) from error
    if unknown := sorted(parts.keys() - network.state_dict().keys()):
        names = ", ".join(name.removeprefix(_LAYER) for name in unknown[:3])[:200]
        raise UnsupportedModelError(
            f"{files.path} has parts that transformers' {family} layer does not have: {names}"
        )
    fill(network, parts, files, target)
    return network.requires_grad_(False)


def _config(files: HeadFiles, experts: bool) -> PreTrainedConfig:
    """The model's configuration for one layer of full attention, with or without experts."""
    fields = {name: value for name, value in files.config.items() if name not in _BY_LAYER}
    config = AutoConfig.for_model(**fields | {"num_hidden_layers": 1})
    one_layer: dict[str, Any] = {
        "layer_types": ["full_attention"],
        "mlp_layer_types": ["sparse" if experts else "dense"],
        "first_k_dense_replace": 0 if experts else 1,
        "mlp_only_layers": [] if experts else [0],
        "decoder_sparse_step": 1,
    }
    for name, value in one_layer.items():
        if hasattr(config, name):
            setattr(config, name, value)
    return config


def _fused(files: HeadFiles) -> dict[str, Tensor]:
    """The tensors with those of all experts in one, as transformers' layers have them."""
    experts: dict[tuple[str, int], Tensor] = {}
    fused = {}
    for name, tensor in files.tensors.items():
        if match := _EXPERT.fullmatch(name):
            experts[match[2], int(match[1])] = tensor
        else:
            fused[name] = tensor
    if experts:
        numbers = range(1 + max(number for _, number in experts))
        try:
            gates, ups, downs = (
                torch.stack([experts[kind, n] for n in numbers]) for kind in ("gate", "up", "down")
            )
            fused["mlp.experts.gate_up_proj"] = torch.cat([gates, ups], 1)
        except (KeyError, RuntimeError, IndexError) as error:
            raise ModelLoadError(
                f"{files.path} holds an MTP module some of whose experts are missing or cut"
            ) from error
        fused["mlp.experts.down_proj"] = downs
    return fused
