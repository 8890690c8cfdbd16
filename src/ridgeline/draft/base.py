"""What a drafter is, and the registry that finds one by name.

A drafter never decides what is emitted: it proposes, the target verifies. Anything that it gets
wrong costs speed and nothing else. docs/add_a_drafter.md shows how to write one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ridgeline.core.sequence import Sequence as TokenSequence
from ridgeline.core.tree import DraftProposal, TokenTree
from ridgeline.core.verify import Verification
from ridgeline.errors import ConfigError
from ridgeline.kv.store import KVStore, LayerShape
from ridgeline.model.load import LoadedModel


@dataclass(frozen=True)
class Needs:
    """What a drafter asks of the engine."""

    features: tuple[int, ...] = ()
    """target layers whose input hidden states `observe` receives (num_layers: the final, normed)"""
    kv: tuple[LayerShape, ...] = ()
    """layers of its own in the cache, over the same slots as the target's"""
    weights: int = 0
    """bytes of its own weights, for reports"""


@dataclass(frozen=True)
class DraftContext:
    """What a factory may build upon."""

    target: LoadedModel
    coupled: bool
    """True under `match`: sampled drafts share the target's noise; otherwise they draw their own"""
    depth: int
    nodes: int
    max_batch_tokens: int
    """tokens that one forward pass of the drafter should not exceed"""
    dtype: str | torch.dtype
    """of the drafter's own weights, as `load_model` takes it, its default being the target's"""
    quantize: str | None = "auto"
    """what to round the drafter's own weights to"""
    confidence: float = 0.0
    """estimated chance of being accepted below which a path need not be drafted on"""
    sampled_siblings: bool = False
    """whether the rule verifies several sampled children of a node; if not, sampled drafts are
    chains"""


@dataclass(frozen=True)
class DraftRequest:
    """One sequence that may be drafted for: at most `nodes` nodes, no path longer than `depth`.

    Slots for kv_len + trunk + `nodes` tokens are allocated: the drafter may write its own layers
    at `sequence.table.slots`, node j of the proposal at index len(sequence.tokens) + j.
    """

    sequence: TokenSequence
    nodes: int
    depth: int


@dataclass(frozen=True)
class Observation:
    """What one forward pass of the target did to one sequence, after its commit."""

    sequence: TokenSequence
    tree: TokenTree
    start: int
    """kv_len before the step: node i of the trunk is token start + i of the sequence"""
    check: Verification | None
    """None after a prefill chunk that asked for no logits"""
    features: tuple[Tensor, ...]
    """per layer asked for, [N,H]: the hidden states of the tree's nodes"""


@runtime_checkable
class Drafter(Protocol):
    """Proposes token trees. One file under draft/ holds one."""

    name: str
    needs: Needs

    def bind(self, store: KVStore, first_layer: int) -> None:
        """Receives the cache in which its own layers start at `first_layer`. Called once."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftProposal]:
        """One proposal a request, in order; an empty one is always allowed."""
        ...

    def observe(self, observations: Sequence[Observation]) -> None:
        """Learns from a step. Called after every forward pass of the target."""

    def forget(self, sequence_id: int) -> None:
        """Drops what it keeps for a sequence that has ended."""


Factory = Callable[[str, DraftContext], "Drafter | None"]
_FACTORIES: dict[str, Factory] = {}


def register(name: str) -> Callable[[Factory], Factory]:
    """Registers a factory under the name that `--drafter NAME[:ARGUMENT]` uses."""

    def add(factory: Factory) -> Factory:
        _FACTORIES[name] = factory
        return factory

    return add


def drafter_names() -> list[str]:
    """Registered names, sorted."""
    return sorted(_FACTORIES)


def spec_parts(spec: str) -> tuple[str, ...]:
    """Both of SPEC+SPEC, the second of which may be such a pair again; else the spec itself."""
    both = re.fullmatch(rf"(.+?)\+((?:{'|'.join(_FACTORIES)})(?::.*)?)", spec)
    return both.groups() if both else (spec,)


def create_drafter(spec: str, context: DraftContext) -> Drafter | None:
    """Builds the drafter of a spec NAME[:ARGUMENT]; None means plain decoding.

    SPEC+SPEC is two in one: the second drafts where the first has nothing to say.

    Raises:
        ConfigError: no drafter of that name, or its argument is wrong.
    """
    if not isinstance(spec, str):
        raise ConfigError(f"drafter is {spec!r}; it must be a string NAME or NAME:ARGUMENT")
    if len(parts := spec_parts(spec)) == 2:
        from ridgeline.draft.fallback import FallbackDrafter

        first, second = (create_drafter(part, context) for part in parts)
        return FallbackDrafter(first, second) if first and second else first or second
    name, _, argument = spec.partition(":")
    if name not in _FACTORIES:
        raise ConfigError(
            f"there is no drafter {name!r}; the drafters are {', '.join(drafter_names())}"
        )
    return _FACTORIES[name](argument, context)
