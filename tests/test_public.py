"""What the package shows to the outside, and which of its modules may know which."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ridgeline

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "ridgeline"
MODULES = sorted(PACKAGE.rglob("*.py"))

LAYERS = {
    "errors": set(),
    "core": {"errors"},
    "kv": {"errors", "core"},
    "attention": {"errors", "core", "kv"},
    "model": {"errors", "core", "kv", "attention"},
    "schedule": {"errors", "core", "kv"},
    "draft": {"errors", "core", "kv", "attention", "model"},
}
"""What each layer may import of ours, beside itself; the modules on top may import anything."""
METHODS = re.compile(r"ngram|n-gram|prompt.?lookup|medusa|eagle|\bmtp\b", re.IGNORECASE)


def imported(source: str) -> Iterator[str]:
    """Modules that a source imports, anywhere in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def forbidden(layer: str, source: str) -> list[str]:
    """Imports that break the layering."""
    allowed = LAYERS[layer] | {layer}
    wrong = []
    for name in imported(source):
        top, *rest = name.split(".")
        if (top == "ridgeline" and rest[0] not in allowed) or (
            layer == "core" and top in {"transformers", "psutil", "typer", "rich"}
        ):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_import_only_what_lies_below(layer: str) -> None:
    paths = [p for p in MODULES if p.relative_to(PACKAGE).parts[0] in {layer, f"{layer}.py"}]
    assert paths
    assert {str(p): found for p in paths if (found := forbidden(layer, p.read_text()))} == {}


def test_a_wrong_import_is_seen() -> None:
    inside = "def f():\n    from ridgeline.engine import Engine\n"
    assert forbidden("core", inside) == ["ridgeline.engine.Engine"]
    assert forbidden("core", "import transformers") == ["transformers"]
    assert forbidden("kv", "from ridgeline import model") == ["ridgeline.model"]
    assert forbidden("draft", "from ridgeline.core.tree import TokenTree") == []


def test_only_draft_names_a_drafting_method() -> None:
    outside = [p for p in MODULES if not {"draft", "train"} & {*p.relative_to(PACKAGE).parts}]
    found = {str(p): METHODS.findall(p.read_text()) for p in outside}
    assert {path: names for path, names in found.items() if names} == {}
    assert any(METHODS.search(p.read_text()) for p in MODULES)


def test_exported_names() -> None:
    assert ridgeline.__all__ == sorted(ridgeline.__all__, key=_ruff_order)
    for name in ridgeline.__all__:
        assert getattr(ridgeline, name) is not None
    assert {n for n in vars(ridgeline) if not n.startswith("_")} - set(ridgeline.__all__) <= (
        {"annotations", "import_module", "TYPE_CHECKING", "Any"}
        | {p.stem for p in PACKAGE.iterdir()}
    )
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        ridgeline.Nothing  # noqa: B018


def _ruff_order(name: str) -> tuple[int, str]:
    """Constants, classes, the rest: how ruff's RUF022 sorts `__all__`."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, ridgeline, ridgeline.cli; print({'torch', 'transformers'} & {*sys.modules})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == ("set()\n", "")


def test_every_module_stands_in_the_structure() -> None:
    text = (ROOT / "docs" / "structure.md").read_text()
    listed = re.findall(r"^- `([\w/]+\.py)`: \S", text, re.MULTILINE)
    modules = [str(path.relative_to(PACKAGE)) for path in MODULES]
    plain = {name for name in modules if name.endswith("/__init__.py")}
    assert sorted(listed) == sorted({*modules} - plain)


def test_every_option_of_a_benchmark_is_explained() -> None:
    calls = [
        (file.name, ast.unparse(node))
        for file in (ROOT / "benchmarks").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "add_argument"
        and not any(keyword.arg == "help" for keyword in node.keywords)
    ]
    assert calls == []
