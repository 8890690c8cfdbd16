"""From what a command line asks for to everything that a plan is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ridgeline.errors import ConfigError, RidgelineError
from ridgeline.loading import load_llm
from ridgeline.model.device import choose_device
from ridgeline.model.fetch import demo_model
from ridgeline.model.load import LoadedModel
from ridgeline.model.threads import set_threads
from ridgeline.plan.acceptance import Range, parse_range, published_range
from ridgeline.plan.bench_file import from_bench, lookup
from ridgeline.plan.calibrate import calibrated
from ridgeline.plan.calibration import Calibration
from ridgeline.plan.drafters import NOTHING, Planned, defaults, methods, planned
from ridgeline.plan.hardware import Hardware, hardware
from ridgeline.plan.local import LOCAL, as_run, local_curve, local_hardware, runs_natively
from ridgeline.plan.measured import measured_acceptance, measured_curve, prompts_of
from ridgeline.plan.planner import Contender, Planner
from ridgeline.plan.roofline import Roofline
from ridgeline.plan.shape import BITS, ModelShape, read_shape
from ridgeline.schedule.cost import Cost

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Precisions that a model can be loaded in, by the name that loading takes."""

CONTEXT = 1024
"""Tokens of a text, where that is not said and the model reads so many."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Wanted:
    """The command's options; `ridgeline plan --help` says what each means."""

    model: str | None = None
    precision: str | None = None
    hardware: str = LOCAL
    devices: int = 1
    threads: int | None = None
    recalibrate: bool = False
    drafters: tuple[str, ...] = ()
    draft_precision: str | None = None
    depth: int = 8
    context: int | None = None
    acceptance: str | None = None
    bench: Path | None = None
    measure: bool = False


@dataclass(frozen=True)
class Setup:
    """What a plan is made of."""

    shape: ModelShape
    hardware: Hardware
    basis: str
    planner: Planner
    contenders: Sequence[Contender]
    notes: Sequence[str] = ()
    """what the user should know besides"""


def set_up(wanted: Wanted, say: Say = lambda text: None) -> Setup:
    """Reads the shapes, and measures what is to be measured.

    Raises:
        ConfigError: an option is wrong, or does not go with another.
        RidgelineError: see `read_shape`, `calibrated` and `LLM`.
    """
    _check(wanted)
    given = None if wanted.acceptance is None else parse_range(wanted.acceptance)
    benched = from_bench(wanted.bench) if wanted.bench else {}
    set_threads(wanted.threads)
    device, local = choose_device("auto"), _local(wanted)
    shape = read_shape(wanted.model or str(demo_model()))
    if wanted.precision:
        shape = shape.in_format(wanted.precision)
    shape = as_run(shape, device) if local else shape
    context = _context(wanted, shape)
    rounded = "int4" if local and runs_natively(shape, device) else wanted.precision
    precision = wanted.draft_precision or rounded
    drafters, notes = _drafters(wanted, shape, precision, benched)
    if not local:
        chosen = hardware(wanted.hardware).times(wanted.devices)
        cost_of = partial(Roofline, hardware=chosen)
        ranges = _ranges(wanted, drafters, given, benched)
        planner = Planner(cost_of(shape), cost_of, context)
        return Setup(shape, chosen, "on paper: nothing is measured", planner, ranges, notes)
    calibration = _calibrate(wanted, shape, drafters, device, say)
    cost: Cost = local_curve(shape, calibration)
    basis, ranges = "predicted from this machine's calibration", []
    if wanted.measure:
        loaded = _load(wanted)
        say("passes of the model")
        cost = measured_curve(loaded, shape, calibration)
        basis = "measured for the model, predicted from the calibration for drafters"
        ranges = _measured(wanted, loaded, drafters, say)
    else:
        ranges = _ranges(wanted, drafters, given, benched)
    planner = Planner(cost, lambda other: local_curve(as_run(other, device), calibration), context)
    return Setup(shape, local_hardware(calibration, device), basis, planner, ranges, notes)


