"""Outcomes of the first tokens of a text that are told apart, with their exact probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ridgeline.core.sampling import SamplingParams
from ridgeline.prove.reference import Reference
from ridgeline.prove.statistics import Counts

LEAST_SHARE = 0.01
"""Continuations of at least this probability are told apart."""
OTHER = -1


@dataclass(frozen=True)
class Cells:
    """A partition of all texts of `length` tokens after a prompt.

    A cell is a continuation of `length` tokens, or a shorter one and OTHER: whatever else may
    follow it. Cells depend on the target's probabilities alone, never on what was sampled.
    """

    length: int
    p: dict[tuple[int, ...], float]
    """probability of each cell"""

    def marginal(self) -> Cells:
        """Of the first token alone."""
        p: dict[tuple[int, ...], float] = {}
        for cell, share in self.p.items():
            p[cell[:1]] = p.get(cell[:1], 0.0) + share
        return Cells(1, p)

    def count(self, outputs: Iterable[Sequence[int]]) -> Counts:
        """Sorts outputs of at least `length` tokens into the cells."""
        index = {cell: i for i, cell in enumerate(self.p)}
        inner = {cell[:i] for cell in self.p for i in range(len(cell) + 1)}
        observed: NDArray[np.int64] = np.zeros(len(index), np.int64)
        for output in outputs:
            text = tuple(output[: self.length])
            known = next(i for i in range(self.length, -1, -1) if text[:i] in inner)
            cell = text if known == self.length else (*text[:known], OTHER)
            observed[index[cell]] += 1
        return Counts(observed, np.array(list(self.p.values())))


def cells_of(
    reference: Reference, prompt: Sequence[int], params: SamplingParams, length: int
) -> Cells:
    """Follows the likely continuations, and computes what follows each in plain forward passes."""
    cells: dict[tuple[int, ...], float] = {}
    known: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        if not known:  # no text as long is likely
            break
        processed = reference.processed(prompt, list(known), params)
        p = processed.double().softmax(1).cpu().numpy() * np.array(list(known.values()))[:, None]
        longer: dict[tuple[int, ...], float] = {}
        for text, row in zip(known, p, strict=True):
            likely = np.flatnonzero(row >= LEAST_SHARE)
            longer |= {(*text, token): float(row[token]) for token in likely.tolist()}
            row[likely] = 0.0
            cells[(*text, OTHER)] = float(row.sum())
        known = longer
    return Cells(length, cells | known)
