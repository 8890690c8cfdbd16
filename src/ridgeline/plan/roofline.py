"""The roofline: a pass takes as long as its bytes or its arithmetic, whichever is slower.

Source: Williams et al. (doi 10.1145/1498765.1498785); for the linear layers of a decoder, and the
number of tokens where they stop waiting for memory, the article that Ridgeline follows.
"""

from __future__ import annotations

from dataclasses import dataclass

from scipy.optimize import brentq

from ridgeline.plan.hardware import Hardware
from ridgeline.plan.shape import EMBEDDING, EXPERTS, HEAD, ModelShape, Part

ACTIVATION = 2
"""Bytes of an activation."""


@dataclass(frozen=True)
class Work:
    """Of one part of a pass."""

    bytes: float
    """to and from memory"""
    flops: float
    seconds: float

    @property
    def intensity(self) -> float:
        """FLOPs for each byte."""
        return self.flops / self.bytes


def linear_intensity(tokens: int, inputs: int, outputs: int, bits: float = 16) -> float:
    """I(N) = 2 N d_in d_out / (d_in d_out bits / 8 + 2 N (d_in + d_out)): FLOPs for each byte.

    Close to N while N is far below the dimensions, with weights of 16 bits.

    Source: the article that Ridgeline follows.
    """
    weights = inputs * outputs
    return 2 * tokens * weights / (weights * bits / 8 + ACTIVATION * tokens * (inputs + outputs))


def experts_read(part: Part, tokens: float) -> float:
    """Share of the experts that a pass reads: 1 - (1 - k / E)^N, as if tokens chose at random.

    Tokens of one text choose more alike than that, so it is an upper bound.
    """
    read: float = 1 - (1 - part.used / part.of) ** tokens
    return read


def ridge_tokens(shape: ModelShape, hardware: Hardware) -> float:
    """Rows of a pass at which its weights' arithmetic takes as long as reading them.

    Of a mixture of experts that is where the experts that so many rows read take as long.
    """
    parts = [part for part in shape.parts if part.matrices and part.role != EMBEDDING]
    row = sum(2.0 * p.weights * p.used / p.of / hardware.rate(p.kind) for p in parts)

    def balance(tokens: float) -> float:
        moved = sum(
            p.nbytes * (experts_read(p, tokens) if p.role == EXPERTS else 1.0) for p in parts
        )
        return tokens * row - moved / hardware.bandwidth

    all_read = sum(part.nbytes for part in parts) / hardware.bandwidth / row
    found: float = brentq(balance, 0, 2 * all_read)
    return found


@dataclass(frozen=True)
class Roofline:
    """The time of a pass on paper. Implements `schedule.cost.Cost`."""

    shape: ModelShape
    hardware: Hardware

    def seconds(self, tokens: int, sequences: int, context: int) -> float:
        """See `schedule.cost.Cost`: the parts of a pass run one after the other."""
        return sum(part.seconds for part in self.work(tokens, sequences, context).values())

    def work(self, tokens: int, sequences: int, context: int) -> dict[str, Work]:
        """Bytes, FLOPs and time of a pass, split into `weights`, `kv` and `head`."""
        parts = [part for part in self.shape.parts if part.role != EMBEDDING]
        return {
            "weights": self._linear([part for part in parts if part.role != HEAD], tokens),
            "kv": self._attention(tokens, sequences, context),
            "head": self._linear([part for part in parts if part.role == HEAD], tokens),
        }

    def _linear(self, parts: list[Part], tokens: int) -> Work:
        moved = arithmetic = seconds = 0.0
        for part in parts:
            share = experts_read(part, tokens) if part.role == EXPERTS else 1.0
            size = part.nbytes * share + ACTIVATION * tokens * part.widths * part.used
            flops = 2.0 * tokens * part.weights * part.used / part.of if part.matrices else 0.0
            moved, arithmetic = moved + size, arithmetic + flops
            seconds += self._seconds(size, flops, part.kind)
        return Work(moved, arithmetic, seconds)

    def _attention(self, tokens: int, sequences: int, context: int) -> Work:
        """Keys and values of each sequence are read once, those of the new tokens written.

        A row's scores and sums are 2 (d_k + d_v) FLOPs a query head and cached token.
        """
        size = tokens * self.shape.kv_per_token
        flops = 0.0
        for layer in self.shape.attention:
            seen = layer.seen(context)
            size += sequences * seen * layer.kept * self.shape.cache_bits / 8
            flops += 2.0 * tokens * seen * layer.queries * (layer.key + layer.value)
        kind = "fp32" if self.shape.cache_bits == 32 else "bf16"
        return Work(size, flops, self._seconds(size, flops, kind))

    def _seconds(self, size: float, flops: float, kind: str) -> float:
        return max(size / self.hardware.bandwidth, flops / self.hardware.rate(kind))
