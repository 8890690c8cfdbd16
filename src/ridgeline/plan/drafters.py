"""What drafters cost: each kind's own weights as a small model, from the shape of the target.

Which drafters there are stands in `drafters.json`, with sources. A folder of a head is not read:
heads of one kind differ little in size.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from ridgeline.draft.auto import AUTO, WEIGHTLESS
from ridgeline.draft.base import spec_parts
from ridgeline.draft.heads import known_heads, model_key
from ridgeline.errors import ConfigError
from ridgeline.plan.shape import EMBEDDING, EXPERTS, HEAD, LAYERS, ModelShape, Part, read_shape

NOTHING, MODEL, PARALLEL, RECURRENT = "nothing", "model", "parallel", "recurrent"


@dataclass(frozen=True)
class Method:
    """A kind of drafter: a row of `drafters.json`."""

    name: str
    cost: str
    """`NOTHING`; `MODEL`: a pass of another model a level; `PARALLEL`: one pass for all levels;
    `RECURRENT`: a pass of one layer a level"""
    source: str
    inputs: int = 0
    """hidden states and embeddings that are projected to one, of the recurrent ones"""
    vocabulary: int | None = None
    """tokens that it can draft; None: the target's"""
    own_layer: bool = False
    """whether its layer is like the target's, experts included; else it is dense"""


@dataclass(frozen=True)
class Planned:
    """A drafter as a plan sees it."""

    spec: str
    method: Method
    shape: ModelShape | None
    """what a pass of it reads, for one level; None: nothing"""

    @property
    def label(self) -> str:
        """For people: the spec, of a draft model without its folder."""
        if self.method.cost == MODEL and self.shape is not None:
            before = self.spec[: self.spec.index(f"{self.method.name}:")]
            return f"{before}{self.method.name}:{self.shape.name}"
        return self.spec

    def passes(self, depth: int) -> int:
        """Of the drafter, for `depth` levels."""
        return depth if self.method.cost in (MODEL, RECURRENT) else min(depth, 1)

    def shape_at(self, depth: int) -> ModelShape | None:
        """What one pass reads where `depth` levels are drafted."""
        if self.shape is None or self.method.cost != PARALLEL:
            return self.shape
        return _repeated(self.shape, depth)


def methods() -> dict[str, Method]:
    """All kinds, by name."""
    rows = json.loads(Path(__file__).with_name("drafters.json").read_text())
    return {row["name"]: Method(**row) for row in rows}


def defaults(target: ModelShape) -> list[str]:
    """Specs of the kinds that need nothing from elsewhere: no other model, no modules it lacks."""
    kinds = methods().values()
    return [m.name for m in kinds if m.cost != MODEL and (target.modules or not m.own_layer)]


def planned(spec: str, target: ModelShape, precision: str | None) -> Planned:
    """The drafter of a spec NAME[:ARGUMENT], of a pair SPEC+SPEC or of `auto` beside a target.

    Of a pair one has no weights, so it costs what the other does; that is reckoned with at every
    step, though the second of a pair drafts only where the first has nothing to say.

    Args:
        spec: as `--drafter` takes it; of `model:PATH` only the shape is read.
        target: the model that checks.
        precision: to round the drafter's weights to; None: as the target's, or its file's.

    Raises:
        ConfigError: no such drafter, or one that cannot be planned for.
        RidgelineError: see `read_shape`.
    """
    if spec == AUTO:
        return replace(planned(_automatic(target), target, precision), spec=spec)
    if len(parts := spec_parts(spec)) > 1:
        first, second = (planned(part, target, precision) for part in parts)
        if first.shape is not None and second.shape is not None:
            raise ConfigError(
                f"there is no plan for {spec}, both of which have weights; give one of them, or a "
                f"pair with {WEIGHTLESS}"
            )
        return replace(second if first.shape is None else first, spec=spec)
    name, _, argument = spec.partition(":")
    known = methods()
    if name not in known:
        raise ConfigError(
            f"there is no plan for the drafter {name!r}; there is for {', '.join(known)}"
        )
    method = known[name]
    if method.cost == NOTHING:
        return Planned(spec, method, None)
    if method.cost == MODEL:
        if not argument:
            raise ConfigError(f"give the draft model's hub id, folder or file: {name}:PATH")
        shape = read_shape(argument)
        if shape.vocabulary < target.vocabulary // 2:
            raise ConfigError(
                f"{argument} has a vocabulary of {shape.vocabulary} tokens and {target.name} one "
                f"of {target.vocabulary}; a draft model needs the target's tokenizer"
            )
    else:
        shape = _head(method, target)
    return Planned(spec, method, shape.in_format(precision) if precision else shape)


def _automatic(target: ModelShape) -> str:
    """What `auto` stands for, as `draft.auto` has it."""
    name = model_key(target.name)
    head = next((head for head in known_heads() if head.model == name), None)
    return f"{WEIGHTLESS}+{head.method}" if head else WEIGHTLESS


def _head(method: Method, target: ModelShape) -> ModelShape:
    """The head's weights for one level."""
    hidden = target.hidden
    kind, bits = next((p.kind, p.bits) for p in target.parts if p.role == HEAD)
    vocabulary = min(method.vocabulary or target.vocabulary, target.vocabulary)
    head = Part(HEAD, kind, vocabulary * hidden, bits, widths=vocabulary + hidden)
    squares = 1 if method.cost == PARALLEL else method.inputs
    projection = Part(LAYERS, kind, squares * hidden**2, bits, widths=(squares + 1) * hidden)
    layer: list[Part] = []
    if method.cost == RECURRENT:
        layer = _layer(method, target, kind, bits)
    return ModelShape(
        name=method.name,
        hidden=hidden,
        vocabulary=vocabulary,
        parts=(projection, *layer, head),
        attention=target.attention[-1:] if layer else (),
        context=target.context,
        cache_bits=target.cache_bits,
        obstacle=target.obstacle,
    )


def _layer(method: Method, target: ModelShape, kind: str, bits: float) -> list[Part]:
    """A mean layer of the target; beside a mixture a dense head has a layer of 12 H^2 weights."""
    mixture = any(part.role == EXPERTS for part in target.parts)
    if mixture and not method.own_layer:
        return [Part(LAYERS, kind, 12 * target.hidden**2, bits, widths=16 * target.hidden)]
    count = target.layers
    return [
        replace(part, weights=part.weights // count, widths=part.widths // count)
        for part in target.parts
        if part.role not in (EMBEDDING, HEAD)
    ]


def _repeated(shape: ModelShape, times: int) -> ModelShape:
    parts = (
        replace(part, weights=times * part.weights, widths=times * part.widths)
        for part in shape.parts
    )
    return replace(shape, parts=tuple(parts))
