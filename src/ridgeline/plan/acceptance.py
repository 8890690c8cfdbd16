"""How many drafts are accepted: measured, given, or as published."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from scipy.optimize import brentq

from ridgeline.bench.published import Published, published
from ridgeline.core.theory import expected_tokens, expected_tokens_of
from ridgeline.errors import ConfigError

FIXED = "fixed"
"""The policy that always drafts."""


@dataclass(frozen=True)
class Acceptance:
    """Of one drafter: how often position j of a step is drafted and all up to it accepted."""

    survival: tuple[float, ...]
    """s_1, s_2, ...; beyond the last, each is the one before times `rate`"""
    rate: float
    """acceptance of a draft whose predecessors were accepted"""
    nodes: tuple[float, ...] = (1.0,)
    """drafted tokens a step at level 1, 2, ...; beyond the last, each has as many. Less than 1
    where a drafter at times has nothing to say or ends a chain early, more where it drafts trees"""

    def tokens(self, depth: int) -> float:
        """Expected tokens a step, with drafts of at most `depth` levels."""
        known = list(self.survival[:depth])
        while len(known) < depth:
            known.append((known[-1] if known else 1.0) * self.rate)
        return expected_tokens_of(known)

    def drafted(self, depth: int) -> float:
        """Drafted tokens a step, with drafts of at most `depth` levels."""
        return sum(self.at(level) for level in range(1, depth + 1))

    def at(self, level: int) -> float:
        """Drafted tokens a step at one level, the first being 1."""
        return self.nodes[min(level, len(self.nodes)) - 1]

    @property
    def width(self) -> float:
        """Drafted tokens a step and level, over the levels that are known."""
        return sum(self.nodes) / len(self.nodes)


@dataclass(frozen=True)
class Range:
    """Lowest and highest acceptance that a plan reckons with, and where they come from."""

    low: Acceptance
    high: Acceptance
    source: str


def constant(rate: float, nodes: float = 1.0) -> Acceptance:
    """The same at every position: s_j = a^j."""
    return Acceptance((), rate, (nodes,))


def parse_range(text: str) -> Range:
    """A number in [0, 1], or LOW-HIGH.

    Raises:
        ConfigError: it is something else.
    """
    low, high = _ends(text)
    if not 0 <= low <= high <= 1:
        raise ConfigError(
            f"acceptance is {text!r}; it must be a number from 0 to 1 or a range such as 0.6-0.8"
        )
    return Range(constant(low), constant(high), "given")


def _ends(text: str) -> tuple[float, float]:
    """A hyphen may also belong to an exponent: the text is a number, or two around one of them."""
    splits = [(text, text)]
    splits += [(text[: m.start()], text[m.end() :]) for m in re.finditer("-", text)]
    for low, high in splits:
        try:
            return float(low), float(high)
        except ValueError:
            continue
    return -1.0, -1.0


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
    """From one run of a benchmark: its counts as docs/bench.md has them.

    Where a policy chose when to draft, and the drafter has weights, only the steps count in which
    it did: the others say nothing of the drafter. One without weights is silent of its own accord.
    """
    passed, reached, options = run["passed"], run["reached"], run["options"]
    depth = options["depth"]
    paused = options.get("policy", FIXED) != FIXED and run["memory"]["weights"]
    steps = sum(reached[:1]) if paused else run["steps"]
    if not steps or not sum(reached) or not depth:
        return Acceptance((), 0.0, (0.0,))
    survival = [count / steps for count in passed[:depth]]
    return Acceptance(
        # Levels that no draft got to are known to be empty.
        survival=(*survival, *(0.0 for _ in range(depth - len(survival)))),
        rate=sum(passed) / sum(reached),
        nodes=_levels(
            run["drafted"] / steps,
            _reaching(steps, passed, reached, depth),
            trees=options.get("nodes", depth) > depth,
        ),
    )


def _reaching(steps: int, passed: Sequence[int], reached: Sequence[int], depth: int) -> list[float]:
    """Share of steps with a draft of level 1, 2, ..., as far as accepted drafts tell."""
    goes_on = [reached[0] / steps]
    for level in range(1, depth):
        before = passed[level - 1] if level <= len(passed) else 0
        here = reached[level] if level < len(reached) else 0
        goes_on.append(here / before if before else 1.0)
    return list(accumulate(goes_on, lambda share, more: share * more))


def _levels(drafted: float, reaching: Sequence[float], trees: bool) -> tuple[float, ...]:
    """`drafted` tokens a step by level, in proportion to the steps that get there.

    Chains have one token at the first level, so their number there is known; chains that are
    accepted go on more often than others, so that of the further levels is scaled.
    """
    if trees:
        return tuple(drafted * share / sum(reaching) for share in reaching)
    first, *rest = reaching
    if not rest:
        return (first,)
    left = drafted - first
    if not sum(rest):  # whatever there was, no deeper level than the second is known of
        return (first, left, *rest[1:])
    return (first, *(left * share / sum(rest) for share in rest))
