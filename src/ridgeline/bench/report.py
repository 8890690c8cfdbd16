"""A benchmark's figures as tables for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ridgeline.bench.published import SOURCES, published

POSITIONS = 8
"""So many fit into a narrow terminal; the JSON file has all."""
CELL = 5
"""Characters of the longest common figure, such as 1.25x."""
NAMES = ("method", "here")
"""Columns that hold no figures."""
SETTINGS = ("depth", "nodes", "confidence", "policy", "draft_dtype", "draft_quantize", "sha256")

Run = dict[str, Any]


def show(console: Console, common: dict[str, Any], runs: Sequence[Run]) -> None:
    """Prints every table. `common` and `runs` are as in the JSON file."""
    model, arguments, prompts = common["model"], common["arguments"], common["prompts"]
    runs = sorted(runs, key=load_of)
    names = labels(runs)
    console.print(
        f"{model['name']}, {model['computes']}, {common['machine']['threads']} threads; "
        f"{len(prompts['kinds'])} prompts, at most {arguments['tokens']} tokens each, plain and "
        f"drafted in turn; medians, rounds: {arguments['repeat']}",
        soft_wrap=True,
    )
    kinds = list(dict.fromkeys(prompts["kinds"]))
    drafted = [(name, run) for name, run in zip(names, runs, strict=True) if run["drafted"]]
    sections = [
        ("Drafters", _drafters(names, runs)),
        ("Beside plain decoding", _speeds(names, runs)),
        ("Share accepted at each position, given all before", _positions(drafted)),
        ("Speed-up by kind of prompt", _by_kind(drafted, kinds, "speed_up", times)),
        ("Tokens per step by kind of prompt", _by_kind(drafted, kinds, "tokens_per_step", number)),
        ("Published by others, on their models and hardware", _published()),
    ]
    for title, table in sections:
        console.print(Text(title, style="bold"), soft_wrap=True)
        console.print(table)
    for source, text in SOURCES.items():
        console.print(Text(f"{source}: {text}", style="dim"))
    console.print(Text(verdict(runs, model["exact"]), style="bold"))


def load_of(run: Run) -> tuple[float, int]:
    """Temperature and batch size, by which runs are grouped."""
    return run["options"]["temperature"], run["options"]["batch"]


def labels(runs: Sequence[Run]) -> list[str]:
    """A short name for each run's drafter: with what tells it from the others, and no more."""
    options = [run["options"] for run in runs]
    specs = {o["drafter"] for o in options}
    names = []
    for o in options:
        name = o["drafter"].partition(":")[0]
        if sum(spec.partition(":")[0] == name for spec in specs) > 1:
            name = o["drafter"]
        same = [other for other in options if other["drafter"] == o["drafter"]]
        differ = [s for s in SETTINGS if len({str(other[s]) for other in same}) > 1]
        names.append(" ".join([name, *(f"{setting} {o[setting]}" for setting in differ)]))
    return names


def verdict(runs: Sequence[Run], exact: bool) -> str:
    """Whether drafts changed any text, in one line."""
    texts, identical = (sum(run[name] for run in runs) for name in ("texts", "identical"))
    line = f"Same tokens as plain decoding: {identical} of {texts} texts."
    if identical == texts:
        return line
    if exact:
        return f"{line} On the native decoder all must be: please report this."
    return (
        f"{line} On transformers' own layers rounding decides between tokens that are nearly "
        "equal, and the rounding depends on the number of rows."
    )


def _drafters(names: Sequence[str], runs: Sequence[Run]) -> Table:
    table = _table("", "depth", "nodes", "confidence", "policy", "weights", "cache per token")
    for name, run in dict(zip(names, runs, strict=True)).items():
        o, memory = run["options"], run["memory"]
        table.add_row(
            Text(name),
            *(str(o[setting]) for setting in ("depth", "nodes", "confidence", "policy")),
            size(memory["weights"]),
            size(memory["kv_per_token"]),
        )
    return table


def _speeds(names: Sequence[str], runs: Sequence[Run]) -> Table:
    table = _table(
        "",
        *("plain\ntokens/s", "drafted\ntokens/s", "speed-up", "tokens\nper step"),
        *("accept-\nance", "c", "pass", "same\ntext"),
    )
    for name, run in _by_load(table, list(zip(names, runs, strict=True))):
        table.add_row(
            name,
            number(run["plain_tokens_per_s"], 1),
            number(run["tokens_per_s"], 1),
            times(run["speed_up"]),
            number(run["tokens_per_step"]),
            number(run["mean_acceptance"]),
            number(run["draft_target_ratio"], 3),
            number(run["pass_ratio"]),
            f"{run['identical']}/{run['texts']}",
        )
    return table


def _positions(runs: Sequence[tuple[str, Run]]) -> Table:
    most = max((len(run["acceptance_by_position"]) for _, run in runs), default=0)
    table = _table("", *map(str, range(1, min(most, POSITIONS) + 1)))
    for name, run in _by_load(table, runs):
        table.add_row(name, *map(number, run["acceptance_by_position"][:POSITIONS]))
    return table


def _by_kind(
    runs: Sequence[tuple[str, Run]],
    kinds: Sequence[str],
    field: str,
    cell: Callable[[float | None], str],
) -> Table:
    table = _table("", *kinds)
    for name, run in _by_load(table, runs):
        table.add_row(name, *(cell(run["kinds"][kind][field]) for kind in kinds))
    return table


def _published() -> Table:
    table = _table("", "method", "here", "speed-up", "tokens per step", "acceptance")
    for row in published():
        table.add_row(
            row.source,
            row.method,
            row.drafter,
            interval(row.speed_up, times),
            number(row.tokens_per_step),
            interval(row.acceptance, number),
        )
    return table


def _by_load(table: Table, runs: Sequence[tuple[str, Run]]) -> Iterator[tuple[Text, Run]]:
    """The runs, those of each temperature and batch size under a row of the table that says so."""
    for (temperature, batch), members in groupby(runs, key=lambda pair: load_of(pair[1])):
        table.add_section()
        table.add_row(Text(f"T = {temperature:g}, batch {batch}", style="bold"))
        for name, run in members:
            yield Text(f"  {name}"), run


def _table(*columns: str) -> Table:
    """Names may be folded where the terminal is narrow, figures never."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    table.add_column(columns[0], overflow="fold", min_width=14)
    for column in columns[1:]:
        names = column in NAMES
        table.add_column(column, justify="left" if names else "right", min_width=CELL)
    return table


def number(value: float | None, digits: int = 2) -> str:
    """Empty where there is none."""
    return "" if value is None else f"{value:.{digits}f}"


def times(value: float | None) -> str:
    """A speed-up."""
    return "" if value is None else f"{value:.2f}x"


def interval(pair: tuple[float, float] | None, cell: Callable[[float], str]) -> str:
    """Lowest and highest, or the one there is."""
    return "" if pair is None else "-".join(dict.fromkeys(map(cell, pair)))


def size(count: int) -> str:
    """Bytes for people."""
    if count >= 1e9:
        return f"{count / 1e9:.1f} GB"
    if count >= 1e6:
        return f"{count / 1e6:.1f} MB"
    return f"{count / 1e3:.1f} kB" if count >= 1e3 else f"{count} B"
