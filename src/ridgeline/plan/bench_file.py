"""Acceptance from the file of `ridgeline bench --json`, of which every figure is checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any

from ridgeline.bench.measure import PLAIN
from ridgeline.bench.record import FORMAT
from ridgeline.core.tree import MAX_DRAFTED
from ridgeline.draft.base import spec_parts
from ridgeline.errors import ConfigError
from ridgeline.plan.acceptance import FIXED, Acceptance, Range, of_run


def from_bench(path: Path) -> dict[str, Range]:
    """By drafter spec, over the temperatures of a file that `ridgeline bench --json` wrote.

    Of several runs of a drafter under one temperature those count that always drafted, of these
    the smallest batch, and the deepest.

    Raises:
        ConfigError: it cannot be read, holds something else or a figure that cannot be, or no run
            of a drafter.
    """
    name, runs = _read(path)
    for number, run in enumerate(runs, 1):
        if wrong := _wrong(run):
            raise ConfigError(f"run {number} of {path} is damaged: {wrong}")
    drafting = [run for run in runs if run["options"]["drafter"] != PLAIN and run["steps"]]
    if not drafting:
        raise ConfigError(
            f"{path} holds no run of a drafter; `ridgeline bench --drafter NAME --json` makes one"
        )
    chosen: dict[str, dict[float, Acceptance]] = {}
    for run in sorted(drafting, key=_order):
        options = run["options"]
        found = chosen.setdefault(options["drafter"], {})
        found.setdefault(options["temperature"], of_run(run))
    source = f"measured: {path.name}" + (f", {name}" if name else "")
    return {spec: _range([*found.values()], source) for spec, found in chosen.items()}


def _read(path: Path) -> tuple[str, list[Any]]:
    """The model's name, and the runs."""
    try:
        found = json.loads(path.read_bytes())
        if found["format"] != FORMAT or not isinstance(found["runs"], list):
            raise ValueError
        return str(found.get("model", {}).get("name", "")), found["runs"]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ConfigError(f"{path} holds no results of `ridgeline bench --json`") from None


def _wrong(run: Any) -> str | None:
    """What a run cannot have been, None if nothing."""
    try:
        options = run["options"]
        figures = {name: options[name] for name in _OPTIONS}
        figures |= {name: options[name] for name in ("policy", "nodes") if name in options}
        figures |= {name: run[name] for name in _COUNTS}
        if figures.get("policy", FIXED) != FIXED:
            figures["weights"] = run["memory"]["weights"]
        for name, (right, fits) in _RIGHT.items():
            if name in figures and not fits(figures[name]):
                return f"{name} is not {right}"
        steps, drafted = run["steps"], run["drafted"]
        passed, reached = run["passed"], run["reached"]
    except (KeyError, TypeError, AttributeError):
        return "it lacks what a run has"
    # A draft is looked at where all before it passed, and passes only then.
    flow = [steps, *(n for pair in zip(reached, passed, strict=False) for n in pair)]
    if len(reached) != len(passed) or flow != sorted(flow, reverse=True):
        return "drafts are accepted that were not looked at"
    if len(reached) > options["depth"]:
        return f"drafts are {len(reached)} deep, but at most {options['depth']} were asked for"
    if not sum(reached) <= drafted <= steps * MAX_DRAFTED:
        return f"{drafted} drafts in {steps} steps, of which {sum(reached)} were looked at"
    return None


def _count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_count, value))


def _depth(value: Any) -> bool:
    return _count(value) and value <= MAX_DRAFTED


def _temperature(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < inf


_OPTIONS = ("drafter", "temperature", "batch", "depth")
_COUNTS = ("steps", "drafted", "passed", "reached")
_WHOLE = ("a whole number of 0 or more", _count)
_LIST = ("a list of whole numbers of 0 or more", _counts)
_RIGHT: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "drafter": ("the spec of a drafter", lambda value: isinstance(value, str) and value != ""),
    "policy": ("the name of a policy", lambda value: isinstance(value, str)),
    "temperature": ("a number of 0 or more", _temperature),
    "batch": _WHOLE,
    "depth": (
        f"a whole number from 0 to {MAX_DRAFTED}",
        lambda value: _count(value) and value <= MAX_DRAFTED,
    ),
    "nodes": _WHOLE,
    "weights": _WHOLE,
    "steps": _WHOLE,
    "drafted": _WHOLE,
    "passed": _LIST,
    "reached": _LIST,
}
"""Of each figure of a run what is right, in words and as a check."""


def _order(run: dict[str, Any]) -> tuple[bool, int, int]:
    options = run["options"]
    return options.get("policy", FIXED) != FIXED, options["batch"], -options["depth"]


def _range(each: Sequence[Acceptance], source: str) -> Range:
    ordered = sorted(each, key=lambda acceptance: acceptance.tokens(len(acceptance.survival)))
    return Range(ordered[0], ordered[-1], source)


def lookup(ranges: dict[str, Range], spec: str) -> Range | None:
    """The range of a drafter, by its spec or else by its name, where that is one drafter's."""
    alike = [found for key, found in ranges.items() if _names(key) == _names(spec)]
    return ranges.get(spec) or (alike[0] if len(alike) == 1 else None)


def _names(spec: str) -> tuple[str, ...]:
    """Of a drafter, or of both of a pair."""
    first, *rest = spec_parts(spec)
    return (first.partition(":")[0], *(name for part in rest for name in _names(part)))
