"""The commands `demo`, `info` and `--version`."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from rich.console import Console

from ridgeline import LLM, SamplingParams, cli, demo
from ridgeline.config import EngineConfig
from ridgeline.info import processor


def test_demo_without_a_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["demo", "--model", str(folder), "--dtype", "float32", "--max-tokens", "24"]
    assert cli.execute(command) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "identical" in shown
    for row in ("tokens/s", "speed-up", "tokens per step", "drafts accepted"):
        assert shown.count(row) == 1
    plain, drafted = re.findall(
        r"^(?:Plain|With drafts): .*\n((?:.*\n)*?)(?=With drafts|┏)", shown, re.M
    )
    assert plain == drafted
    assert len(plain) > 10


def test_demo_colours_accepted_drafts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The model as its own drafter is always right, but as slow, so that `goodput` may leave it out.
    monkeypatch.setattr(EngineConfig, "chosen_policy", property(lambda config: "fixed"))
    console = Console(record=True, force_terminal=True, color_system="truecolor", width=80)
    itself = f"model:{folder}"
    demo.run(console, str(folder), itself, max_tokens=24, depth=4, nodes=None, dtype="float32")
    assert "\x1b[1;32m" in console.export_text(styles=True)


def test_a_difference_is_located_and_weighed(folder: Path) -> None:
    llm = LLM(folder, dtype="float32")
    request = llm.request("the other", SamplingParams(max_tokens=8, ignore_eos=True, logprobs=2))
    (output,) = llm.generate(request)
    (true,) = output.completions
    assert true.logprobs
    assert demo.difference(llm, request, true, true) is None

    other = replace(true, token_ids=[*true.token_ids[:3], -1, *true.token_ids[4:]])
    found = demo.difference(llm, request, true, other)
    (_, best), (_, second) = true.logprobs[3].top
    assert found
    assert found.token == 3
    assert found.margin == pytest.approx(best - second, abs=1e-5)
    shorter = replace(true, token_ids=true.token_ids[:5])
    found = demo.difference(llm, request, true, shorter)
    assert found
    assert found.token == 5


def test_a_picture_that_cannot_be_written_is_refused_first(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for svg in (tmp_path / "missing" / "demo.svg", tmp_path):
        assert cli.execute(["demo", "--model", str(folder), "--svg", str(svg)]) == 2
        stdout, stderr = capsys.readouterr()
        assert stdout == ""
        assert "cannot write the picture" in stderr


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["info"]) == 0
    shown = capsys.readouterr().out
    for name in ("ridgeline", "torch", "transformers"):
        assert re.search(rf"^{name} +{re.escape(version(name))} *$", shown, re.MULTILINE)
    for name in ("processor", "features", "threads", "memory", "default dtype", "forward pass"):
        assert re.search(rf"^{name} +\S", shown, re.MULTILINE)
    assert "ngram" in shown
    name, features = processor()
    assert name
    assert "AVX2" in features or "NEON" in features


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["--version"]) == 0
    assert capsys.readouterr().out == f"ridgeline {version('ridgeline')}\n"
    assert cli.execute([]) == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in ("generate", "demo", "info"))
