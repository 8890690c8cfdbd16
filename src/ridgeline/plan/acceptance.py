"""How many drafts are accepted: measured, from a benchmark's file, given, or as published."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.optimize import brentq

from ridgeline.bench.published import Published, published
from ridgeline.bench.record import FORMAT
from ridgeline.core.theory import expected_tokens, expected_tokens_of
from ridgeline.errors import ConfigError


@dataclass(frozen=True)
class Acceptance:
    """Of one drafter: how often position j of a step is drafted and all up to it accepted."""

    survival: tuple[float, ...]
    """s_1, s_2, ...; beyond the last, each is the one before times `rate`"""
    rate: float
    """acceptance of a draft whose predecessors were accepted"""
    nodes: float = 1.0
    """drafted tokens a step for each level of depth: less than 1 where a drafter at times has
    nothing to say, more where it drafts trees"""

    def tokens(self, depth: int) -> float:
        """Expected tokens a step, with drafts of at most `depth` levels."""
        known = list(self.survival[:depth])
        while len(known) < depth:
            known.append((known[-1] if known else 1.0) * self.rate)
        return expected_tokens_of(known)


@dataclass(frozen=True)
class Range:
    """Lowest and highest acceptance that a plan reckons with, and where they come from."""

    low: Acceptance
    high: Acceptance
    source: str


def constant(rate: float, nodes: float = 1.0) -> Acceptance:
    """The same at every position: s_j = a^j."""
    return Acceptance((), rate, nodes)


def parse_range(text: str) -> Range:
    """A number in [0, 1], or LOW-HIGH.

    Raises:
        ConfigError: it is something else.
    """
    low, dash, high = text.partition("-")
    try:
        rates = float(low), float(high if dash else low)
    except ValueError:
        rates = (-1.0, -1.0)
    if not 0 <= rates[0] <= rates[1] <= 1:
        raise ConfigError(
            f"acceptance is {text!r}; it must be a number from 0 to 1 or a range such as 0.6-0.8"
        )
    return Range(constant(rates[0]), constant(rates[1]), "given")


def published_range(method: str) -> Range:
    """What others report of such drafters, from the lowest to the highest.

    A row that states only tokens per step counts as the constant acceptance that gives so many at
    its depth. Where it drafted trees, so many nodes a level are reckoned with.

    Raises:
        ConfigError: nobody has published any.
    """
    rows = [row for row in published() if row.drafter == method]
    found = [constant(rate, _nodes(row)) for row in rows for rate in _rates(row)]
    if not found:
        raise ConfigError(f"no acceptance of {method} is known; give --acceptance, such as 0.7-0.8")
    found.sort(key=lambda acceptance: acceptance.rate)
    names = " and ".join(dict.fromkeys(row.source for row in rows))
    return Range(found[0], found[-1], f"published: {names}")


def _rates(row: Published) -> tuple[float, ...]:
    if row.acceptance:
        return row.acceptance
    return () if row.tokens_per_step is None else (rate_of(row.tokens_per_step, row.depth),)


def _nodes(row: Published) -> float:
    return row.nodes / row.depth if row.nodes and row.depth else 1.0


def rate_of(tokens: float, depth: int | None) -> float:
    """The constant acceptance with which a step of `depth` levels emits so many tokens.

    The inverse of `core.theory.expected_tokens`; None: without a limit, where t = 1 / (1 - a).
    """
    if depth is None:
        return 1 - 1 / tokens
    found: float = brentq(lambda rate: expected_tokens(rate, depth) - tokens, 0, 1)
    return found


def of_run(run: dict[str, Any]) -> Acceptance:
    """From one run of a benchmark: `steps`, `drafted` and `passed` as docs/bench.md has them."""
    steps, passed, reached = run["steps"], run["passed"], run["reached"]
    if not steps:
        return constant(0.0)
    depth = run["options"]["depth"]
    return Acceptance(
        survival=tuple(count / steps for count in passed[:depth]),
        rate=sum(passed) / sum(reached) if sum(reached) else 0.0,
        nodes=run["drafted"] / steps / depth if depth else 0.0,
    )


def from_bench(path: Path) -> dict[str, Range]:
    """By drafter spec, over the temperatures of a file that `ridgeline bench --json` wrote.

    Of several runs of a drafter under one temperature the smallest batch counts, and the deepest.

    Raises:
        ConfigError: it cannot be read or holds something else.
    """
    try:
        found = json.loads(path.read_text())
        if found["format"] != FORMAT:
            raise ValueError
        runs = sorted(found["runs"], key=lambda run: _order(run["options"]))
        chosen: dict[tuple[str, float], Acceptance] = {}
        for run in runs:
            options = run["options"]
            chosen.setdefault((options["drafter"], options["temperature"]), of_run(run))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{path} holds no results of `ridgeline bench --json`") from None
    specs = dict.fromkeys(spec for spec, _ in chosen)
    ranges = {}
    for spec in specs:
        each = [acceptance for (name, _), acceptance in chosen.items() if name == spec]
        ranges[spec] = _range(each, f"measured: {path.name}")
    return ranges


def _order(options: dict[str, Any]) -> tuple[int, int]:
    return options["batch"], -options["depth"]


def _range(each: Sequence[Acceptance], source: str) -> Range:
    ordered = sorted(each, key=lambda acceptance: acceptance.tokens(len(acceptance.survival)))
    return Range(ordered[0], ordered[-1], source)


def lookup(ranges: dict[str, Range], spec: str) -> Range | None:
    """The range of a drafter, by its spec or else by its name, where that is one drafter's."""
    name = spec.partition(":")[0]
    alike = [found for key, found in ranges.items() if key.partition(":")[0] == name]
    return ranges.get(spec) or (alike[0] if len(alike) == 1 else None)
