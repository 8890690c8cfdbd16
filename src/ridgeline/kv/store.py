"""KVStore: the keys and values of every layer, addressed by slot.

A slot is block * block_size + offset, the same for all layers, so that one block table serves the
target model and a drafter's layers alike. Slots say nothing about positions or sequences.

Layers with a sliding window keep every token, not a ring of the last ones: rolling back stays a
change of length, a prefix stays shareable, and attention hides what is outside the window.

Layers with multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) keep one head of
[latent; rotated key] as the key and a value of dimension 0: their values are part of the key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps of a token: (heads, dimension) of its key and value, and their dtype."""

    key: tuple[int, int]
    value: tuple[int, int]
    dtype: torch.dtype


def bytes_per_token(layers: Sequence[LayerShape]) -> int:
    """Bytes that one token takes in all of `layers`."""
    return sum(
        (layer.key[0] * layer.key[1] + layer.value[0] * layer.value[1]) * layer.dtype.itemsize
        for layer in layers
    )


class KVStore:
    """Room for num_blocks * block_size tokens in every layer.

    `keys[layer]` is [slots, Hkv, D] and `values[layer]` is [slots, Hkv, Dv], both in the layer's
    dtype. A slot holds nothing meaningful before it is written. Slot tensors are i64 on `device`;
    slots written to are distinct.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        device: torch.device | str,
    ) -> None:
        self.layers = tuple(layers)
        self.block_size = block_size
        self.device = torch.device(device)
        # Everything of one shape and dtype is one tensor [planes, slots, heads, dimension], so
        # that a move over all layers is one operation for each shape and not for each layer.
        planes = [
            (shape, layer.dtype) for layer in self.layers for shape in (layer.key, layer.value)
        ]
        # Not zeroed: the system then hands out memory only as blocks are first written.
        self._stacks = {
            plane: torch.empty(
                planes.count(plane),
                num_blocks * block_size,
                *plane[0],
                dtype=plane[1],
                device=self.device,
            )
            for plane in dict.fromkeys(planes)
        }
        unbound = {plane: iter(stack.unbind()) for plane, stack in self._stacks.items()}
        views = [next(unbound[plane]) for plane in planes]
        self.keys = tuple(views[0::2])
        self.values = tuple(views[1::2])

    @property
    def nbytes(self) -> int:
        """Bytes of all layers together."""
        return sum(stack.nbytes for stack in self._stacks.values())

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key [T, Hkv, D] and value [T, Hkv, Dv] in slots i64[T] of `layer`."""
        dtype = self.layers[layer].dtype
        self.keys[layer].index_copy_(0, slots, key.to(dtype))
        self.values[layer].index_copy_(0, slots, value.to(dtype))

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the keys [..., Hkv, D] and values [..., Hkv, Dv] in slots i64[...]."""
        flat = slots.reshape(-1)
        # index_select copies whole rows: several times faster than indexing with a tensor.
        key = self.keys[layer].index_select(0, flat)
        value = self.values[layer].index_select(0, flat)
        shape = self.layers[layer]
        return key.view(*slots.shape, *shape.key), value.view(*slots.shape, *shape.value)

    def move(self, src: Tensor, dst: Tensor) -> None:
        """Copy slots src i64[P] to dst i64[P] in every layer.

        Every source is read before any slot is written, so the two may overlap.
        """
        for stack in self._stacks.values():
            stack.index_copy_(1, dst, stack.index_select(1, src))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, target) each, in every layer: what `writable` asks for.

        Sources are read before any target is written, so a target is no later pair's source.
        """
        if pairs:
            blocks = torch.tensor(pairs, dtype=torch.int64, device=self.device)
            offsets = torch.arange(self.block_size, device=self.device)
            slots = blocks[:, :, None] * self.block_size + offsets
            self.move(slots[:, 0].flatten(), slots[:, 1].flatten())
