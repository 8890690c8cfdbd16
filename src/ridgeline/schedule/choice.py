"""A policy by its name."""

from __future__ import annotations

from itertools import pairwise

from ridgeline.errors import ConfigError
from ridgeline.schedule.cost import Cost
from ridgeline.schedule.goodput import GoodputPolicy
from ridgeline.schedule.policy import FixedPolicy, Policy, TablePolicy

TABLE = "8=5,32=2"
"""The table where none is given: five deep up to eight sequences, two up to 32, none above."""
POLICIES = ("fixed", "table", "goodput")


def check_policy(spec: str) -> None:
    """Raises ConfigError for what is no policy, see `create_policy`."""
    _read(spec)


def create_policy(spec: str, nodes: int, depth: int, guess: Cost, *, draft_layers: bool) -> Policy:
    """The policy of a spec: `fixed`, `table`, `table:SEQUENCES=DEPTH,...` or `goodput`.

    `nodes` and `depth`, 1 or more, bound every sequence's tree; the others are as for
    `GoodputPolicy`.

    Raises:
        ConfigError: the spec is none of these.
    """
    name, table = _read(spec)
    if name == "goodput":
        return GoodputPolicy(nodes, depth, guess, draft_layers=draft_layers)
    return TablePolicy(nodes, depth, table) if name == "table" else FixedPolicy(nodes, depth)


def _read(spec: str) -> tuple[str, list[tuple[int, int]]]:
    if not isinstance(spec, str):
        raise ConfigError(f"policy is {spec!r}; it must be one of {', '.join(POLICIES)}")
    name, colon, argument = spec.partition(":")
    if name not in POLICIES or (colon and name != "table"):
        raise ConfigError(
            f"policy is {spec!r}; it must be one of {', '.join(POLICIES)}, or table with depths by "
            f"the number of texts at once, such as table:{TABLE}"
        )
    if name != "table":
        return name, []
    table = [row.partition("=")[::2] for row in (argument if colon else TABLE).split(",")]
    if not all(cell.isdecimal() and len(cell) < 10 for row in table for cell in row):
        raise ConfigError(f"policy is {spec!r}; write for example table:{TABLE}")
    rows = [(int(most), int(depth)) for most, depth in table]
    if any(low >= high for (low, _), (high, _) in pairwise(rows)):
        raise ConfigError(f"policy is {spec!r}; the numbers of texts must ascend, as in {TABLE}")
    return name, rows
