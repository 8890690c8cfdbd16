"""A plan: everything that is said of a model, its drafters and some hardware, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.bench.report import size
from ridgeline.plan.hardware import Hardware
from ridgeline.plan.planner import (
    Choice,
    Contender,
    Memory,
    Planner,
    best_of,
    memory,
    stops_paying,
)
from ridgeline.plan.roofline import Roofline, Work, ridge_tokens
from ridgeline.plan.shape import ModelShape


@dataclass(frozen=True)
class BatchPlan:
    """One batch size."""

    batch: int
    work: dict[str, Work]
    """of a plain step: weights, kv and head"""
    passes: tuple[float, ...]
    """seconds of a pass over one token of each text, over two, ..."""
    drafts: dict[str, list[Choice]]
    """of each drafter every depth, from 0 on"""
    best: Choice
    """the best of all that fits into memory; of all, where not even plain decoding does"""
    memory: Memory
    """of the best choice"""

    @property
    def plain_seconds(self) -> float:
        """Of a step of plain decoding."""
        return self.passes[0]

    @property
    def choices(self) -> dict[str, Choice]:
        """The best depth of each drafter, whether it fits or not."""
        return {spec: best_of(each) for spec, each in self.drafts.items()}

    @property
    def fastest(self) -> Choice:
        """The best of these."""
        return best_of(self.choices.values())

    @property
    def crowded(self) -> bool:
        """Whether drafts would pay if there were memory for them."""
        return self.fastest.pays and not self.best.pays

    @property
    def intensity(self) -> float:
        """FLOPs for each byte of a plain step."""
        work = self.work.values()
        return sum(part.flops for part in work) / sum(part.bytes for part in work)


@dataclass(frozen=True)
class Plan:
    """All that is shown."""

    shape: ModelShape
    hardware: Hardware
    basis: str
    """where times come from"""
    context: int
    contenders: Sequence[Contender]
    batches: Sequence[BatchPlan]

    @property
    def kind(self) -> str:
        """The number format of most weights."""
        kinds = self.shape.kinds
        return max(kinds, key=kinds.__getitem__)

    @property
    def ridge(self) -> float:
        """FLOPs for each byte where arithmetic becomes the limit."""
        return self.hardware.ridge(self.kind)

    @property
    def ridge_tokens(self) -> float:
        """Rows of a pass at which its weights' arithmetic takes as long as reading them."""
        return ridge_tokens(self.shape, self.hardware)


def verdict(plan: Plan) -> list[str]:
    """What to do, in plain words."""
    fastest = [batch.fastest for batch in plan.batches]
    best = [batch.best for batch in plan.batches]
    stop, idle = stops_paying(fastest), [choice.batch for choice in fastest if not choice.pays]
    before = [batch for batch in idle if stop is None or batch < stop]
    crowded = [batch.batch for batch in plan.batches if batch.crowded]
    lines = []
    if not idle and not crowded:
        lines.append("Speculation is expected to pay at every batch size above.")
    elif len(idle) == len(best):
        lines.append("Do not speculate here: at no batch size above is a gain expected.")
    elif idle:
        places = [f"at batch {_listed(before)}"] if before else []
        places += [f"from batch {stop} on"] if stop is not None else []
        where = " and ".join(places)
        lines.append(f"Do not speculate here {where}: no gain is expected there.")
    if crowded:
        lines.append(
            f"Do not speculate here at batch {_listed(crowded)}: drafts would pay, but there is no "
            "memory left for them."
        )
    unsure = [choice.batch for choice in best if choice.pays and choice.speed_up[0] <= 1]
    if unsure:
        lines.append(
            f"At batch {_listed(unsure)} the low end of the acceptance assumed is a loss: measure "
            "it on your own prompts, with --measure or `ridgeline bench`."
        )
    tight = [batch for batch in plan.batches if not batch.memory.fits]
    if tight:
        batch = tight[0]
        lines.append(
            f"From batch {batch.batch} on it does not fit: {size(round(batch.memory.total))} are "
            f"needed, {plan.hardware.title} has {size(round(batch.memory.available))}."
        )
    return lines


def _listed(batches: Sequence[int]) -> str:
    return ", ".join(map(str, batches))


def make_plan(
    planner: Planner,
    contenders: Sequence[Contender],
    shape: ModelShape,
    hardware: Hardware,
    basis: str,
    batches: Sequence[int],
    depth: int,
) -> Plan:
    """The best of all drafters and depths up to `depth`, for each batch size.

    Args:
        planner: of the target `shape` on `hardware`.
        contenders: at least one.
        shape, hardware, basis: as in `Plan`.
        batches: sizes, ascending.
        depth: the deepest draft to consider.
    """
    context, roofline = planner.context, Roofline(shape, hardware)
    shape_at = {c.planned.spec: c.planned.shape_at for c in contenders}

    def needed(choice: Choice) -> Memory:
        drafter = shape_at[choice.drafter](choice.depth) if choice.depth else None
        return memory(shape, drafter, choice, context, hardware.memory)

    found = []
    for batch in batches:
        drafts = {c.planned.spec: planner.choices(c, batch, depth) for c in contenders}
        every = [choice for each in drafts.values() for choice in each]
        best = best_of([choice for choice in every if needed(choice).fits] or every)
        found.append(
            BatchPlan(
                batch=batch,
                work=roofline.work(batch, batch, context),
                passes=tuple(planner.forward(1 + drafted, batch) for drafted in range(depth + 1)),
                drafts=drafts,
                best=best,
                memory=needed(best),
            )
        )
    return Plan(shape, hardware, basis, context, contenders, found)
