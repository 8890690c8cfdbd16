"""The README against the code: commands parse, links and prompt files are there, programs run.

Commands are not executed: options are parsed, make targets looked up, imports made.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer

from ridgeline import SamplingParams, cli
from ridgeline.model import fetch
from ridgeline.requests_file import read_jobs

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def blocks(language: str) -> list[str]:
    """The contents of the fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


COMMANDS = [
    shlex.split(line) for block in blocks("sh") for line in block.replace("\\\n", " ").splitlines()
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_shell_commands(command: list[str]) -> None:
    program, *arguments = command
    if program == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in arguments if "=" not in word} <= {*targets}
    elif program == "python":
        [option, source] = arguments
        assert option == "-c"
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(str(node.module))
                assert all(hasattr(module, alias.name) for alias in node.names)
    else:
        assert program == "ridgeline"
        parse(arguments)
        if "--prompt-file" in arguments:
            path = ROOT / arguments[arguments.index("--prompt-file") + 1]
            jobs, broken = read_jobs(path, SamplingParams())
            assert jobs
            assert broken == []


def test_fetched_models_are_named_as_they_are() -> None:
    named = re.findall(r"/models/([\w.-]+\.gguf)", README)
    assert set(named) == {fetch.QWEN_CODER_DRAFT.file, fetch.QWEN_CODER_TARGET.file}


def parse(arguments: list[str]) -> None:
    """Parses a command line without running it; raises typer.TyperException if it is wrong."""
    group = typer.main.get_command(cli.app)
    name, *options = arguments
    group.commands[name].make_context(name, options)


def test_a_wrong_command_is_seen() -> None:
    with pytest.raises(typer.TyperException, match="--temprature"):
        parse(["generate", "--temprature", "1"])


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)]+)\)", README)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    requirements = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *itertools.chain(*project["project"]["optional-dependencies"].values()),
    ]
    names = {re.match(r"[\w-]+", requirement).group() for requirement in requirements}
    names -= {"ridgeline"}  # one extra within another
    section = README.partition("## Dependencies")[2].partition("## ")[0]
    assert {name for name in names if f"`{name}`" not in section} == set()


@pytest.mark.smollm2
@pytest.mark.parametrize("program", blocks("python"))
def test_python_programs(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(program, {})
    shown = capsys.readouterr().out
    assert len(shown) > 100
    assert shown.endswith("\n")
    assert re.search(r" [1-9]\d*$", shown, re.MULTILINE)  # the n-gram drafter was right somewhere


@pytest.mark.smollm2
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = path.read_text()
    assert source.count("\n") <= 40
    exec(compile(source, str(path), "exec"), {"__name__": "__main__"})
    shown = capsys.readouterr().out
    assert len(shown) > 100
    assert "DIFFERENT" not in shown
