"""Where a model runs and in which number format."""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path

import torch

from ridgeline.errors import ConfigError

_DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16"), torch.float16),
    **dict.fromkeys(("fp32", "float32"), torch.float32),
}


def choose_device(name: str | torch.device) -> torch.device:
    """The device of a name: "auto", "cpu", "cuda" or "cuda:N", or torch's own.

    Raises:
        ConfigError: it is another, or not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    given = str(name) if isinstance(name, str | torch.device) else ""
    found = re.fullmatch(r"cpu(?::0)?|cuda(?::([0-9]{1,4}))?", given)
    if not found:
        raise ConfigError(f"device is {given or name!r:.40}; it must be auto, cpu, cuda or cuda:N")
    if given.startswith("cuda") and int(found[1] or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device is {given!r}, and torch sees {torch.cuda.device_count()} CUDA devices here; "
            "use cpu"
        )
    return torch.device(given)


def choose_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of a name: "auto", bf16, fp16, fp32 or torch's; ConfigError for any other."""
    if dtype == "auto":
        fast = device.type == "cuda" or cpu_has_bf16()
        return torch.bfloat16 if fast else torch.float32
    named = isinstance(dtype, str | torch.dtype)
    chosen = _DTYPES.get(str(dtype).removeprefix("torch.")) if named else None
    if chosen is None:
        shown = str(dtype) if named else dtype
        raise ConfigError(
            f"dtype is {shown!r:.40}; it must be auto, bfloat16, float16 or float32 "
            "(or bf16, fp16, fp32)"
        )
    return chosen


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bf16 in hardware: AVX-512 BF16, AMX, or Arm's BF16."""
    if platform.system() == "Darwin":
        query = ["sysctl", "-n", "hw.optional.arm.FEAT_BF16"]
        answer = subprocess.run(query, capture_output=True, text=True, check=False)
        return answer.stdout.strip() == "1"
    try:
        features = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return not features.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})
