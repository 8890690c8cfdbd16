"""A plan as one picture: the roofline with its operating points, and speed-up against batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ridgeline.errors import ConfigError
from ridgeline.plan.result import Plan
from ridgeline.plan.roofline import Roofline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NEAR = 0.2
"""Points whose coordinates differ by no more than such a share have one label."""


def draw(path: Path, plan: Plan) -> None:
    """Writes the picture.

    Raises:
        ConfigError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5), layout="constrained")
    figure.suptitle(f"{plan.shape.name} on {plan.hardware.title}, context {plan.context}")
    roof, speeds = figure.subplots(1, 2)
    _roofline(roof, plan)
    _speed_ups(speeds, plan)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"cannot write the picture {path}: {error.strerror}") from None


def _roofline(axes: Axes, plan: Plan) -> None:
    """Rates of whole passes below the roof of the format that most weights have."""
    hardware, kind = plan.hardware, plan.kind
    intensities = np.geomspace(0.25, max(4 * plan.ridge, 64), 200)
    roof = np.minimum(intensities * hardware.bandwidth, hardware.rate(kind))
    axes.loglog(intensities, roof / 1e12, color="black", label=f"roof, {kind}")
    axes.axvline(plan.ridge, color="grey", linestyle=":", label=f"ridge, {plan.ridge:.0f}")
    model = Roofline(plan.shape, hardware)
    points = {
        "plain": [(b.batch, b.plain_seconds, b.batch) for b in plan.batches],
        "checking drafts": [
            (b.best.rows, b.best.verify_seconds, b.batch) for b in plan.batches if b.best.depth
        ],
    }
    labels = (("o", "left", (5, -11)), ("s", "right", (-5, 5)))
    for (label, each), (marker, side, offset) in zip(points.items(), labels, strict=True):
        x, y = [], []
        for rows, seconds, batch in each:
            work = model.work(rows, batch, plan.context).values()
            flops = sum(part.flops for part in work)
            x.append(flops / sum(part.bytes for part in work))
            y.append(flops / seconds / 1e12)
        axes.plot(x, y, marker, label=f"{label}, by batch")
        for place, names in _together(x, y, [str(batch) for _, _, batch in each]):
            axes.annotate(names, place, offset, textcoords="offset points", ha=side)
    axes.set_xlabel("FLOPs a byte")
    axes.set_ylabel("TFLOP/s")
    axes.set_title("Roofline")
    axes.legend(fontsize=8)


def _together(
    x: Sequence[float], y: Sequence[float], names: Sequence[str]
) -> list[tuple[tuple[float, float], str]]:
    """Names by place; points that nearly coincide share one label."""
    found: dict[tuple[float, float], list[str]] = {}
    for point, name in zip(zip(x, y, strict=True), names, strict=True):
        near = (
            place
            for place in found
            if all(abs(np.log(a / b)) < NEAR for a, b in zip(place, point, strict=True))
        )
        found.setdefault(next(near, point), []).append(name)
    return [(place, ", ".join(each)) for place, each in found.items()]


def _speed_ups(axes: Axes, plan: Plan) -> None:
    """The best depth of each drafter, as a band from the lowest to the highest acceptance."""
    batches = [batch.batch for batch in plan.batches]
    for contender in plan.contenders:
        spec, label = contender.planned.spec, contender.planned.label
        each = [batch.choices[spec] for batch in plan.batches]
        (line,) = axes.plot(batches, [choice.middle for choice in each], marker="o", label=label)
        low, high = ([choice.speed_up[end] for choice in each] for end in (0, 1))
        axes.fill_between(batches, low, high, alpha=0.15, color=line.get_color())
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_xlabel("batch size")
    axes.set_ylabel("speed-up over plain decoding")
    axes.set_title("Best depth of each drafter")
    axes.legend(fontsize=8)
