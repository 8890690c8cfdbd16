"""A GGUF file's tensors, unpacked into a safetensors file of a transformers model.

Which tensor belongs where, and how an architecture's rows were permuted or its norms shifted when
the file was written, is transformers' knowledge (`modeling_gguf_pytorch_utils`). The unpacking of
each quantisation type is the `gguf` package's. Ours is the way between: several threads unpack
slices that fit a processor's cache and write them where they belong, so that memory stays bounded.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Self

import numpy as np
import torch
from gguf.quants import dequantize
from numpy.typing import NDArray
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

_SLICE = 1 << 18  # values unpacked at a time: 1 MB; measured fastest, with a few MB of temporaries
_DTYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]

# The tensors whose values or rows a family's processor changes; the rest is stored as it stands.
# A family with a processor that is not listed has each tensor pass through it.
_CHANGED = {
    "llama": r"\.attn_[qk]\.",
    "gemma2": r"norm\.weight$",
    "gemma3": r"norm\.weight$",
    "nemotron": r"norm\.weight$",
    "gpt2": r"(attn_qkv|ffn_down|ffn_up|attn_output)\.weight$",  # transposed
    "qwen2moe": r"$^",
    "qwen3moe": r"$^",
    "minimax-m2": r"$^",
}
# Experts come as one tensor for each of gate and up, and are kept as one: gate above up.
_MERGED = re.compile(r"\.ffn_(gate|up)_exps\.weight$")


class WeightPlan:
    """Where each tensor of the file goes; made, and checked, before any weight is read."""

    def __init__(self, header: GGUFFile, config: PreTrainedConfig, dtype: torch.dtype) -> None:
        """Match the file's tensors with the parameters of `config`'s model.

        Matrices are stored in `dtype`, vectors in fp32: they are small, and transformers rounds
        them when it loads them.

        Raises:
            ModelLoadError: a tensor is missing, left over, of another size, or of a type that the
                `gguf` package cannot unpack.
        """
        self._header = header
        family = header.architecture
        self._processor = TENSOR_PROCESSORS.get(family, TensorProcessor)(config=config.to_dict())
        listed = "$^" if type(self._processor) is TensorProcessor else ""
        self._changed = re.compile(_CHANGED.get(family, listed))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        weights = model.state_dict()
        # Given the model itself it would build its tables anew for every submodule.
        outline = SimpleNamespace(
            config=config, state_dict=lambda: weights, named_children=lambda: ()
        )
        self._names: dict[str, str] = get_gguf_hf_weights_map(outline, self._processor)
        self._layout: _Layout = {
            name: (torch.float32 if weight.dim() == 1 else dtype, tuple(weight.shape))
            for name, weight in weights.items()
            if name not in model.all_tied_weights_keys
        }
        self._check()

    @property
    def nbytes(self) -> int:
        """Bytes of all weights once unpacked."""
        return sum(prod(shape) * dtype.itemsize for dtype, shape in self._layout.values())

    def sources(self) -> dict[str, GGUFTensor]:
        """The tensor that fills each parameter; none of them is merged from several."""
        return {str(self._target(tensor)): tensor for tensor in self._tensors()}

    def row_order(self, tensor: GGUFTensor) -> NDArray[np.int32]:
        """i32[rows]: which stored row of a matrix each row of its parameter is."""
        order = np.arange(tensor.shape[0], dtype=np.float64)[:, None]
        if self._changed.search(tensor.name):
            order = self._processor.process(weights=order, name=tensor.name).weights
        return np.ascontiguousarray(order[:, 0]).astype(np.int32)

    def values(self, tensor: GGUFTensor) -> NDArray[np.float32]:
        """A tensor unpacked whole and passed through the family's processor."""
        values = _unpack(self._header.rows(tensor), tensor).reshape(tensor.shape)
        if self._changed.search(tensor.name):
            values = self._processor.process(weights=values, name=tensor.name).weights
        return np.ascontiguousarray(values, dtype=np.float32)

    def write(self, path: Path) -> None:
        """Unpack every tensor into a new safetensors file under transformers' names."""
        tensors = sorted(self._tensors(), key=lambda tensor: -prod(tensor.shape))
        total = sum(tensor.nbytes for tensor in tensors)
        with (
            byte_progress(f"converting {self._header.path.name} (this once)", total) as progress,
            _WeightFile(path, self._layout) as file,
            ThreadPoolExecutor(os.cpu_count()) as threads,
        ):
            jobs = [job for tensor in tensors for job in self._jobs(tensor, file)]
            for nbytes in threads.map(lambda job: job(), jobs):
                progress.advance(progress.task_ids[0], nbytes)

    def _tensors(self) -> list[GGUFTensor]:
        return [t for t in self._header.tensors.values() if t.name != ROPE_FACTORS]

    def _target(self, tensor: GGUFTensor) -> str | None:
        """The parameter that the tensor fills, alone or with others; None if there is none."""
        name = self._names.get(tensor.name)
        if name is None and "_exps" in tensor.name:  # parameters of experts bear no suffix
            name = self._names.get(tensor.name.removesuffix(".weight"))
        return name if name in self._layout else None

    def _check(self) -> None:
        path = self._header.path
        filled = dict.fromkeys(self._layout, 0)
        kinds = {}
        for tensor in self._tensors():
            target = self._target(tensor)
            if target is None:
                raise ModelLoadError(
                    f"{path} holds a tensor {tensor.name!r} that transformers' "
                    f"{self._header.architecture} model has no place for"
                )
            shape = self._layout[target][1]
            whole = self._header.architecture != "gpt2" and "_exps" not in tensor.name
            if whole and tensor.shape not in (shape, _squeezed(shape)):
                raise ModelLoadError(
                    f"{path} holds {tensor.name!r} of shape {list(tensor.shape)} where its "
                    f"metadata calls for {list(shape)}: it is incomplete or damaged"
                )
            filled[target] += prod(tensor.shape)
            kinds[tensor.kind] = tensor
        for name, (_, shape) in self._layout.items():
            if filled[name] != prod(shape):
                raise ModelLoadError(
                    f"{path} holds {filled[name]} values for {name} where its metadata calls for "
                    f"{prod(shape)}, of shape {list(shape)}: it is incomplete or damaged"
                )
        for kind, tensor in kinds.items():
            try:
                dequantize(self._header.rows(tensor)[:1], kind)
            except NotImplementedError:
                raise ModelLoadError(
                    f"{path} stores {tensor.name!r} as {kind.name}, which the installed gguf "
                    "package cannot unpack"
                ) from None

    def _jobs(self, tensor: GGUFTensor, file: _WeightFile) -> Iterator[Callable[[], int]]:
        """Calls that each unpack a part of the tensor and return how many stored bytes it had."""
        name = self._target(tensor)
        assert name is not None
        if self._changed.search(tensor.name):
            yield partial(self._write_changed, tensor, name, file)
            return
        rows = self._header.rows(tensor)
        # One block of rows, or one an expert; `stride` rows of the target from each to the next.
        block = stride = tensor.shape[-2] if tensor.name.count("_exps") else len(rows)
        offset = 0
        if merged := _MERGED.search(tensor.name):
            stride, offset = 2 * block, block * (merged[1] == "up")
        step = max(1, _SLICE // tensor.shape[-1])
        for start in range(0, len(rows), block):
            for first in range(start, start + block, step):
                part = rows[first : min(first + step, start + block)]
                row = start // block * stride + offset + first - start
                yield partial(_write_slice, tensor, part, name, row, file)

    def _write_changed(self, tensor: GGUFTensor, name: str, file: _WeightFile) -> int:
        """Unpack one tensor whole and pass it through the family's processor."""
        file.write(name, 0, torch.from_numpy(self.values(tensor)))
        return tensor.nbytes


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without dimensions of 1, which some files leave out."""
    return tuple(size for size in shape if size != 1)


def _write_slice(
    tensor: GGUFTensor, part: NDArray[np.uint8], name: str, row: int, file: _WeightFile
) -> int:
    file.write(name, row, torch.from_numpy(_unpack(part, tensor)))
    return part.nbytes


def _unpack(rows: NDArray[np.uint8], tensor: GGUFTensor) -> NDArray[np.float32]:
    """Values, flat, of stored rows."""
    # As a single row: `dequantize` would work through them sixteen at a time, which is slower.
    values: NDArray[np.float32] = dequantize(rows.reshape(1, -1), tensor.kind)
    return values.reshape(-1)


class _WeightFile:
    """A new safetensors file that is filled in any order, by any number of threads.

    The format: 8 bytes for the length of a JSON header, the header, the data.
    https://github.com/huggingface/safetensors#format
    """

    def __init__(self, path: Path, layout: _Layout) -> None:
        self._layout = layout
        self._starts: dict[str, int] = {}
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        # Wider types first: each tensor then starts at a multiple of its element's size.
        for name, (dtype, shape) in sorted(layout.items(), key=lambda item: -item[1][0].itemsize):
            start, end = end, end + prod(shape) * dtype.itemsize
            self._starts[name] = start
            entries[name] = {
                "dtype": _DTYPE_NAMES[dtype],
                "shape": shape,
                "data_offsets": [start, end],
            }
        header = json.dumps(entries).encode()
        header += b" " * (-(8 + len(header)) % 64)
        self._data = 8 + len(header)
        self._file = path.open("xb", buffering=0)
        self._file.write(len(header).to_bytes(8, "little") + header)
        self._file.truncate(self._data + end)

    def write(self, name: str, row: int, values: Tensor) -> None:
        """Put values into a tensor from one of its rows (leading dimensions taken as one) on."""
        dtype, shape = self._layout[name]
        at = self._data + self._starts[name] + row * shape[-1] * dtype.itemsize
        stored: NDArray[np.uint8] = values.to(dtype).contiguous().view(torch.uint8).numpy()
        view = stored.reshape(-1).data
        while view:  # a call writes at most 2 GB
            written = os.pwrite(self._file.fileno(), view, at)
            view, at = view[written:], at + written

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
