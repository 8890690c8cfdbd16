"""The command `prove`: its page, its file, its exit codes, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ridgeline import cli
from ridgeline.bench import prompts
from ridgeline.prove import faults
from ridgeline.prove.distribution import ALPHA
from ridgeline.prove.faults import FAULTS
from tests import engines  # noqa: F401  (registers the drafter `fixed`)
from tests.cli.conftest import Result
from tests.tiny import save_tiny

Prove = Callable[..., Result]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that the native decoder runs, so that its logits are exact."""
    return save_tiny("llama", tmp_path_factory.mktemp("native"), head_dim=16)


@pytest.fixture
def prove(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> Prove:
    """Runs `ridgeline prove` on a tiny model with two short prompts in place of those that ship.

    In no time at all every part does the least that it ever does, however fast the machine is. The
    drafter is the target itself, and draws.
    """
    shipped = tmp_path / "shipped.txt"
    shipped.write_text("one, two, one, two,\nla la la la\n")
    monkeypatch.setattr(prompts, "SHIPPED", shipped)
    fixed = {
        "--model": target,
        "--dtype": "float32",
        "--drafter": f"model:{target}",
        "--verify": "match",
        "--tokens": 16,
        "--minutes": 1e-6,
    }

    def run(*arguments: object) -> Result:
        given = {str(word) for word in arguments}
        defaults = [w for pair in fixed.items() if pair[0] not in given for w in pair]
        capsys.readouterr()
        code = cli.execute(["prove", *map(str, [*defaults, *arguments])])
        return Result(code, *capsys.readouterr())

    return run


def read(file: Path) -> dict[str, Any]:
    """Strictly: Python's own reader lets NaN and Infinity pass."""
    found: dict[str, Any] = json.loads(file.read_text(), parse_constant=pytest.fail)
    return found


def test_an_honest_engine(prove: Prove, target: Path, tmp_path: Path) -> None:
    """All three rules. Faults are planted until the time is over: one each, none of the ratios."""
    out = tmp_path / "found.json"
    rules = ("--verify", "rejection", "--verify", "block", "--verify", "match")
    code, page, errors = prove("--seed", 3, "--json", out, *rules)
    assert (code, errors) == (1, "")
    assert re.findall(r"^[1-9]\. ", page, re.MULTILINE) == ["1. ", "2. ", "3. ", "4. "]
    named = {rule: f"{rule} with model:{target}" for rule in ("rejection", "block", "match")}
    assert re.findall(r"^   (.*): \d+ samples$", page, re.MULTILINE) == list(named.values())
    assert f"{named['match']}: 4 texts, greedy and seeded, " in page
    assert f"{named['block']}: 2 texts, greedy, " in page
    assert f"{named['match']}: 21 texts, 126 tokens: nothing wrong" in page
    assert f"{named['rejection']}: 28 texts, 168 tokens: nothing wrong" in page
    assert "depth 3, 6 nodes; 2 prompts; seed 3; " in page
    assert "The target's logits have the same bits whatever is computed beside them." in page
    none = " (none in accepting and correcting by ratios)"
    unnoticed = f"{named['rejection']}{none}; {named['block']}{none}. Give it more --minutes"
    assert page.startswith(
        f"NOT PROVEN: nothing differed, but planted faults went unnoticed: {unnoticed}"
    )
    assert f"{named['block']}: COULD NOT HAVE FAILED: no planted fault of the ratios" in page
    assert f"fails here in one of {1 / ALPHA:,.0f} runs at most" in page
    assert re.search(r"first token: p = \S+; a drift of \d+\.\d% shows", page)
    assert "tokens per step: 4.00; by theory, a chain: 4.00" in page
    assert page.count("tree mask off by one: found by equality") == 3
    assert page.count("position instead of slot: not planted: no time was left") == 3
    assert "\x1b" not in page

    found = read(out)
    assert (found["passed"], found["failed"]) == (False, False)
    assert found["verdict"] == page.splitlines()[0]
    assert found["arguments"]["drafter"] == f"model:{target.name}"
    assert found["arguments"]["seed"] == 3
    assert {"time", "commit", "machine", "alpha", "threshold", "confidence"} <= found.keys()
    for subject in found["subjects"]:
        concerned = [f.name for f in FAULTS if not f.by_ratio or subject["rule"] != "match"]
        assert [fault["fault"] for fault in subject["faults"]] == concerned
        assert [f["fault"] for f in subject["faults"] if f["planted"]] == concerned[:1]
        assert subject["equality"]["could_fail"]
        tests = subject["distribution"]["tests"]
        assert ("accepted drafts" in tests) == (subject["rule"] == "rejection")
        for test in tests.values():
            assert 0 < test["p_value"] <= 1
            assert test["could_fail"] == (test["smallest_drift"] < 1)


def test_a_drafter_that_does_not_draw(prove: Prove, tmp_path: Path) -> None:
    """Another stands in besides. Prompts of a file come first."""
    file, out = tmp_path / "own.jsonl", tmp_path / "found.json"
    file.write_text('{"prompt": "three, four, three, four,"}\n')
    _, page, _ = prove("--drafter", "ngram", "--prompt-file", file, "--json", out)
    assert "It does not say what it drew its drafts from" in page
    assert re.search(r"tokens per step: \d\.\d\d; by theory: \d\.\d\d", page)
    found = read(out)
    assert not found["failed"]
    assert found["arguments"]["prompts"] == 3
    own, stand_in = found["subjects"]
    assert (own["drafter"], stand_in["drafter"]) == ("ngram", None)
    assert "accepted drafts" in own["distribution"]["tests"]
    assert "accepted drafts" not in stand_in["distribution"]["tests"]


def test_a_faulty_engine(prove: Prove, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    with faults.last_token_penalised() as effect:
        code, page, _ = prove("--json", out)
    assert effect.count > 0
    assert code == 1
    assert page.startswith("FAIL: with drafts the output is not the target's own: match with ")
    difference = r"prompt 1, in few words, \w+, alone: token \d+ is \d+, plainly is \d+; "
    assert re.search(difference + r"logit margin \d", page)
    found = read(out)
    assert (found["passed"], found["failed"]) == (False, True)
    assert found["verdict"] == page.splitlines()[0]
    differences = found["subjects"][0]["equality"]["differences"]
    assert all(d["margin"] > 0 and not d["rounding"] for d in differences)


def test_a_pass(prove: Prove) -> None:
    """Under `match` the one fault that is planted suffices."""
    code, page, errors = prove()
    assert (code, errors) == (0, "")
    assert page.startswith("PASS: with drafts the output is the target's own")


def test_what_could_not_have_failed(prove: Prove) -> None:
    """A drafter of tokens that are never said."""
    code, page, _ = prove("--drafter", "fixed:0,0", "--depth", 2)
    assert code == 1
    assert page.startswith("NOT PROVEN: nothing differed, but planted faults went unnoticed: match")
    assert "all the same. COULD NOT HAVE FAILED: no draft was accepted" in page
    assert "match with fixed:0,0: COULD NOT HAVE FAILED: no planted fault was noticed" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--depth", 0), "depth is 0; it must be from 1 to 64"),
        (("--depth", 65), "depth is 65"),
        (("--nodes", 65), "nodes is 65"),
        (("--nodes", 0), "nodes is 0; it must be from 1 to 64"),
        (("--depth", 10**22), "depth is 1"),
        (("--tokens", 0), "tokens is 0; it must be from 1 to "),
        (("--batch", 0), "batch is 0; it must be from 1 to 1024"),
        (("--seed", -1), "seed is -1; it must be from 0 to "),
        (("--minutes", 0), "minutes is 0; it must be a number above 0"),
        (("--minutes", "nan"), "minutes is nan; it must be a number above 0"),
        (("--minutes", "inf"), "minutes is inf; it must be a number above 0"),
        (("--confidence", 2), "confidence is 2"),
        (("--verify", "typical"), "'typical'"),
        (("--drafter", "none"), "drafter 'none' never drafts, so there is nothing to prove"),
        (("--drafter", "oracles"), "'oracles'"),
        (("--json", "/nowhere/found.json"), "/nowhere/found.json"),
        (("--model", "/nowhere/model"), "/nowhere/model"),
        (("--prompt-file", "/nowhere/prompts.txt"), "/nowhere/prompts.txt"),
    ],
)
def test_mistakes_of_one_line(arguments: tuple[object, ...], message: str, prove: Prove) -> None:
    code, page, errors = prove(*arguments)
    assert (code, page) == (2, "")
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert message in errors
