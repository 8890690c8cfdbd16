"""A tiny model in a folder, and a way to run `ridgeline generate` on it within the test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest

from ridgeline import cli
from tests.tiny import save_tiny


class Result(NamedTuple):
    code: int
    stdout: str
    stderr: str

    @property
    def records(self) -> list[dict[str, Any]]:
        """The lines of JSON."""
        *lines, rest = self.stdout.split("\n")
        assert rest == ""
        return [json.loads(line) for line in lines]


def assert_refused(result: Result, message: str) -> None:
    """Nothing is shown but one line that has the message in it."""
    code, stdout, stderr = result
    assert (code, stdout) == (2, "")
    assert stderr.startswith("error: ")
    assert stderr.count("\n") == 1
    assert message in stderr


class Run(Protocol):
    def __call__(self, *arguments: object, model: Path | None = None) -> Result: ...


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for long prompts."""
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `ridgeline generate`, on the tiny model unless another is named."""

    def generate(*arguments: object, model: Path | None = None) -> Result:
        fixed = ["generate", "--model", model or folder, "--dtype", "float32", "--kv-tokens", 4096]
        capsys.readouterr()  # what came before is not of this run
        code = cli.execute([str(part) for part in (*fixed, *arguments)])
        return Result(code, *capsys.readouterr())

    return generate
