"""A GGUF file's tensors, unpacked into a safetensors file of a transformers model.

Which tensor belongs where, and how an architecture's rows were permuted or its norms shifted when
the file was written, is transformers' knowledge (`modeling_gguf_pytorch_utils`). The unpacking of
each quantisation type is the `gguf` package's. Ours is the way between: tensors are unpacked in
slices by several threads, straight into the mapped file, so that memory stays bounded and no
weight exists twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from gguf.quants import dequantize
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from ridgeline.errors import ModelLoadError
from ridgeline.model.cache import byte_progress
from ridgeline.model.gguf_file import GGUFFile, GGUFTensor

ROPE_FACTORS = "rope_freqs.weight"
"""A tensor that belongs to the configuration (Llama 3's rotary scaling), not to the weights."""

_SLICE = 1 << 20  # values unpacked at a time: 4 MB, and a few times that in temporaries
_DTYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class WeightPlan:
    """Where each tensor of the file goes; made, and checked, before any weight is read."""

    def __init__(self, header: GGUFFile, config: PreTrainedConfig, dtype: torch.dtype) -> None:
        """Match the file's tensors with the parameters of `config`'s model.

        Matrices are stored in `dtype`, vectors in fp32 (they are small, and a norm may be rounded
        only after its offset is taken off).

        Raises:
            ModelLoadError: a tensor is missing, left over, of another shape, or of a type that the
                `gguf` package cannot unpack.
        """
        self.header = header
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        self._processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(
            config=config.to_dict()
        )
        weights = model.state_dict()
        # Given the model itself it would build its tables anew for every submodule.
        outline = SimpleNamespace(
            config=config, state_dict=lambda: weights, named_children=lambda: ()
        )
        self._mapping: dict[str, str] = get_gguf_hf_weights_map(outline, self._processor)
        tied = model.all_tied_weights_keys
        shapes = {name: weight.shape for name, weight in weights.items() if name not in tied}
        self.layout = {
            name: (torch.float32 if len(shape) == 1 else dtype, tuple(shape))
            for name, shape in shapes.items()
        }
        self._check()

    @property
    def nbytes(self) -> int:
        """Bytes of all weights once unpacked."""
        return sum(prod(shape) * dtype.itemsize for dtype, shape in self.layout.values())

    def write(self, path: Path) -> None:
        """Unpack every tensor into a new safetensors file of transformers' names."""
        targets = _create_safetensors(path, self.layout)
        largest_first = sorted(self._used(), key=lambda tensor: -prod(tensor.shape))
        jobs = [job for tensor in largest_first for job in self._jobs(tensor, targets)]
        total = sum(tensor.nbytes for tensor in largest_first)
        with (
            byte_progress(f"converting {self.header.path.name} (this once)", total) as progress,
            ThreadPoolExecutor(os.cpu_count()) as threads,
        ):
            for nbytes in threads.map(lambda job: job(), jobs):
                progress.advance(progress.task_ids[0], nbytes)

    def _used(self) -> list[GGUFTensor]:
        return [t for t in self.header.tensors.values() if t.name != ROPE_FACTORS]

    def _target(self, tensor: GGUFTensor) -> str | None:
        """The parameter that the tensor fills, alone or with others."""
        # Merged experts are mapped without the suffix.
        name = self._mapping.get(tensor.name) or self._mapping.get(
            tensor.name.removesuffix(".weight")
        )
        return name if name in self.layout else None

    def _check(self) -> None:
        path = self.header.path
        kinds = {}
        received = dict.fromkeys(self.layout, 0)
        for tensor in self._used():
            target = self._target(tensor)
            if target is None:
                raise ModelLoadError(
                    f"{path} holds a tensor {tensor.name!r} that transformers' "
                    f"{self.header.architecture} model has no place for"
                )
            received[target] += prod(tensor.shape)
            kinds[tensor.kind] = tensor
        for name, (_, shape) in self.layout.items():
            if received[name] != prod(shape):
                raise ModelLoadError(
                    f"{path} holds {received[name]} values for {name}, and its metadata calls for "
                    f"{prod(shape)} of shape {list(shape)}: the file is incomplete or damaged"
                )
        for kind, tensor in kinds.items():
            try:
                dequantize(self.header.rows(tensor)[:1], kind)
            except NotImplementedError:
                raise ModelLoadError(
                    f"{path} stores {tensor.name!r} as {kind.name}, which the installed gguf "
                    "package cannot unpack"
                ) from None

    def _jobs(
        self, tensor: GGUFTensor, targets: dict[str, Tensor]
    ) -> list[Callable[[], int]]:
        """Calls that each unpack a part of the tensor and return how many stored bytes it had."""
        name = self._target(tensor)
        assert name is not None
        # Embeddings, the largest matrices, are never rearranged (GPT-2's head alone is renamed).
        plain = type(self._processor) is TensorProcessor or tensor.name == "token_embd.weight"
        if not plain:
            return [lambda: self._unpack_whole(tensor, name, targets)]
        rows = self.header.rows(tensor)
        target = targets[name].view(len(rows), -1)
        step = max(1, _SLICE // target.shape[1])

        def unpack(first: int) -> int:
            part = rows[first : first + step]
            target[first : first + step] = torch.from_numpy(dequantize(part, tensor.kind))
            return part.nbytes

        return [lambda first=first: unpack(first) for first in range(0, len(rows), step)]

    def _unpack_whole(self, tensor: GGUFTensor, name: str, targets: dict[str, Tensor]) -> int:
        """Unpack one tensor through the architecture's processor, which may rearrange it."""
        values = dequantize(self.header.rows(tensor), tensor.kind).reshape(tensor.shape)
        merged = dict(targets)  # a processor of merged experts writes into, or replaces, an entry
        result = self._processor.process(
            weights=values,
            name=tensor.name,
            tensor_key_mapping=self._mapping,
            parsed_parameters={"tensors": merged},
        )
        if result.name is not None:
            targets[name].copy_(torch.from_numpy(np.ascontiguousarray(result.weights)))
        elif merged[name] is not targets[name]:
            targets[name].copy_(merged[name])
        return tensor.nbytes


def _create_safetensors(
    path: Path, layout: dict[str, tuple[torch.dtype, tuple[int, ...]]]
) -> dict[str, Tensor]:
    """Create the file with room for every tensor; the tensors returned are views of it.

    The format: 8 bytes for the length of a JSON header, the header, the data.
    https://github.com/huggingface/safetensors#format
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    # Wider types first: every tensor then starts at a multiple of its element's size.
    for name, (dtype, shape) in sorted(layout.items(), key=lambda item: -item[1][0].itemsize):
        start, end = end, end + prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": _DTYPE_NAMES[dtype],
            "shape": shape,
            "data_offsets": [start, end],
        }
    header = json.dumps(entries).encode()
    header += b" " * (-(8 + len(header)) % 64)
    base = 8 + len(header)
    with path.open("xb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        if hasattr(os, "posix_fallocate"):  # a full disk is an error now, not a crash later
            os.posix_fallocate(file.fileno(), base, end)
        else:
            file.truncate(base + end)
    data = torch.from_file(str(path), shared=True, size=base + end, dtype=torch.uint8)[base:]
    targets = {}
    for name, (dtype, shape) in layout.items():
        start, end = entries[name]["data_offsets"]  # type: ignore[index]
        targets[name] = data[start:end].view(dtype).view(shape)
    return targets
