"""A benchmark's figures as one picture, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.bench.published import published
from ridgeline.bench.report import Run, labels, load_of
from ridgeline.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

THEIRS = {
    "article": ("s", "black"),
    "Spec-Bench": ("D", "grey"),
    "Spec-Bench, 13B": ("v", "grey"),
}
"""Marker and colour of what each source published."""


def check_plot(path: Path) -> None:
    """Whether a picture can be drawn, before anything is measured for it.

    Raises:
        ConfigError: matplotlib is missing, or draws no such file.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed: pip install 'ridgeline[plot]'"
        ) from None
    known = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise ConfigError(f"cannot draw {path}; its name must end in one of {', '.join(known)}")


def draw(path: Path, title: str, runs: Sequence[Run]) -> None:
    """A row for each temperature: speed-up, acceptance by position, speed-up by kind of prompt.

    The latter two are those of the smallest batch. Published figures stand in the row of T = 0.

    Raises:
        ConfigError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    runs = sorted(runs, key=load_of)
    names = labels(runs)
    colours = {name: f"C{i % 10}" for i, name in enumerate(dict.fromkeys(names))}
    pairs = list(zip(names, runs, strict=True))
    rows = [list(group) for _, group in groupby(pairs, key=lambda pair: load_of(pair[1])[0])]
    figure = Figure(figsize=(16, 4.5 * len(rows)), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(len(rows), 3, squeeze=False, width_ratios=(4, 3, 5))
    for row, (speeds, positions, kinds) in zip(rows, axes, strict=True):
        temperature, batch = load_of(row[0][1])
        smallest = [(name, run) for name, run in row if load_of(run)[1] == batch]
        _speeds(speeds, row, colours, theirs=temperature == 0)
        _positions(positions, smallest, colours)
        _kinds(kinds, smallest, colours)
        speeds.set_title(f"T = {temperature:g}: speed-up over plain decoding")
        positions.set_title(f"T = {temperature:g}, batch {batch}: acceptance by position")
        kinds.set_title(f"T = {temperature:g}, batch {batch}: speed-up by kind of prompt")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"cannot write the picture {path}: {error.strerror}") from None


def _speeds(
    axes: Axes, row: Sequence[tuple[str, Run]], colours: dict[str, str], theirs: bool
) -> None:
    """Bars of each batch size by drafter, and what others published for the like of it."""
    batches = sorted({load_of(run)[1] for _, run in row})
    names = list(dict.fromkeys(name for name, _ in row))
    width = 0.8 / len(batches)
    for name, run in row:
        place = batches.index(load_of(run)[1])
        x = names.index(name) + (place - (len(batches) - 1) / 2) * width
        bar = axes.bar(x, run["speed_up"] or 0, width * 0.9, color=colours[name])
        axes.bar_label(bar, [f"{load_of(run)[1]}"], fontsize=8, color="dimgrey")
    if theirs:
        drafters = {run["options"]["drafter"].partition(":")[0]: name for name, run in row}
        for figure in published():
            if figure.drafter in drafters:
                marker, colour = THEIRS[figure.source]
                x = names.index(drafters[figure.drafter]) + 0.45
                low, high = figure.speed_up
                axes.errorbar(
                    x,
                    (low + high) / 2,
                    yerr=(high - low) / 2,
                    marker=marker,
                    color=colour,
                    markerfacecolor="none",
                    capsize=3,
                    label=f"theirs: {figure.source}",
                )
                axes.annotate(
                    figure.method, (x, high), (4, 2), fontsize=7, textcoords="offset points"
                )
        _legend(axes)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(names)), names, rotation=15)
    axes.set_xlabel("above a bar: batch size")
    axes.margins(y=0.15)


def _positions(axes: Axes, row: Sequence[tuple[str, Run]], colours: dict[str, str]) -> None:
    for name, run in row:
        shares = run["acceptance_by_position"]
        if shares:
            places = range(1, len(shares) + 1)
            axes.plot(places, shares, marker="o", color=colours[name], label=name)
    axes.set_ylim(0, 1)
    axes.set_xlabel("position, given that all before were accepted")
    most = max(len(run["acceptance_by_position"]) for _, run in row)
    axes.set_xticks(range(1, most + 1))
    _legend(axes)


def _kinds(axes: Axes, row: Sequence[tuple[str, Run]], colours: dict[str, str]) -> None:
    kinds = list(dict.fromkeys(kind for _, run in row for kind in run["kinds"]))
    width = 0.8 / len(row)
    for i, (name, run) in enumerate(row):
        places = [k + (i - (len(row) - 1) / 2) * width for k in range(len(kinds))]
        heights = [run["kinds"].get(kind, {}).get("speed_up") or 0 for kind in kinds]
        axes.bar(places, heights, width * 0.9, color=colours[name], label=name)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(kinds)), kinds, rotation=15)
    _legend(axes)


def _legend(axes: Axes) -> None:
    """One entry for each label, and none where there is nothing to name."""
    handles, names = axes.get_legend_handles_labels()
    entries: dict[str, Any] = dict(zip(names, handles, strict=True))
    if entries:
        axes.legend(entries.values(), entries.keys(), fontsize=8)
