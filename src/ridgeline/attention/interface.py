"""The attention function "ridgeline" for transformers' models: paged tree attention over a KVStore.

A model loaded with `attn_implementation="ridgeline"` calls it once a layer; the keyword `ctx` of
the model's forward reaches it unchanged and says where that layer's keys and values live. No mask
function is registered under the name, so transformers builds no mask: the batch has its own.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from ridgeline.attention.reference import compute_dtype, mask_bias, tree_attention
from ridgeline.core.batch import Batch
from ridgeline.errors import UnsupportedModelError
from ridgeline.kv.store import KVStore

ATTENTION = "ridgeline"
"""The name to load models with: `attn_implementation=ATTENTION`."""

# Keywords that models pass along and that cannot change what a layer of ours computes. Any other
# one that is set (attention sinks, position biases, sparse indices) is refused.
_NEUTRAL = frozenset(
    {
        "dropout",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "use_cache",
    }
)


class LayerContext(Protocol):
    """What the keyword `ctx` must be."""

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
        """[1,T,H,Dv] for query [1,H,T,D], key [1,Hkv,T,D] and value [1,Hkv,T,Dv] of one layer."""


class AttentionContext:
    """One forward pass of one model: its batch, and its layers' place in the store.

    Masks are made on first use, once for each distinct sliding window, and serve every layer.
    It also stands in for transformers' cache where a model compresses its keys and values
    (multi-head latent attention): `update` takes the latents, `attend` stores those alone.
    """

    def __init__(self, store: KVStore, batch: Batch, first_layer: int = 0) -> None:
        self.store = store
        self.batch = batch
        self.first_layer = first_layer
        self._biases: dict[int | None, list[Tensor]] = {}
        self._latents: tuple[Tensor, Tensor] | None = None

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
        """Write the new keys and values, then attend over all that the sequences have."""
        layer = self.first_layer + module.layer_idx
        biases = self._biases.get(window)
        if biases is None:
            dtype = compute_dtype(query)
            biases = [mask_bias(group, window, dtype) for group in self.batch.groups]
            self._biases[window] = biases
        if self._latents is not None:
            return self._attend_latents(module, layer, query, biases, scale, softcap)
        self.store.write(layer, self.batch.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
        return tree_attention(query, self.store, layer, self.batch, biases, scale, softcap)

    def update(
        self, latent: Tensor, rotary: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Take the latents [1,1,T,R] and rotated keys [1,1,T,P] of the layer that attends next.

        Returns those of one token: the layer expands them to keys and values that nobody reads.
        """
        self._latents = latent, rotary
        return latent[:, :, :1], rotary[:, :, :1]

    def _attend_latents(
        self,
        module: Any,
        layer: int,
        query: Tensor,
        biases: list[Tensor],
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """Latent attention with the up-projections absorbed (DeepSeek-V2, arXiv 2405.04434, 2.1).

        q.(U_k c) = (U_k' q).c and sum a U_v c = U_v (sum a c): every head attends over one shared
        head whose key is [c; rotated key] and whose value is c.
        """
        assert self._latents is not None
        (latent, rotary), self._latents = self._latents, None
        rank, plain = latent.shape[-1], query.shape[-1] - rotary.shape[-1]
        key = torch.cat((latent, rotary), dim=-1)[0].transpose(0, 1)
        self.store.write(layer, self.batch.slots, key, key[..., :0])
        up = module.kv_b_proj.weight.view(query.shape[1], -1, rank)  # [H, plain + Dv, R]
        absorbed = torch.matmul(query[..., :plain], up[:, :plain])
        query = torch.cat((absorbed, query[..., plain:]), dim=-1)
        mixed = tree_attention(query, self.store, layer, self.batch, biases, scale, softcap)
        mixed = mixed[..., :rank].transpose(1, 2)  # [1,H,T,R]; the rest is the mean rotated key
        return torch.matmul(mixed, up[:, plain:].transpose(1, 2)).transpose(1, 2)


def layer_name(module: Any) -> str:
    """How errors name an attention layer."""
    return f"layer {module.layer_idx} ({type(module).__name__})"


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    ctx: LayerContext | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in each layer, as its AttentionInterface defines it.

    Raises:
        UnsupportedModelError: the layer asks for something that is not computed here.
    """
    if ctx is None:
        raise UnsupportedModelError(
            f"{layer_name(module)} got no ctx: the model does not pass keywords on to its "
            "attention, or was called directly and not through Target.forward"
        )
    if attention_mask is not None:
        raise UnsupportedModelError(f"{layer_name(module)} brings an attention mask of its own")
    if not getattr(module, "is_causal", True) or keywords.get("is_causal") is False:
        raise UnsupportedModelError(f"{layer_name(module)} attends to later tokens (not causal)")
    for name, given in keywords.items():
        if name not in _NEUTRAL and given is not None:
            raise UnsupportedModelError(
                f"{layer_name(module)} needs `{name}`, which Ridgeline's attention does not compute"
            )
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    window = sliding_window or None  # some configurations say 0 where they mean none
    output = ctx.attend(module, query, key, value, scaling, window, softcap)
    return output.contiguous(), None


AttentionInterface.register(ATTENTION, attention)
