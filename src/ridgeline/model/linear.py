"""Linear layers on the native matrix product, where the extension is built.

The product reads packed weights once for several rows, and sums every row in the order of its
inputs whatever the number of rows and threads: a row's bits are the same alone and among others.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_native: ModuleType | None = None
TYPES: dict[torch.dtype, int] = {}
"""The extension's numbers of element types; matrices are fp32 or bf16, caches fp16 too."""
try:
    _native = import_module("ridgeline._native")
    TYPES = {
        torch.float32: _native.F32,
        torch.bfloat16: _native.BF16,
        torch.float16: _native.F16,
    }
except ImportError as error:
    _missing = str(error)

RAW_WEIGHTS = frozenset({"kv_b_proj"})
"""Layers whose weight other code reads: multi-head latent attention absorbs this one."""


class PackedLinear(nn.Module):
    """A linear layer on the CPU whose weights are packed for the native product. Inference only.

    Maps x [..., in_features] to [..., out_features] of the same dtype, fp32 or bf16; sums are fp32.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.dtype = linear.weight.dtype
        self.bias = linear.bias
        self.matrix = pack(linear)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply; raises KeyError for another dtype, ValueError for another width."""
        if not x.is_contiguous():
            x = x.contiguous()
        y = x.new_empty((*x.shape[:-1], self.out_features))
        self.matrix.multiply(TYPES[x.dtype], x.data_ptr(), x.numel(), y.data_ptr(), y.numel())
        return y

    @property
    def weight(self) -> Tensor:
        """The weights [out_features, in_features], unpacked anew at every read: a slow copy."""
        shape = (self.out_features, self.in_features)
        weight = torch.empty(shape, dtype=self.dtype, device="cpu")
        self.matrix.unpack(weight.data_ptr(), weight.numel())
        return weight

    def extra_repr(self) -> str:
        """As nn.Linear shows itself."""
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}"


def pack(linear: nn.Linear, bits: int | None = None) -> Any:
    """The layer's weights and bias as a native matrix, as they are or rounded to 4 or 8 bits."""
    weight = linear.weight.detach()
    if weight.stride(1) != 1 or bits:
        weight = weight.contiguous()
    bias = None if linear.bias is None else linear.bias.detach().to(weight.dtype).contiguous()
    shared = {
        "type": TYPES[weight.dtype],
        "weights": weight.data_ptr(),
        "bias": 0 if bias is None else bias.data_ptr(),
        "outputs": linear.out_features,
        "inputs": linear.in_features,
    }
    if bits:
        return native_module().quantised(bits=bits, **shared)
    return native_module().dense(stride=weight.stride(0), **shared)


def product(matrix: Any, x: Tensor) -> Tensor:
    """f32[T,outputs] for a native matrix and x f32[T,inputs]."""
    x = x.contiguous()
    y = torch.empty(len(x), matrix.outputs, dtype=torch.float32, device="cpu")
    matrix.multiply(TYPES[x.dtype], x.data_ptr(), x.numel(), y.data_ptr(), y.numel())
    return y


def pack_linears(module: nn.Module, skip: Collection[str] = RAW_WEIGHTS) -> int:
    """Replace the linear layers below `module` by packed ones and return how many were replaced.

    Takes layers on the CPU in fp32 or bf16, but none whose last name is in `skip`; none at all
    without the extension. Each original goes as its copy comes, so memory grows by a layer at most;
    a head tied to the embedding becomes a copy of it.
    """
    if _native is None:
        return 0
    replaced = 0
    # Lists of names, not of layers: those would keep every original alive to the end.
    for parent in [m for m in module.modules() if not isinstance(m, nn.Linear)]:
        for name in [name for name, _ in parent.named_children() if name not in skip]:
            child = getattr(parent, name)
            # A subclass may compute something else, so only nn.Linear itself.
            if type(child) is nn.Linear and _packs(child.weight):
                setattr(parent, name, PackedLinear(child))
                replaced += 1
    return replaced


def _packs(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)


def weight_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters, packed layers included."""
    packed = (m.matrix for m in module.modules() if isinstance(m, PackedLinear))
    return sum(int(weights.nbytes) for weights in (*module.parameters(), *packed))


def set_native_threads(threads: int) -> None:
    """Size the native product's pool of threads, where the extension is built."""
    if _native is not None:
        _native.set_threads(threads)


def native_module() -> ModuleType:
    """The extension; only called where it is built."""
    assert _native is not None
    return _native


def native_kernels() -> str | None:
    """The instruction set that the native code uses; None where it is not built."""
    return None if _native is None else str(_native.kernels())


def matrix_path() -> str:
    """Which matrix product runs on the CPU, and why."""
    if _native is None:
        return f"torch (the native extension is not built: {_missing})"
    return f"native, {_native.kernels()} kernels: the fastest that this processor runs"
