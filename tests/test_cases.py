"""docs/cases.md names, for each of its cases, tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CASES = re.findall(r"^\| (\d+) \| (.*) \|$", (ROOT / "docs" / "cases.md").read_text(), re.MULTILINE)


@cache
def functions(path: str) -> set[str]:
    """Names of the functions at the top of a file."""
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_cases_are_numbered() -> None:
    assert [int(number) for number, _ in CASES] == [*range(1, 27)]


@pytest.mark.parametrize(("number", "line"), CASES, ids=[number for number, _ in CASES])
def test_every_test_named_exists(number: str, line: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", line)
    assert named, f"case {number} names no test"
    assert line.count("::") == len(named)
    assert [f"{path}::{name}" for path, name in named if name not in functions(path)] == []
