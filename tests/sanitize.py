"""Runs the native extension's tests on a build of it in another folder: `make sanitize`.

An editable install finds its modules before `sys.path` is looked at, so its finder is taken out.
"""

import importlib
import sys
from pathlib import Path

import pytest

TESTS = ("linear", "quant", "native", "native_gguf", "threads")

if __name__ == "__main__":
    folder, *arguments = sys.argv[1:]
    sys.meta_path = [f for f in sys.meta_path if not type(f).__name__.startswith("ScikitBuild")]
    sys.path.insert(0, str(Path(folder).resolve()))
    extension = importlib.import_module("ridgeline._native")
    assert Path(str(extension.__file__)).is_relative_to(Path(folder).resolve()), extension
    sys.exit(pytest.main([*(f"tests/test_{name}.py" for name in TESTS), *arguments]))
