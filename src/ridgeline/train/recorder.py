"""The hidden states of what the target writes, taken as it writes it.

A target that answers prompts computes every state that training will read: to keep them costs
nothing, to compute them again as much as the answers did.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ridgeline.core.tree import DraftProposal
from ridgeline.draft.base import DraftRequest, Needs, Observation
from ridgeline.kv.store import KVStore
from ridgeline.train.store import States


class Recorder:
    """Stands where a drafter does, and drafts nothing.

    It sees a token only if the target computes it, so the engine must not share prefixes.
    """

    name = "recorder"

    def __init__(self, layers: Sequence[int]) -> None:
        """`layers` are the hidden states to keep, as `Target.forward` numbers them."""
        self.needs = Needs(features=tuple(layers))
        self._parts: dict[int, list[States]] = {}

    def take(self) -> list[States]:
        """[layers,T,H] of every sequence since the last call, in the order of their ids.

        The last token of a text was never read by the target: T is one less than its length.
        """
        taken = [np.concatenate(parts, 1) for _, parts in sorted(self._parts.items())]
        self._parts.clear()
        return taken

    def observe(self, observations: Sequence[Observation]) -> None:
        """Keeps the states of the step's tokens."""
        for observed in observations:
            parts = self._parts.setdefault(observed.sequence.id, [])
            if observed.start == 0:  # also where it was put back and is computed again
                parts.clear()
            parts.append(torch.stack(observed.features).half().numpy(force=True))

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftProposal]:
        """Nothing."""
        return [DraftProposal.empty() for _ in requests]

    def bind(self, store: KVStore, first_layer: int) -> None:
        """Has no layers of its own."""

    def forget(self, sequence_id: int) -> None:
        """What was recorded stays until it is taken."""