def _context(wanted: Wanted, shape: ModelShape) -> int:
    """Tokens of a text.

    Raises:
        ConfigError: none, or more than the model reads.
    """
    if wanted.context is None:
        return min(CONTEXT, shape.context)
    if not 1 <= wanted.context <= shape.context:
        raise ConfigError(
            f"context is {wanted.context}; {shape.name} reads 1 to {shape.context} tokens"
        )
    return wanted.context


def _local(wanted: Wanted) -> bool:
    return wanted.hardware.lower() == LOCAL


def _check(wanted: Wanted) -> None:
    for name in ("precision", "draft_precision"):
        value = getattr(wanted, name)
        if value is not None and value not in BITS:
            raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(BITS)}")
    if _local(wanted):
        if wanted.devices != 1:
            raise ConfigError("devices are for --hardware of the table; this machine is one")
        return
    hardware(wanted.hardware)
    for name in ("measure", "recalibrate"):
        if getattr(wanted, name):
            raise ConfigError(f"--{name} measures this machine; leave --hardware out")


def _drafters(
    wanted: Wanted, shape: ModelShape, precision: str | None, benched: Iterable[str]
) -> tuple[list[Planned], list[str]]:
    """The drafters asked for, else those that acceptance is or can be known of; and notes.

    Those of a benchmark that cannot be planned for are left out, and a note says why.
    """
    if wanted.drafters or not wanted.bench:
        specs = wanted.drafters or _default_specs(wanted, shape)
        return [planned(spec, shape, precision) for spec in specs], []
    found, refused = [], {}
    for spec in benched:
        try:
            found.append(planned(spec, shape, precision))
        except RidgelineError as error:
            refused[spec] = error
    if not found:
        raise next(iter(refused.values()))
    return found, [f"{spec} of {wanted.bench} is left out: {e}" for spec, e in refused.items()]


def _default_specs(wanted: Wanted, shape: ModelShape) -> Sequence[str]:
    if wanted.measure:  # a head would have to be there
        return [method.name for method in methods().values() if method.cost == NOTHING]
    return defaults(shape)


def _calibrate(
    wanted: Wanted,
    shape: ModelShape,
    drafters: Sequence[Planned],
    device: torch.device,
    say: Say,
) -> Calibration:
    """The machine's figures for all number formats that occur."""
    others = [as_run(d.shape, device) for d in drafters if d.shape is not None]
    native = runs_natively(shape, device)
    for other in others:
        if runs_natively(other, device) != native:
            raise ConfigError(
                f"{other.name} would run on another path than {shape.name} "
                f"({other.obstacle or shape.obstacle}), which is not planned for"
            )
    kinds = dict.fromkeys(kind for each in (shape, *others) for kind in each.kinds)
    return calibrated(
        kinds,
        device,
        native,
        again=wanted.recalibrate,
        say=lambda what: say(f"calibrating this machine, once: {what}"),
    )


def _load(wanted: Wanted) -> LoadedModel:
    precision = wanted.precision
    if precision is not None and precision not in (*DTYPES, "int8", "int4"):
        raise ConfigError(f"no model runs in {precision} here; --measure takes another --precision")
    rounds = precision is not None and precision.startswith("int")
    llm = load_llm(
        wanted.model,
        dtype="auto" if rounds or precision is None else DTYPES[precision],
        quantize=precision if rounds else None,
        kv_tokens=16,
    )
    return llm.loaded


def _ranges(
    wanted: Wanted, drafters: Sequence[Planned], given: Range | None, benched: dict[str, Range]
) -> list[Contender]:
    """With acceptance that is given, benchmarked, or published by others."""
    found = []
    for each in drafters:
        acceptance = given or lookup(benched, each.spec)
        if acceptance is None and wanted.bench:
            raise ConfigError(
                f"{wanted.bench} holds no run of the drafter {each.spec}; it holds "
                f"{', '.join(benched)}"
            )
        found.append(Contender(each, acceptance or published_range(each.method.name)))
    return found


def _measured(
    wanted: Wanted, loaded: LoadedModel, drafters: Sequence[Planned], say: Say
) -> list[Contender]:
    prompts, found = prompts_of(loaded), []
    for each in drafters:
        say(f"drafter {each.spec}")
        acceptance = measured_acceptance(loaded, each.spec, wanted.depth, prompts)
        found.append(Contender(each, Range(acceptance, acceptance, "measured here")))
    return found
