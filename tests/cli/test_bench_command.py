"""The command `bench`: what it writes, how it goes on, what it refuses."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ridgeline import cli
from ridgeline.bench import measure, report
from ridgeline.bench.published import SOURCES
from ridgeline.bench.record import FORMAT, digest
from ridgeline.draft.heads import model_key
from tests.cli.conftest import Result, assert_refused
from tests.engines import tiny_loaded
from tests.heads import write_head

Bench = Callable[..., Result]


@pytest.fixture
def bench(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    """Runs `ridgeline bench` on the tiny model with two short prompts."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '{"kind": "list", "prompt": "one, two, one, two,"}\n{"kind": "song", "prompt": "la la"}'
    )
    fixed = {
        "--model": folder,
        "--dtype": "float32",
        "--prompt-file": prompts,
        "--tokens": 12,
        "--repeat": 1,
        "--batch": 1,
        "--temperature": 0,
        "--drafter": "ngram",
    }

    def run(*arguments: object) -> Result:
        given = {str(word) for word in arguments}
        defaults = [w for pair in fixed.items() if pair[0] not in given for w in pair]
        capsys.readouterr()
        code = cli.execute(["bench", *map(str, [*defaults, *arguments])])
        return Result(code, *capsys.readouterr())

    return run


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float, int]]:
    """Drafter, temperature and batch size of each round that is measured."""
    done: list[tuple[str, float, int]] = []
    original = measure.measure

    def noted(loaded: Any, pair: Any, load: Any, *rest: Any) -> Any:
        done.append((pair[1].drafter, load.temperature, load.batch))
        return original(loaded, pair, load, *rest)

    monkeypatch.setattr(measure, "measure", noted)
    return done


def test_tables_file_and_picture(bench: Bench, tmp_path: Path) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    code, stdout, stderr = bench(
        *("--temperature", 0, "--temperature", 1, "--batch", 1, "--batch", 2, "--nodes", 6),
        *("--drafter", "ngram", "--drafter", "none", "--json", out, "--plot", picture),
    )
    assert (code, stderr) == (0, "")
    assert "\x1b" not in stdout
    for line in ("T = 0, batch 1", "T = 1, batch 2"):
        assert line in stdout
    for source in ("article", "Spec-Bench"):
        assert f"\n {source}" in stdout
    assert "Same tokens as plain decoding: 16 of 16 texts." in stdout
    assert picture.read_bytes().startswith(b"\x89PNG")

    found = json.loads(out.read_text())
    assert found["format"] == FORMAT
    assert found["prompts"]["kinds"] == ["list", "song"]
    assert found["arguments"]["tokens"] == 12
    assert found["machine"]["threads"] >= 1
    assert found["machine"]["versions"]["torch"]
    assert {row["source"] for row in found["published"]["rows"]} == SOURCES.keys()
    assert len(found["runs"]) == 8
    for run in found["runs"]:
        assert run["options"]["nodes"] == 6
        assert run["options"]["depth"] == 5
        assert run["identical"] == run["texts"] == 2
        assert len(run["load_average"]) == 3
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT.*", run["time"])
        assert run["commit"] is None or re.fullmatch(r"[0-9a-f]{40}", run["commit"])
        assert run["plain_tokens_per_s"] > 0
        assert run["speed_up"] > 0
        assert run["kinds"].keys() == {"list", "song"}
        assert len(run["acceptance_by_position"]) == len(run["reached"])
        assert run["memory"] == {"weights": 0, "kv_per_token": 0}


