"""Two drafters as one: the second drafts where the first has nothing to say.

N-grams draft for nothing, and better than any head where a text repeats itself; elsewhere they
have nothing to draft from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.core.tree import DraftProposal
from ridgeline.draft.base import Drafter, DraftRequest, Needs, Observation
from ridgeline.errors import ConfigError
from ridgeline.kv.store import KVStore


class FallbackDrafter:
    """Asks the first drafter, and for each request that it leaves empty the second."""

    def __init__(self, first: Drafter, second: Drafter) -> None:
        """Raises ConfigError where both have layers in the cache: it keeps one length for them."""
        if first.needs.kv and second.needs.kv:
            raise ConfigError(
                f"drafters {first.name!r} and {second.name!r} both keep keys and values; only one "
                "of two can"
            )
        self.name = f"{first.name}+{second.name}"
        features = tuple(dict.fromkeys((*first.needs.features, *second.needs.features)))
        self.needs = Needs(
            features=features,
            kv=(*first.needs.kv, *second.needs.kv),
            weights=first.needs.weights + second.needs.weights,
        )
        self._drafters = (first, second)

    def bind(self, store: KVStore, first_layer: int) -> None:
        """Binds both to the layers of the one that has some."""
        for drafter in self._drafters:
            drafter.bind(store, first_layer)

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftProposal]:
        """See the class."""
        first, second = self._drafters
        proposals = first.propose(requests)
        left = [i for i, proposal in enumerate(proposals) if not len(proposal.tokens)]
        if left:
            for i, proposal in zip(left, second.propose([requests[i] for i in left]), strict=True):
                proposals[i] = proposal
        return proposals

    def observe(self, observations: Sequence[Observation]) -> None:
        """Shows both every step, each the hidden states that it asked for."""
        for drafter in self._drafters:
            places = [self.needs.features.index(layer) for layer in drafter.needs.features]
            drafter.observe(
                [replace(o, features=tuple(o.features[i] for i in places)) for o in observations]
            )

    def forget(self, sequence_id: int) -> None:
        """See `Drafter.forget`."""
        for drafter in self._drafters:
            drafter.forget(sequence_id)
