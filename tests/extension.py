"""The native extension and the instruction sets that it can use here; none where it is missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

KERNELS: list[str] = []
"""Names for `choose_kernels`, the fastest first."""
native: Any = None
try:
    native = import_module("ridgeline._native")
except ImportError:
    pass
else:
    for _name in ("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "neon", "portable"):
        try:
            native.choose_kernels(_name)
        except ValueError:
            continue  # this CPU or build lacks them
        KERNELS.append(_name)
    native.choose_kernels(KERNELS[0])
