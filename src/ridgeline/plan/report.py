"""A plan as tables and sentences for people, and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ridgeline.bench.report import interval, number, size, times
from ridgeline.plan.acceptance import Range
from ridgeline.plan.planner import Choice, stops_paying
from ridgeline.plan.result import BatchPlan, Plan, verdict
from ridgeline.plan.shape import ModelShape

FORMAT = "ridgeline plan 1"


def show(console: Console, plan: Plan) -> None:
    """Prints every table."""
    shape, hardware = plan.shape, plan.hardware
    for line in (
        f"{shape.name}: {_count(shape.parameters)} parameters"
        + (f", {_count(shape.active)} active" if shape.active != shape.parameters else "")
        + f", {' and '.join(shape.kinds)}, {size(round(shape.nbytes))}; cache "
        f"{size(round(shape.kv_per_token))} a token",
        f"{hardware.title}: {hardware.bandwidth / 1e9:.0f} GB/s, "
        f"{hardware.rate(plan.kind) / 1e12:.2f} TFLOP/s in {plan.kind}; ridge at {plan.ridge:.0f} "
        f"FLOPs a byte, {plan.ridge_tokens:.0f} tokens a pass ({hardware.source})",
        f"context {plan.context} tokens; times are {plan.basis}",
    ):
        console.print(Text(line), soft_wrap=True)
    sections = (
        ("A step of plain decoding", _steps(plan)),
        ("Speed-up at the best depth", _speed_ups(plan)),
        ("What to do", _decisions(plan)),
        ("Where acceptance comes from", _acceptances(plan)),
    )
    for title, table in sections:
        console.print(Text(title, style="bold"))
        console.print(table)
    for line in verdict(plan):
        console.print(Text(line, style="bold"), soft_wrap=True)


def _steps(plan: Plan) -> Table:
    names = ("weights", "kv", "head")
    table = _table("batch", *names, "GFLOP", "FLOPs\na byte", "ms", "tokens/s")
    for batch in plan.batches:
        work = batch.work
        table.add_row(
            str(batch.batch),
            *(size(round(work[name].bytes)) for name in names),
            number(sum(part.flops for part in work.values()) / 1e9, 1),
            number(batch.intensity, 1),
            number(1e3 * batch.plain_seconds, 2),
            number(batch.batch / batch.plain_seconds, 1),
        )
    return table


def _speed_ups(plan: Plan) -> Table:
    table = _table("", *(f"batch {batch.batch}" for batch in plan.batches))
    for contender in plan.contenders:
        spec = contender.planned.spec
        cells = (_cell(batch.choices[spec]) for batch in plan.batches)
        table.add_row(Text(contender.planned.label), *cells)
    return table


def _cell(choice: Choice) -> str:
    """Depth and speed-up."""
    return f"{choice.depth}: {times(choice.middle)}" if choice.depth else "none"


def _decisions(plan: Plan) -> Table:
    labels = {c.planned.spec: c.planned.label for c in plan.contenders}
    table = _table("batch", "draft", "depth", "tokens\nper step", "speed-up", "memory", "fits")
    for batch in plan.batches:
        best, memory = batch.best, batch.memory
        speculate = best.depth > 0
        table.add_row(
            str(batch.batch),
            Text(labels[best.drafter] if speculate else "do not speculate"),
            str(best.depth),
            interval(best.tokens, number),
            interval(best.speed_up, times),
            size(round(memory.total)),
            "yes" if memory.fits else "no",
        )
    return table


def _acceptances(plan: Plan) -> Table:
    table = _table("", "acceptance", "nodes\na level", "source")
    for contender in plan.contenders:
        acceptance = contender.acceptance
        both = acceptance.low, acceptance.high
        cells = (
            interval((both[0].rate, both[1].rate), number),
            interval((both[0].nodes, both[1].nodes), lambda nodes: number(nodes, 1)),
        )
        table.add_row(Text(contender.planned.label), *cells, Text(acceptance.source))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for index, column in enumerate(columns):
        left = index == 0 or column in ("draft", "source")
        table.add_column(column, justify="left" if left else "right", overflow="fold")
    return table


def _count(weights: int) -> str:
    return f"{weights / 1e9:.2f}B" if weights >= 1e9 else f"{weights / 1e6:.0f}M"


def to_json(plan: Plan) -> dict[str, Any]:
    """The same, for programs; docs/plan.md says what is what."""
    shape, hardware = plan.shape, plan.hardware
    return {
        "format": FORMAT,
        "model": {
            "name": shape.name,
            "parameters": shape.parameters,
            "active": shape.active,
            "weights": shape.nbytes,
            "kv_per_token": shape.kv_per_token,
            "kinds": shape.kinds,
        },
        "hardware": {**asdict(hardware), "ridge": plan.ridge, "ridge_tokens": plan.ridge_tokens},
        "basis": plan.basis,
        "context": plan.context,
        "drafters": {
            contender.planned.spec: _drafter(contender.acceptance, contender.planned.shape)
            for contender in plan.contenders
        },
        "batches": [_batch(batch) for batch in plan.batches],
        "stops_paying": stops_paying([batch.best for batch in plan.batches]),
        "verdict": verdict(plan),
    }


def _drafter(acceptance: Range, shape: ModelShape | None) -> dict[str, Any]:
    return {
        "acceptance": asdict(acceptance),
        "weights": shape.nbytes if shape else 0,
        "kv_per_token": shape.kv_per_token if shape else 0,
    }


def _batch(batch: BatchPlan) -> dict[str, Any]:
    return {
        "batch": batch.batch,
        "plain_seconds": batch.plain_seconds,
        "intensity": batch.intensity,
        "work": {name: asdict(work) for name, work in batch.work.items()},
        "choices": {spec: asdict(choice) for spec, choice in batch.choices.items()},
        "best": asdict(batch.best) | {"speculate": batch.best.depth > 0},
        "memory": asdict(batch.memory) | {"total": batch.memory.total, "fits": batch.memory.fits},
    }
