"""The command `info`: versions, the processor, and which code paths Ridgeline takes on it."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import psutil
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ridgeline.draft import drafter_names
from ridgeline.draft.heads import known_heads
from ridgeline.model.cache import cache_folder
from ridgeline.model.device import choose_device, choose_dtype, cpu_has_bf16
from ridgeline.model.linear import matrix_path, native_kernels
from ridgeline.model.native import FAMILIES

FEATURES = {
    "AVX2": {"avx2", "hw.optional.avx2_0"},
    "AVX-512": {"avx512f", "hw.optional.avx512f"},
    "VNNI": {"avx512_vnni", "avx_vnni"},
    "BF16": {"avx512_bf16", "bf16", "hw.optional.arm.feat_bf16"},
    "AMX": {"amx_tile"},
    "NEON": {"neon", "asimd", "hw.optional.neon", "hw.optional.arm.advsimd"},
    "dot products": {"asimddp", "hw.optional.arm.feat_dotprod"},
    "I8MM": {"i8mm", "hw.optional.arm.feat_i8mm"},
}
"""What matters to matrix products, and how Linux (/proc/cpuinfo) and macOS (sysctl) spell it."""


def run() -> None:
    """Prints the table."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in _rows():
        table.add_row(Text(name, style="bold"), Text(value))
    Console().print(table)


def _rows() -> Iterator[tuple[str, str]]:
    for package in ("ridgeline", "torch", "transformers"):
        yield package, version(package)
    yield "python", f"{platform.python_version()}, {platform.platform()}"
    name, features = processor()
    yield "processor", f"{name}, {psutil.cpu_count(logical=False)} cores"
    yield "features", ", ".join(features) or "none of those that matter here"
    yield "threads", str(torch.get_num_threads())
    memory = psutil.virtual_memory()
    yield "memory", f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB available"
    device = choose_device("auto")
    if device.type == "cuda":
        yield "device", f"cuda, {torch.cuda.get_device_name(device)}"
        reason = "a CUDA device multiplies it fast"
    else:
        yield "device", "cpu; torch sees no CUDA device"
        has = "has" if cpu_has_bf16() else "has no"
        reason = f"the processor {has} bf16 instructions"
    dtype = str(choose_dtype("auto", device)).removeprefix("torch.")
    yield "default dtype", f"{dtype}, as {reason}; of GGUF files: their own where they run natively"
    native = native_kernels()
    decoder = f"native ({native}) for {', '.join(FAMILIES)}; " if native else ""
    yield "forward pass", f"{decoder}transformers' layers for {'others' if native else 'all'}"
    yield "CPU matrix products", matrix_path()
    yield "drafters", ", ".join(drafter_names())
    heads = ", ".join(f"{head.method} for {head.model}" for head in known_heads())
    yield "draft heads", heads or "none; `ridgeline train` trains one"
    yield "cache folder", str(cache_folder())


def processor() -> tuple[str, list[str]]:
    """The processor's name, and which of `FEATURES` it has."""
    if platform.system() == "Darwin":
        text = _output("sysctl", "-n", "machdep.cpu.brand_string").strip()
        pairs = (line.partition(": ") for line in _output("sysctl", "hw.optional").splitlines())
        flags = {key.lower() for key, _, value in pairs if value == "1"}
    else:
        fields: dict[str, str] = {}
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
        text = fields.get("model name", platform.machine())
        flags = set(fields.get("flags", fields.get("Features", "")).split())
    return text, [name for name, spelled in FEATURES.items() if spelled & flags]


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
