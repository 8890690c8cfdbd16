"""From a machine's calibration and a model's shape to the cost curve of that model on it."""

from __future__ import annotations

import psutil
import torch

from ridgeline.errors import ConfigError
from ridgeline.model.device import choose_dtype
from ridgeline.plan.calibrate import runnable
from ridgeline.plan.calibration import Calibration
from ridgeline.plan.cost import CostCurve
from ridgeline.plan.hardware import Hardware
from ridgeline.plan.probe import DENSE
from ridgeline.plan.shape import EXPERTS, ModelShape

LOCAL = "local"


def runs_natively(shape: ModelShape, device: torch.device) -> bool:
    """Whether the native decoder would run the model."""
    return device.type == "cpu" and shape.obstacle is None


def as_run(shape: ModelShape, device: torch.device) -> ModelShape:
    """The model as the engine would run it here: what it cannot compute with is unpacked.

    Raises:
        ConfigError: a mixture of experts, which is not calibrated for.
    """
    if any(part.role == EXPERTS for part in shape.parts):
        raise ConfigError(
            f"{shape.name} is a mixture of experts, which this machine is not calibrated for; give "
            "--hardware one of the table"
        )
    native = runs_natively(shape, device)
    if all(runnable(kind, native) for kind in shape.kinds):
        return shape
    default = choose_dtype("auto", device)
    return shape.in_format(next(kind for kind, dtype in DENSE.items() if dtype == default))


def local_curve(shape: ModelShape, calibration: Calibration) -> CostCurve:
    """T(N, B, S) of a step: the forward pass, and the engine's own time around it.

    rows(N) = sum over layers of what a layer costs + sum over weights of what a weight costs, each
    at N rows and for its number format; attention by the numbers that the model keeps of a token
    and the dimensions of its heads.
    """
    kinds = shape.kinds
    rates = {kind: calibration.kinds[kind] for kind in kinds}
    rows = next(iter(rates.values())).rows
    total = sum(kinds.values())
    seconds = []
    for index in range(len(rows)):
        spent = calibration.step
        for kind, weights in kinds.items():
            spent += shape.layers * rates[kind].layer[index] * weights / total
            spent += weights * rates[kind].weight[index]
        seconds.append(spent)
    dimensions = sum(layer.queries * (layer.key + layer.value) for layer in shape.attention)
    return CostCurve(
        rows=rows,
        row_seconds=tuple(seconds),
        key=calibration.key * sum(layer.kept for layer in shape.attention),
        pair=calibration.pair * dimensions,
        sequence=calibration.sequence,
        windows=tuple(layer.window for layer in shape.attention),
    )


def local_hardware(calibration: Calibration, device: torch.device) -> Hardware:
    """The machine as a row of the table: measured rates are its peaks."""
    threads = calibration.machine["threads"]
    cpu = f"{calibration.machine['processor']}, {threads} thread{'s' if threads > 1 else ''}"
    if device.type == "cuda":
        memory = float(torch.cuda.get_device_properties(device).total_memory)
    else:
        memory = float(psutil.virtual_memory().total)
    flops = {kind: rates.flops for kind, rates in calibration.kinds.items()}
    flops.setdefault("bf16", max(flops.values()))
    return Hardware(
        name=LOCAL,
        title=calibration.machine["gpu"] or cpu,
        memory=memory,
        bandwidth=calibration.bandwidth,
        flops=flops,
        source="measured here",
    )
