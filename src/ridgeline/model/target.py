"""What the engine and drafters ask of a model, whatever computes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ridgeline.core.batch import Batch
from ridgeline.errors import ConfigError
from ridgeline.kv.store import KVStore, LayerShape


@dataclass(frozen=True)
class TargetOutput:
    """What a forward pass gives back."""

    logits: Tensor
    """f32[K,V]: one row for each of the batch's `keep` rows"""
    features: tuple[Tensor, ...]
    """[T,H] in the dtype of the model's activations: hidden states of the layers asked for"""


class Target(Protocol):
    """A model whose layers keep their keys and values in a store.

    Several targets may share a store; each only touches its own layers.
    """

    store: KVStore

    def forward(self, batch: Batch, features: Sequence[int] = ()) -> TargetOutput:
        """Write the batch's keys and values, and compute the logits of its `keep` rows.

        `features` asks for hidden states: i is the input of layer i, and the number of layers
        stands for the output of the final norm.

        Raises:
            ConfigError: a feature that the model does not have.
            UnsupportedModelError: a layer asks for something that is not computed here.
        """


class Model(Protocol):
    """Weights ready to run."""

    layers: tuple[LayerShape, ...]
    """what each layer keeps of a token"""

    @property
    def device(self) -> torch.device:
        """Where it runs."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its keys and values, and of its weights unless those are quantised."""

    @property
    def nbytes(self) -> int:
        """Bytes of its weights, the embedding included."""

    @property
    def computes(self) -> str:
        """For people: what computes it, and in which number format."""

    def embed(self, tokens: Tensor) -> Tensor:
        """[T,H] input embeddings of ids i64[T]."""

    def unembed(self, hidden: Tensor) -> Tensor:
        """f32[T,V]: the LM head's logits of final, normed hidden states [T,H]."""

    def head_rows(self, ids: Tensor) -> Tensor:
        """f32[R,H]: the LM head's weights of ids i64[R]."""

    def bind(self, store: KVStore, first_layer: int = 0) -> Target:
        """The model over the store's layers from `first_layer` on."""


def check_features(features: Sequence[int], layers: int) -> None:
    """Raises ConfigError for a hidden state that a model of so many layers does not have."""
    for index in features:
        if not 0 <= index <= layers:
            raise ConfigError(f"hidden state {index} does not exist: the model has 0 to {layers}")
