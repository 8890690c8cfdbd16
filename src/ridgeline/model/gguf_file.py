"""Reading a GGUF file's header: metadata and where each tensor lies, everything checked first.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every count, length and
offset is compared with the file's size before it is used, so a truncated or hostile file costs
neither time nor memory. (`gguf.GGUFReader` wraps each of a vocabulary's strings in arrays of its
own and needs tens of seconds for one of 150,000 tokens.)
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from ridgeline.errors import ModelLoadError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f"},
    **{7: "?", 10: "Q", 11: "q", 12: "d"},
}
_LENGTH = struct.Struct("<Q")
_SMALLEST_ENTRY = 13  # bytes: a key of no characters, its type, a one-byte value
_SMALLEST_TENSOR = 24  # bytes: a name of no characters, no dimensions, type and offset


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor: `shape` in torch's order (rows first), its bytes at `offset` of the file."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GGUFFile:
    """A checked header: the metadata's keys and values, and the tensors by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    @property
    def architecture(self) -> str:
        """The family's name in GGUF's terms, such as "llama" or "qwen2"."""
        return str(self.metadata["general.architecture"])

    def rows(self, tensor: GGUFTensor) -> NDArray[np.uint8]:
        """The tensor's stored bytes, mapped and private: u8[rows, bytes of a row]."""
        raw = np.memmap(self.path, np.uint8, "c", tensor.offset, (tensor.nbytes,))
        return raw.reshape(prod(tensor.shape[:-1]), -1)


def read_gguf(path: Path, *, whole: bool = True) -> GGUFFile:
    """Parse and check the header; raises ModelLoadError naming the file and what is wrong.

    Unless `whole`, the file may end behind its header: a download's beginning describes the model.
    """
    with path.open("rb") as file:
        try:
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # an empty file cannot be mapped
            raise ModelLoadError(f"{path} is empty, not a GGUF file") from None
        with view:
            try:
                metadata, tensors = _Parser(view).parse(whole)
            except _BadHeaderError as error:
                raise ModelLoadError(f"{path} is not a usable GGUF file: {error}") from None
    return GGUFFile(path, metadata, tensors)


class _BadHeaderError(Exception):
    """What is wrong with the header."""


class _Parser:
    """A cursor over the file, mapped or in memory; each read is checked against the file's end."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self._data = data
        self._size = len(data)
        self._at = 0

    def parse(self, whole: bool = True) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        if self._take(4) != _MAGIC:
            raise _BadHeaderError("it does not begin with the letters GGUF")
        version = self._number("I")
        if version not in _VERSIONS:
            raise _BadHeaderError(f"version {version} (little-endian 2 and 3 can be read)")
        tensor_count, entry_count = self._number("Q"), self._number("Q")
        if tensor_count * _SMALLEST_TENSOR + entry_count * _SMALLEST_ENTRY > self._size:
            raise _BadHeaderError(
                f"it announces {tensor_count} tensors and {entry_count} keys, "
                f"more than {self._size} bytes can hold"
            )
        metadata: dict[str, Any] = {}
        for _ in range(entry_count):
            key = self._string()
            if key in metadata:
                raise _BadHeaderError(f"the key {key!r} occurs twice")
            metadata[key] = self._value(self._number("I"))
        if not isinstance(metadata.get("general.architecture"), str):
            raise _BadHeaderError("the key general.architecture is missing")
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise _BadHeaderError(f"general.alignment is {alignment}, not a power of two")

        found = [self._tensor() for _ in range(tensor_count)]
        start = -(-self._at // alignment) * alignment  # the data begins at the next boundary
        tensors: dict[str, GGUFTensor] = {}
        for name, kind, shape, offset, nbytes in found:
            if name in tensors:
                raise _BadHeaderError(f"the tensor {name!r} occurs twice")
            if offset % alignment or (whole and start + offset + nbytes > self._size):
                raise _BadHeaderError(
                    f"the tensor {name!r} ends at byte {start + offset + nbytes} of a file of "
                    f"{self._size}: the file is cut short or damaged; download it again"
                )
            tensors[name] = GGUFTensor(name, kind, shape, start + offset, nbytes)
        ordered = sorted(tensors.values(), key=lambda tensor: tensor.offset)
        for before, after in pairwise(ordered):
            if before.offset + before.nbytes > after.offset:
                raise _BadHeaderError(
                    f"the tensors {before.name!r} and {after.name!r} lie over each other"
                )
        return metadata, tensors

    def _tensor(self) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int, int]:
        name = self._string()
        dims = self._number("I")
        if not 1 <= dims <= _MAX_DIMS:
            raise _BadHeaderError(f"the tensor {name!r} has {dims} dimensions")
        shape = tuple(reversed([self._number("Q") for _ in range(dims)]))  # stored fastest first
        number, offset = self._number("I"), self._number("Q")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise _BadHeaderError(f"the tensor {name!r} is of unknown type {number}") from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[-1] % block:
            raise _BadHeaderError(f"the tensor {name!r} of shape {shape} cannot hold {kind.name}")
        return name, kind, shape, offset, prod(shape) // block * block_bytes

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise _BadHeaderError(f"a value is of unknown type {kind}")
        element, count = self._number("I"), self._number("Q")
        if element in _SCALARS:
            code = np.dtype(_SCALARS[element]).newbyteorder("<")
            return np.frombuffer(self._take(count * code.itemsize), code).tolist()
        if element != _STRING:
            raise _BadHeaderError(f"an array holds values of type {element}")
        if count * 8 > self._size - self._at:  # each string states its length in 8 bytes
            raise _BadHeaderError(f"an array of {count} strings does not fit in the file")
        return self._strings(count)

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        """Without a call for each: a vocabulary and its merges are 300,000."""
        data, at, strings = self._data, self._at, []
        for _ in range(count):
            start = at + 8
            at = start + (_LENGTH.unpack_from(data, at)[0] if start <= self._size else self._size)
            if at > self._size:
                raise _BadHeaderError(self._ends())
            try:
                strings.append(data[start:at].decode())
            except UnicodeDecodeError:
                raise _BadHeaderError(f"the text {data[start:at][:40]!r} is not UTF-8") from None
        self._at = at
        return strings

    def _number(self, code: str) -> Any:
        size = struct.calcsize(f"<{code}")
        return struct.unpack(f"<{code}", self._take(size))[0]

    def _ends(self) -> str:
        return (
            f"it ends at byte {self._size}, inside its header: the file is cut short or damaged; "
            "download it again"
        )

    def _take(self, count: int) -> bytes:
        if count > self._size - self._at:
            raise _BadHeaderError(self._ends())
        self._at += count
        return self._data[self._at - count : self._at]