def test_the_same_command_goes_on_and_another_adds(
    bench: Bench, measured: list[tuple[str, float, int]], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    assert bench("--json", out).code == 0
    assert measured == [("ngram", 0.0, 1)]
    first = json.loads(out.read_text())["runs"]
    again = bench("--json", out)
    assert (again.code, len(measured)) == (0, 1)
    assert "T = 0, batch 1" in again.stdout
    assert bench("--json", out, "--depth", 2, "--batch", 2).code == 0
    assert bench("--json", out, "--drafter", "none").code == 0
    assert bench("--json", out, "--policy", "table:2=1").code == 0
    assert measured[1:] == [("ngram", 0.0, 2), ("none", 0.0, 1), ("ngram", 0.0, 1)]
    runs = json.loads(out.read_text())["runs"]
    assert runs[:1] == first
    assert [run["options"]["depth"] for run in runs] == [5, 2, 5, 5]
    assert [run["options"]["policy"] for run in runs] == [*["goodput"] * 3, "table:2=1"]
    assert "table:2=1" in bench("--json", out).stdout


def test_an_interrupted_command_keeps_what_is_finished(
    bench: Bench,
    measured: list[tuple[str, float, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out.json"
    command = ("--temperature", 0, "--temperature", 1, "--repeat", 2, "--json", out)
    complete = measure.measure

    def interrupted(*arguments: Any) -> Any:
        if len(measured) == 3:  # the second round of the second run
            raise KeyboardInterrupt
        return complete(*arguments)

    monkeypatch.setattr(measure, "measure", interrupted)
    code, stdout, stderr = bench(*command)
    assert (code, stderr) == (130, "")
    assert "T = 0, batch 1" in stdout
    assert "T = 1" not in stdout
    (kept,) = json.loads(out.read_text())["runs"]

    monkeypatch.setattr(measure, "measure", complete)
    assert bench(*command).code == 0
    assert measured[3:] == [("ngram", 1.0, 1)] * 2
    runs = json.loads(out.read_text())["runs"]
    assert [run["options"]["temperature"] for run in runs] == [0.0, 1.0]
    assert runs[0] == kept


def test_interrupted_before_anything_is_finished(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "measure", interrupted)
    assert bench() == (130, "", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "tokens is 0; it must be at least 1"),
        (["--repeat", "0"], "repeat is 0"),
        (["--batch", "0"], "batch is 0"),
        (["--batch", "100000000"], "kv_tokens"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--seed", "-1"], "seed is -1"),
        (["--drafter", "nothing"], "there is no drafter 'nothing'"),
        (["--drafter", "ngram", "--drafter", "eagle"], "eagle:PATH"),
        (["--nodes", "65"], "nodes is 65"),
        (["--confidence", "2"], "confidence is 2.0"),
        (["--prompt-file", "missing.jsonl"], "cannot read the prompt file missing.jsonl"),
        (["--json", "missing/out.json"], "cannot write the results missing/out.json"),
        (["--plot", "missing/out.png"], "cannot write the results missing/out.png"),
        (["--plot", "out.docx"], "cannot draw out.docx; its name must end in one of "),
    ],
)
def test_mistakes_of_one_line(bench: Bench, arguments: list[str], message: str) -> None:
    assert_refused(bench(*arguments), message)


def test_broken_prompt_files(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    for content, message in (
        ("\n", "there is no prompt in"),
        ('{"prompt": "a"}\n{"prompt": 3}', "line 2: prompt is 3"),
        ('{"prompt": "a", "kind": 3}', "line 1: kind is 3; it must be a string"),
        ('{"prompt": ""}', "line 1: the prompt is empty"),
        (f'{{"prompt": "{"x" * 3000}"}}', "context of 2048"),
    ):
        file.write_text(content)
        assert_refused(bench("--prompt-file", file), message)


def test_a_file_of_other_arguments_is_left_alone(bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert bench("--json", out).code == 0
    before = out.read_bytes()
    other = bench("--json", out, "--tokens", 13)
    assert_refused(other, "out.json holds runs with tokens 12, now it is 13; give --json another")
    assert_refused(bench("--json", out, "--repeat", 2), "repeat 1, now it is 2")
    (tmp_path / "mine.txt").write_text("other\n")
    assert_refused(bench("--json", out, "--prompt-file", tmp_path / "mine.txt"), "holds runs with")
    assert out.read_bytes() == before
    inside = [
        before.decode().replace(*words)
        for words in (
            ('"runs": [', '"runs": [{}, '),
            ('"runs": [', '"runs": ["x", '),
            ('"model": {', '"model": 3, "was": {'),
            ('"drafted": ', '"d": '),
        )
    ]
    deep = '{"a": ' * 100_000
    for content in ("{", "[]", '{"format": "something"}', "\xff", deep, *inside):
        out.write_text(content, encoding="latin-1")
        assert_refused(bench("--json", out), "holds no results of this command")
        assert out.read_text(encoding="latin-1") == content


def test_heads_are_told_apart_by_their_weights(bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    first = write_head("eagle3", tmp_path / "a" / "head", tiny_loaded())
    second = write_head("eagle3", tmp_path / "b" / "head", tiny_loaded(), draft_vocab=40)

    def runs() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(out.read_text())["runs"]
        return found

    assert bench("--drafter", first, "--json", out).code == 0
    assert bench("--drafter", first, "--json", out).code == 0
    assert len(runs()) == 1
    assert bench("--drafter", second, "--json", out).code == 0
    assert len(runs()) == 2, "another folder of the same name"
    assert len(set(report.labels(runs()))) == 2
    write_head("eagle3", tmp_path / "a" / "head", tiny_loaded(), draft_vocab=50)
    assert bench("--drafter", first, "--json", out).code == 0
    assert len(runs()) == 3, "other weights in the same folder"


def test_the_digest_is_of_every_file_that_a_drafter_is_read_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind a plus, and of heads that are known by the model's name."""
    target = tiny_loaded()
    known = tmp_path / "heads" / model_key(target.name) / "eagle"
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    head = write_head("eagle", known, target)
    specs = (head, f"ngram:min=4+{head}", f"{head}+ngram", "auto", "eagle", "ngram+eagle")
    before = [digest(spec, target) for spec in specs]
    assert len(set(before)) == 1
    write_head("eagle", known, target, draft_vocab=40)
    after = [digest(spec, target) for spec in specs]
    assert len(set(after)) == 1
    assert before[0] != after[0]
    assert digest("ngram", target) == digest("medusa", target) == ""


def test_file_and_picture_in_one(bench: Bench, tmp_path: Path) -> None:
    same = tmp_path / "a.png"
    assert_refused(bench("--json", same, "--plot", same), "give them different files")
    assert not same.exists()


def test_without_matplotlib(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert_refused(bench("--plot", tmp_path / "a.png"), "pip install 'ridgeline[plot]'")
    assert bench().code == 0


def run_of(drafter: str, **options: Any) -> report.Run:
    settings = {"depth": 5, "nodes": 5, "confidence": 0.5, "policy": "goodput"}
    quantised = {"draft_dtype": "auto", "draft_quantize": "auto", "sha256": ""}
    return {"options": {"drafter": drafter, **settings, **quantised, **options}}


def test_names_tell_drafters_apart_and_no_more() -> None:
    one = [run_of("eagle:heads/a"), run_of("medusa:heads/b")]
    assert report.labels(one) == ["eagle", "medusa"]
    same = [run_of("eagle:a"), run_of("eagle:a", nodes=24), run_of("ngram")]
    assert report.labels(same) == ["eagle nodes 5", "eagle nodes 24", "ngram"]
    assert report.labels([run_of("eagle:a"), run_of("eagle:b")]) == ["eagle:a", "eagle:b"]


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit(width: int, bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert bench("--json", out, "--drafter", "ngram").code == 0
    assert bench("--json", out, "--drafter", "ngram", "--nodes", 24).code == 0
    found = json.loads(out.read_text())
    console = Console(width=width, record=True, file=sys.stderr)
    report.show(console, found, found["runs"])
    _, *lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    shown = "\n".join(lines)
    for figure in (found["runs"][0]["plain_tokens_per_s"], found["runs"][1]["tokens_per_s"]):
        assert f"{figure:.1f}" in shown
    assert shown.count("2/2") == 2


def test_texts_that_differ_are_told() -> None:
    runs = [{"texts": 10, "identical": 10}, {"texts": 12, "identical": 11}]
    assert "21 of 22 texts. On transformers' own layers" in report.verdict(runs, exact=False)
    assert "please report this" in report.verdict(runs, exact=True)
    assert report.verdict(runs[:1], exact=True).endswith("10 of 10 texts.")
