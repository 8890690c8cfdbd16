"""A model whose logits are changed on their way out: scaled, rounded, or blurred by noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ridgeline.core.batch import Batch
from ridgeline.kv.store import KVStore
from ridgeline.model.load import LoadedModel
from ridgeline.model.target import Model, Target, TargetOutput

Change = Callable[[Tensor], Tensor]
"""From logits f32[K,V] to others."""


def altered(loaded: LoadedModel, change: Change) -> LoadedModel:
    """The same weights, with other logits."""
    return replace(loaded, model=AlteredModel(loaded.model, change))


def blurred(loaded: LoadedModel, scale: float, seed: int) -> LoadedModel:
    """The same model with normal noise of standard deviation `scale` on each token's logit.

    It drafts well, but never as the target would: its distribution is p exp(noise), normalised.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = scale * torch.randn(loaded.vocab_size, generator=generator)
    noise = noise.to(loaded.model.device)
    return altered(loaded, lambda logits: logits + noise)


class AlteredModel:
    """A `Model`; all but its logits is the original's."""

    def __init__(self, original: Model, change: Change) -> None:
        self.original = original
        self.change = change
        self.layers = original.layers

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.original.device

    @property
    def dtype(self) -> torch.dtype:
        """See `Model.dtype`."""
        return self.original.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return self.original.nbytes

    @property
    def computes(self) -> str:
        """For people."""
        return self.original.computes

    def embed(self, tokens: Tensor) -> Tensor:
        """See `Model.embed`."""
        return self.original.embed(tokens)

    def unembed(self, hidden: Tensor) -> Tensor:
        """See `Model.unembed`."""
        return self.original.unembed(hidden)

    def head_rows(self, ids: Tensor) -> Tensor:
        """See `Model.head_rows`."""
        return self.original.head_rows(ids)

    def bind(self, store: KVStore, first_layer: int = 0) -> AlteredTarget:
        """See `Model.bind`."""
        return AlteredTarget(self.original.bind(store, first_layer), self.change)


class AlteredTarget:
    """A `Target`."""

    def __init__(self, original: Target, change: Change) -> None:
        self.store = original.store
        self._original = original
        self._change = change

    def forward(self, batch: Batch, features: Sequence[int] = ()) -> TargetOutput:
        """See `Target.forward`."""
        output = self._original.forward(batch, features)
        return replace(output, logits=self._change(output.logits))
