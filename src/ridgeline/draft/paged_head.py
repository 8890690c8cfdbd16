"""A recurrent head running over a layer of the paged cache: in C++ on the CPU, else in torch."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ridgeline.attention.reference import compute_dtype, mask_bias, tree_attention
from ridgeline.core.batch import Batch
from ridgeline.draft.network import RecurrentHead
from ridgeline.kv.store import KVStore, LayerShape
from ridgeline.model.linear import (
    native_kernels,
    native_module,
    pack,
    product,
    weight_bytes,
)
from ridgeline.model.native import LayerCaches, NativeModel, decode
from ridgeline.model.target import Model


class PagedHead(Protocol):
    """A head whose layer keeps its keys and values in a store."""

    kv: LayerShape
    device: torch.device
    nbytes: int
    """of its own weights, without those that are the target's"""

    def bind(self, store: KVStore, layer: int) -> None:
        """Where its keys and values go. Called once."""

    def hidden_from(self, features: Tensor) -> Tensor:
        """See `RecurrentHead.hidden_from`."""

    def run(self, batch: Batch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the batch's keys and values.

        Returns:
            Logits f32[K,Vd] of its `keep` rows, and what the step after any row takes for its
            hidden state, [T,H].
        """


def paged_head(network: RecurrentHead, target: Model, bits: int | None) -> PagedHead:
    """The fastest way to run the network beside this target; `bits` rounds its matrices."""
    dim, on_cpu = network.shape.layer.head_dim, target.device.type == "cpu"
    has_head = network.head is not None or isinstance(target, NativeModel)
    if on_cpu and native_kernels() is not None and dim % 16 == 0 and has_head:
        return NativeHead(network, target, bits)
    return TorchHead(network, target)


def place(network: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Moves a network to a device, its weights to `dtype`; buffers stay fp32.

    Rotary frequencies in bf16 are wrong by up to 0.2 %: a radian, 500 tokens into a text.
    """
    network.to(device)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)


def _kv(network: RecurrentHead, dtype: torch.dtype) -> LayerShape:
    c = network.shape.layer
    side = (c.num_key_value_heads, c.head_dim)
    return LayerShape(side, side, dtype)


class TorchHead:
    """On any device."""

    def __init__(self, network: RecurrentHead, target: Model) -> None:
        self.device = target.device
        dtype = torch.float32 if self.device.type == "cpu" else target.dtype
        place(network, self.device, dtype)
        self._network = network.eval()
        self.nbytes = weight_bytes(network)
        self._target = target
        self._dtype = dtype
        self.kv = _kv(network, dtype)

    def bind(self, store: KVStore, layer: int) -> None:
        """See `PagedHead.bind`."""
        self._store, self._layer = store, layer

    @torch.inference_mode()
    def hidden_from(self, features: Tensor) -> Tensor:
        """See `PagedHead.hidden_from`."""
        return self._network.hidden_from(features.to(self._dtype))

    @torch.inference_mode()
    def run(self, batch: Batch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See `PagedHead.run`."""
        network, scale = self._network, self._network.shape.layer.head_dim**-0.5

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self._store.write(self._layer, batch.slots, key, value)
            biases = [mask_bias(group, None, compute_dtype(query)) for group in batch.groups]
            rows = query.transpose(0, 1)[None]
            return tree_attention(rows, self._store, self._layer, batch, biases, scale)[0]

        embedding = self._target.embed(batch.tokens).to(self._dtype)
        carried = network(embedding, hidden, batch.positions, attend)
        normed = network.normed(carried[batch.keep])
        logits = network.head(normed).float() if network.head else self._target.unembed(normed)
        return logits, network.next_hidden(carried)


class NativeHead:
    """On the native decoder, as one layer whose input comes from outside."""

    def __init__(self, network: RecurrentHead, target: Model, bits: int | None) -> None:
        network = network.float().eval()
        shape, c = network.shape, network.shape.layer
        self.device = torch.device("cpu")
        self.kv = _kv(network, target.dtype)
        self._target = target
        self._carries = 1 if shape.carries_normed else 2
        self._fuse, project, head = (
            _take(network, name, bits) for name in ("fuse", "project", "head")
        )
        self._decoder = native_module().Decoder(
            hidden=c.hidden_size,
            input=c.hidden_size if shape.projected else shape.target_hidden + c.hidden_size,
            heads=c.num_attention_heads,
            kv_heads=c.num_key_value_heads,
            dim=c.head_dim,
            eps=c.rms_norm_eps,
            inverse_frequencies=network.rotary.inv_freq.float().numpy(),
            rotary_scale=float(network.rotary.attention_scaling),
        )
        names = ("query", "key", "value", "output", "gate", "up", "down")
        matrices = [_take(network, name, bits) for name in names]
        own = [*matrices, self._fuse, project, head]
        self.nbytes = sum(matrix.nbytes for matrix in own if matrix is not None)
        self._decoder.enter_by(
            embedding_norm=_vector(network.embedding_norm),
            feature_norm=_vector(network.feature_norm),
            project=project,
            residual_normed=shape.residual_normed,
        )
        self._decoder.add_layer(
            attention_norm=_vector(network.attention_norm),
            mlp_norm=_vector(network.mlp_norm),
            query_norm=_vector(network.query_norm),
            key_norm=_vector(network.key_norm),
            weights=matrices,
            window=0,
        )
        if head is None:
            assert isinstance(target, NativeModel)
            head = target.head
        self._head = head
        self._decoder.finish(norm=_vector(network.norm), head=head)

    def bind(self, store: KVStore, layer: int) -> None:
        """See `PagedHead.bind`."""
        self._caches = LayerCaches(store, layer, 1)

    @torch.inference_mode()
    def hidden_from(self, features: Tensor) -> Tensor:
        """See `PagedHead.hidden_from`."""
        features = features.float()
        return features if self._fuse is None else product(self._fuse, features)

    @torch.inference_mode()
    def run(self, batch: Batch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See `PagedHead.run`."""
        embedding, hidden = self._target.embed(batch.tokens).float(), hidden.contiguous()
        carried = torch.empty_like(hidden)
        logits = decode(
            self._decoder,
            self._head,
            batch,
            embedding,
            self._caches,
            {self._carries: carried},
            hidden,
        )
        return logits, carried


def _take(network: RecurrentHead, name: str, bits: int | None) -> Any:
    """A layer as a native matrix, rounded where its width allows; the network loses its own."""
    linear = getattr(network, name)
    if linear is None:
        return None
    setattr(network, name, None)
    return pack(linear, bits if linear.in_features % 32 == 0 else None)


def _vector(norm: nn.RMSNorm | None) -> np.ndarray[Any, np.dtype[np.float32]]:
    if norm is None:
        return np.empty(0, np.float32)
    return norm.weight.detach().float().numpy()
