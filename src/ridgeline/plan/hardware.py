"""What processors can do on paper: a table with sources, in `hardware.json`.

Rates are dense ones, without structured sparsity, and sums are in fp32. Nothing reaches them quite;
how near kernels come differs, so a plan for such hardware is an upper bound.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from ridgeline.errors import ConfigError


@dataclass(frozen=True)
class Hardware:
    """One kind of processor, or several that share a model."""

    name: str
    title: str
    memory: float
    """bytes"""
    bandwidth: float
    """bytes/s"""
    flops: dict[str, float]
    """FLOP/s by the format of what is multiplied; without fp8 units that is converted to bf16"""
    source: str

    def rate(self, kind: str) -> float:
        """FLOP/s with weights stored as `kind`; of fewer than 8 bits they are unpacked to bf16."""
        return self.flops.get("bf16" if kind == "fp16" else kind, self.flops["bf16"])

    def ridge(self, kind: str) -> float:
        """FLOPs for each byte from memory where arithmetic becomes the limit.

        With 2-byte weights and 2 FLOPs a weight and token that is a number of tokens: H100 295.

        Source: Williams et al., Roofline (doi 10.1145/1498765.1498785).
        """
        return self.rate(kind) / self.bandwidth

    def times(self, devices: int) -> Hardware:
        """So many of them with the model split evenly; what they tell each other takes no time."""
        if devices == 1:
            return self
        return replace(
            self,
            title=f"{devices} x {self.title}",
            memory=devices * self.memory,
            bandwidth=devices * self.bandwidth,
            flops={kind: devices * rate for kind, rate in self.flops.items()},
        )


def table() -> dict[str, Hardware]:
    """All that is known, by name."""
    rows = json.loads(Path(__file__).with_name("hardware.json").read_text())
    return {
        row["name"]: Hardware(
            name=row["name"],
            title=row["title"],
            memory=row["memory_gb"] * 1e9,
            bandwidth=row["bandwidth_tb_s"] * 1e12,
            flops={kind: rate * 1e12 for kind, rate in row["tflops"].items()},
            source=row["source"],
        )
        for row in rows
    }


def hardware(name: str) -> Hardware:
    """One row of the table; small and capital letters are the same.

    Raises:
        ConfigError: there is none of that name.
    """
    known = table()
    row = known.get(name.lower())
    if row is None:
        raise ConfigError(
            f"there is no hardware {name!r}; it must be local or one of {', '.join(known)}"
        )
    return row
