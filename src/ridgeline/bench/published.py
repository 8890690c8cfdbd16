"""Figures that others published, to stand beside ours: theirs, on their models and hardware."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SOURCES = {
    "article": "the article that Ridgeline follows, on speculative decoding: typical figures, its "
    "table of paradigms",
    "Spec-Bench": "github.com/hemingkx/Spec-Bench, Leaderboard.md at commit fd2c1cd (22 April "
    "2025): Vicuna-7B-v1.3, one A100, fp16, greedy, batch 1",
    "Spec-Bench, 13B": "the same leaderboard, the same settings with Vicuna-13B-v1.3",
}


@dataclass(frozen=True)
class Published:
    """One row of a published table."""

    source: str
    """a key of `SOURCES`"""
    method: str
    """as it is called there"""
    drafter: str
    """the drafter here that works alike"""
    speed_up: tuple[float, float]
    """lowest and highest"""
    acceptance: tuple[float, float] | None = None
    """lowest and highest share of drafted tokens"""
    tokens_per_step: float | None = None
    nodes: int | None = None
    """drafted tokens a step: as in Spec-Bench's code; the middle of the article's 16 to 32"""
    depth: int | None = None
    """levels of them; the middle of the article's 4 to 6"""
    memory: str | None = None
    kinds: dict[str, float] = field(default_factory=dict)
    """speed-up by what was asked"""


def published() -> list[Published]:
    """All of them."""
    path = Path(__file__).with_name("published.json")
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    for row in rows:
        row |= {name: tuple(row[name]) for name in ("speed_up", "acceptance") if name in row}
    return [Published(**row) for row in rows]
