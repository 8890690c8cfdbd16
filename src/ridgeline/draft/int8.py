"""Weights of draft heads in 8 bits, as compressed-tensors lays them out ("int-quantized").

A matrix is int8, and beside it stands `NAME_scale`, a factor for every row, or for every group of a
row's inputs. Source of the layout: github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import ModelLoadError

SCALE = "_scale"
CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
        }
    },
}
"""What config.json says of such weights, as `quantization_config`."""


def rounded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every matrix in 8 bits, one bf16 factor a row; everything else as it is."""
    result = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and tensor.is_floating_point():
            scale = (tensor.float().abs().amax(1, keepdim=True) / 127).clamp(min=1e-12).bfloat16()
            # A factor rounded down would put the largest weight beyond 127.
            tensor = (tensor.float() / scale.float()).round().clamp(-127, 127).to(torch.int8)
            result[name + SCALE] = scale
        result[name] = tensor
    return result


def restored(tensors: Mapping[str, Tensor], path: str) -> dict[str, Tensor]:
    """The tensors with fp32 matrices [N,K] in the place of int8 ones and their factors.

    Args:
        tensors: int8[N,K] beside factors [N,G], G dividing K; others are left as they are.
        path: of the head, for messages.

    Raises:
        ModelLoadError: an int8 matrix lacks its factors, or their numbers do not fit.
    """
    result = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int8:
            continue
        scale = result.pop(name + SCALE, None)
        if scale is None:
            raise ModelLoadError(f"{path}: {name} has 8 bits and no {name}{SCALE}")
        rows, columns = tensor.shape if tensor.dim() == 2 else (0, 0)
        groups = scale.numel() // max(1, rows)
        if not groups * columns or scale.numel() != rows * groups or columns % groups:
            raise ModelLoadError(
                f"{path}: {name} is {list(tensor.shape)} and its factors {list(scale.shape)}; "
                "there must be one a row of a matrix, or as many as divide it"
            )
        parts = tensor.float().view(rows, groups, -1) * scale.float().view(rows, groups, 1)
        result[name] = parts.view(tensor.shape)
    return result
