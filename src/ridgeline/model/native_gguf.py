"""A GGUF file's quantised weights packed for the native decoder, without a dense copy.

Which tensor is which, and how a family permutes its rows, is transformers' knowledge, as in
`gguf_weights`: a permutation is read off by passing row numbers through its processor.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ridgeline.model.gguf_file import GGUFFile, GGUFTensor
from ridgeline.model.gguf_weights import WeightPlan
from ridgeline.model.linear import native_module, pack

_DENSE = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


def packs(header: GGUFFile) -> bool:
    """Whether every tensor of the file is of a type that can be packed as it is."""
    known = native_module().packs_gguf
    return all(t.kind in _DENSE or known(int(t.kind)) for t in header.tensors.values())


class GGUFSource:
    """The weights of a GGUF file, as `NativeModel` takes them."""

    def __init__(self, header: GGUFFile, config: PreTrainedConfig, bits: int | None = None) -> None:
        """Matches tensors with weights and checks their sizes.

        Matrices that take more than `bits` bits a weight are rounded to so many.

        Raises:
            ModelLoadError: a tensor is missing, left over or of another size.
        """
        self._header = header
        self._plan = WeightPlan(header, config, torch.float32)
        self._tensors = self._plan.sources()
        self._embedding = self._tensors["model.embed_tokens.weight"]
        # Mapped once: every pass reads rows of it.
        self._embedding_blocks = header.rows(self._embedding).reshape(-1)
        self._bits = bits
        self.computes = _main_kind(header)
        if bits and any(len(t.shape) == 2 and _bits(t.kind) > bits for t in self._tensors.values()):
            self.computes += f", at most {bits} bits"

    @property
    def embedding_bytes(self) -> int:
        """What the embedding takes in the mapped file."""
        return self._embedding.nbytes

    def matrix(self, name: str) -> Any:
        """A packed matrix with its bias."""
        tensor = self._tensors.get(name + ".weight")
        if tensor is None and name == "lm_head":  # tied to the embedding
            tensor = self._embedding
        assert tensor is not None
        bias = self.vector(name, "bias")
        outputs, inputs = tensor.shape
        rows = self._plan.row_order(tensor)
        rounded = self._bits is not None and _bits(tensor.kind) > self._bits
        if tensor.kind in _DENSE or rounded:
            linear = nn.Linear(inputs, outputs, bias=len(bias) > 0, device="meta")
            if tensor.kind in _DENSE:
                weight = _dense(self._header.rows(tensor), tensor)[torch.from_numpy(rows).long()]
            else:
                weight = self._unpacked(self._header.rows(tensor).reshape(-1), tensor, rows)
            # fp16 has no kernel of its own, and bf16 would lose bits.
            weight = weight.float() if weight.dtype == torch.float16 else weight
            linear.weight = nn.Parameter(weight, requires_grad=False)
            if len(bias):
                linear.bias = nn.Parameter(torch.from_numpy(bias), requires_grad=False)
            return pack(linear, self._bits if rounded else None)
        return native_module().from_gguf(
            type=int(tensor.kind),
            blocks=self._header.rows(tensor).reshape(-1),
            rows=rows,
            bias=bias,
            inputs=inputs,
        )

    def vector(self, name: str, kind: str = "weight") -> NDArray[np.float32]:
        """A norm's weight or a bias; empty if the file has none."""
        tensor = self._tensors.get(f"{name}.{kind}")
        if tensor is None:
            return np.empty(0, np.float32)
        return self._plan.values(tensor).reshape(-1)

    def embed(self, tokens: Tensor) -> Tensor:
        """f32[T,H] for ids i64[T]; reads only those rows of the file."""
        tensor = self._embedding
        if tensor.kind in _DENSE:
            return _dense(self._embedding_blocks, tensor)[tokens].float()
        return self._unpacked(self._embedding_blocks, tensor, tokens.numpy())

    def _unpacked(
        self, blocks: NDArray[np.uint8], tensor: GGUFTensor, rows: NDArray[np.integer]
    ) -> Tensor:
        """f32[R,inputs]: some rows of a quantised tensor."""
        out = torch.empty(len(rows), tensor.shape[1], dtype=torch.float32, device="cpu")
        native_module().gguf_rows(
            type=int(tensor.kind),
            blocks=blocks,
            rows=tensor.shape[0],
            inputs=tensor.shape[1],
            ids=rows.astype(np.int64, copy=False),
            to=out.data_ptr(),
            to_size=out.numel(),
        )
        return out


def _dense(stored: NDArray[np.uint8], tensor: GGUFTensor) -> Tensor:
    """The stored bytes of an unquantised tensor as what they are."""
    return torch.from_numpy(stored).view(_DENSE[tensor.kind]).view(tensor.shape)


def _bits(kind: GGMLQuantizationType) -> int:
    """Bits of a weight, without its share of a scale."""
    return int(re.findall(r"\d+", kind.name)[0])


def _main_kind(header: GGUFFile) -> str:
    """The type that holds most of the file's bytes, such as Q4_K."""
    sizes: dict[str, int] = {}
    for tensor in header.tensors.values():
        sizes[tensor.kind.name] = sizes.get(tensor.kind.name, 0) + tensor.nbytes
    return max(sizes, key=sizes.__getitem__)
