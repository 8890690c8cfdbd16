"""A plan as tables and sentences for people, and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from math import floor, log10
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ridgeline.bench.report import interval, number, size, times
from ridgeline.plan.acceptance import Range
from ridgeline.plan.planner import Choice, Contender, stops_paying
from ridgeline.plan.result import BatchPlan, Plan, verdict
from ridgeline.plan.shape import ModelShape

FORMAT = "ridgeline plan 2"


def show(console: Console, plan: Plan) -> None:
    """Prints every table."""
    shape, hardware = plan.shape, plan.hardware
    for line in (
        f"{shape.name}: {_count(shape.parameters)} parameters"
        + (f", {_count(shape.active)} active" if shape.active != shape.parameters else "")
        + f", {' and '.join(shape.kinds)}, {size(round(shape.nbytes))}; cache "
        f"{size(round(shape.kv_per_token))} a token",
        f"{hardware.title}: {hardware.bandwidth / 1e9:.0f} GB/s, "
        f"{_rate(hardware.rate(plan.kind))} in {plan.kind}; ridge at {plan.ridge:.0f} "
        f"FLOPs a byte, {plan.ridge_tokens:.0f} tokens a pass ({hardware.source})",
        f"context {plan.context} tokens; times are {plan.basis}",
    ):
        console.print(Text(line), soft_wrap=True)
    if len(plan.contenders) == 1:
        drafts = ("Speed-up at each depth", _depths(plan, plan.contenders[0]))
    else:
        drafts = ("Speed-up at the best depth", _speed_ups(plan))
    sections = (
        ("A step of plain decoding", _steps(plan)),
        ("A pass over so many tokens of each text, ms", _passes(plan)),
        drafts,
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
    columns = [f"{unit}\n{name}" for unit in ("GB", "GFLOP") for name in names]
    table = _table("batch", *columns, "FLOPs\na byte", "ms", "tokens/s")
    for batch in plan.batches:
        work = batch.work.values()
        table.add_row(
            str(batch.batch),
            *(_short(part.bytes / 1e9) for part in work),
            *(_short(part.flops / 1e9) for part in work),
            _short(batch.intensity),
            _short(1e3 * batch.plain_seconds),
            _short(batch.batch / batch.plain_seconds),
        )
    return table


def _passes(plan: Plan) -> Table:
    table = _table("tokens", *_columns(plan))
    last = len(plan.batches[0].passes)
    for each in sorted({1, *(1 + 2**power for power in range(last.bit_length())), last}):
        if each <= last:
            cells = (_short(1e3 * batch.passes[each - 1]) for batch in plan.batches)
            table.add_row(str(each), *cells)
    return table


def _depths(plan: Plan, contender: Contender) -> Table:
    """Of one drafter everything; a plan with several shows the best depth of each."""
    table = _table("depth", "tokens\nper step", *_columns(plan))
    spec = contender.planned.spec
    for depth, choice in enumerate(plan.batches[0].drafts[spec]):
        if depth:
            cells = (times(batch.drafts[spec][depth].middle) for batch in plan.batches)
            table.add_row(str(depth), interval(choice.tokens, number), *cells)
    return table


def _columns(plan: Plan) -> list[str]:
    return [f"batch {batch.batch}" for batch in plan.batches]


def _speed_ups(plan: Plan) -> Table:
    table = _table("", *_columns(plan))
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
            interval((both[0].width, both[1].width), lambda nodes: number(nodes, 1)),
        )
        table.add_row(Text(contender.planned.label), *cells, Text(acceptance.source))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for index, column in enumerate(columns):
        left = index == 0 or column in ("draft", "source")
        table.add_column(column, justify="left" if left else "right", overflow="fold")
    return table


def _short(value: float) -> str:
    """Three digits or more, of which three at most after the point."""
    return number(value, min(max(2 - floor(log10(value)), 0), 3) if value else 0)


def _rate(flops: float) -> str:
    return f"{_short(flops / 1e12)} TFLOP/s" if flops >= 1e12 else f"{_short(flops / 1e9)} GFLOP/s"


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
        "stops_paying": stops_paying([batch.fastest for batch in plan.batches]),
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
        "passes": batch.passes,
        "drafts": {spec: [*map(asdict, each)] for spec, each in batch.drafts.items()},
        "choices": {spec: asdict(choice) for spec, choice in batch.choices.items()},
        "best": asdict(batch.best) | {"speculate": batch.best.depth > 0},
        "memory": asdict(batch.memory) | {"total": batch.memory.total, "fits": batch.memory.fits},
    }
