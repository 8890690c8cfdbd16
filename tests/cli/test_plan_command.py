"""The command `plan`: what it shows, what it refuses, what it measures."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ridgeline import cli
from ridgeline.bench.record import FORMAT
from ridgeline.plan import setup
from ridgeline.plan.calibration import Calibration, KindRates
from ridgeline.plan.report import show
from ridgeline.plan.result import make_plan
from ridgeline.plan.setup import Wanted, set_up
from tests.cli.conftest import Result, assert_refused
from tests.plan_models import DEEPSEEK_V3, LLAMA_3_70B, QWEN_2_5_7B, write_config

PlanCommand = Callable[..., Result]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> PlanCommand:
    """Runs `ridgeline plan`."""

    def run(*arguments: object) -> Result:
        capsys.readouterr()
        code = cli.execute(["plan", *map(str, arguments)])
        return Result(code, *capsys.readouterr())

    return run


@pytest.fixture
def calibration(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """A machine that is known without measuring: two rows cost what one does, four twice that.

    What is asked of it is noted.
    """
    asked: list[set[str]] = []

    def known(kinds: Any, device: Any, native: bool, **rest: Any) -> Calibration:
        asked.append(set(kinds))
        rates = KindRates((1, 2, 4), (1e-4, 1e-4, 2e-4), (1e-9, 1e-9, 2e-9))
        machine = {"processor": "a made-up processor", "threads": 1, "gpu": None}
        return Calibration(machine, 1e10, 0.0, 0.0, 0.0, 0.0, dict.fromkeys(kinds, rates))

    monkeypatch.setattr(setup, "calibrated", known)
    return asked


@pytest.fixture
def llama(tmp_path: Path) -> str:
    return write_config(LLAMA_3_70B, tmp_path / "llama-3-70b")


H100 = ("--hardware", "h100-sxm", "--devices", 2)


def test_a_plan_on_paper(plan: PlanCommand, llama: str) -> None:
    code, shown, errors = plan("--model", llama, *H100, "--drafter", "model:" + llama)
    assert (code, errors) == (0, "")
    assert "llama-3-70b: 70.55B parameters, bf16, 141.1 GB; cache 327.7 kB a token" in shown
    assert "2 x NVIDIA H100 SXM5 80 GB: 6700 GB/s, 1979 TFLOP/s in bf16; ridge at 295" in shown
    assert "295 tokens a pass" in shown
    assert "times are on paper: nothing is measured" in shown
    assert "do not speculate" in shown, "a draft model as large as the target"
    assert "Do not speculate here: at no batch size above is a gain expected." in shown


def test_drafts_that_are_free_pay_until_the_ridge(plan: PlanCommand, llama: str) -> None:
    result = plan(
        *("--model", llama, *H100, "--drafter", "ngram", "--acceptance", "0.7", "--json"),
        *("--batch", 1, "--batch", 8, "--batch", 1024, "--context", 64),
    )
    found = json.loads(result.stdout)
    assert [batch["batch"] for batch in found["batches"]] == [1, 8, 1024]
    one, _, large = found["batches"]
    assert one["best"]["depth"] == 8
    tokens = (1 - 0.7**9) / 0.3
    assert one["best"]["tokens"] == pytest.approx([tokens, tokens])
    assert one["best"]["speed_up"][0] == pytest.approx(
        tokens * one["plain_seconds"] / one["best"]["verify_seconds"]
    )
    assert one["plain_seconds"] == pytest.approx(139e9 / 6.7e12, rel=0.01)
    assert not large["best"]["speculate"]
    assert found["stops_paying"] == 1024
    assert found["verdict"][0] == (
        "Do not speculate here from batch 1024 on: no gain is expected there."
    )
    assert found["model"]["kv_per_token"] == 327_680
    assert found["hardware"]["ridge"] == pytest.approx(295, abs=0.5)
    assert found["drafters"]["ngram"]["acceptance"]["source"] == "given"


def test_figures_of_h100_on_paper(plan: PlanCommand, tmp_path: Path) -> None:
    """docs/plan.md: the roofline is an upper bound of what others measured.

    A 1B draft model (16 layers of 2048) beside a 70B target: the article has 1.8 to 2.4x.
    """
    target = write_config(LLAMA_3_70B, tmp_path / "70b")
    small = LLAMA_3_70B | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    }
    drafter = write_config(small, tmp_path / "1b")
    asked = ("--model", target, *H100, "--drafter", f"model:{drafter}", "--depth", 5, "--batch", 1)
    found = json.loads(plan(*asked, "--acceptance", "0.70-0.82", "--json").stdout)
    best = found["batches"][0]["best"]
    assert best["depth"] == 5
    # 139 GB of weights a pass beside 2.5 GB, five times; keys and values are small.
    cost = 1 + 5 * 2.47 / 139
    expected = [(1 - a**6) / (1 - a) / cost for a in (0.70, 0.82)]
    assert best["speed_up"] == pytest.approx(expected, rel=0.02)
    assert best["speed_up"][0] > 1.8
    assert best["speed_up"][1] > 2.4


def test_a_mixture_of_experts(plan: PlanCommand, tmp_path: Path) -> None:
    path = write_config(DEEPSEEK_V3, tmp_path / "deepseek-v3")
    hardware = ("--hardware", "h200", "--devices", 8)
    code, shown, _ = plan("--model", path, *hardware)
    assert code == 0
    assert "671.03B parameters, 37.55B active, bf16 and fp8" in shown
    assert "cache 70.3 kB a token" in shown
    assert "mtp" in shown
    few = plan("--model", path, "--hardware", "h200", "--batch", 1).stdout
    assert "From batch 1 on it does not fit" in few


def test_this_machine(plan: PlanCommand, tmp_path: Path, calibration: list[set[str]]) -> None:
    path = write_config(QWEN_2_5_7B, tmp_path / "qwen")
    picture = tmp_path / "plan.png"
    code, shown, _ = plan(
        *("--model", path, "--drafter", "ngram", "--acceptance", "0.8", "--depth", 3),
        *("--batch", 1, "--batch", 2, "--plot", picture, "--precision", "bf16"),
    )
    assert code == 0
    assert calibration == [{"bf16"}]
    assert "a made-up processor, 1 thread: 10 GB/s, 4.00 GFLOP/s in bf16" in shown
    assert "predicted from this machine's calibration" in shown
    # Two rows cost what one does: 1.8 tokens at once; three and four cost more.
    assert row_of(shown, "Speed-up at each depth", 1) == ["1", "1.80", "1.80x", "0.90x"]
    assert row_of(shown, "Speed-up at each depth", 3) == ["3", "2.95", "1.48x", "0.74x"]
    assert "Do not speculate here from batch 2 on" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")


def row_of(shown: str, title: str, number: int) -> list[str]:
    """The cells of one row of the table of that title, the first under its rule being 1."""
    _, _, table = shown.partition(title)
    lines = table.splitlines()
    rule = next(place for place, line in enumerate(lines) if line.startswith(" ──"))
    return lines[rule + number].split()


def test_every_depth_and_pass_in_json(plan: PlanCommand, llama: str) -> None:
    """A = 0.5: one and a half tokens, then 1.75; passes are those that check so many drafts."""
    asked = ("--model", llama, *H100, "--acceptance", "0.5", "--depth", 2, "--batch", 4)
    found = json.loads(plan(*asked, "--json").stdout)
    assert list(found["drafters"]) == ["ngram", "medusa", "eagle", "eagle3"]
    (batch,) = found["batches"]
    for each in batch["drafts"].values():
        assert [choice["depth"] for choice in each] == [0, 1, 2]
        assert [choice["tokens"][0] for choice in each] == [1, 1.5, 1.75]
        assert [choice["verify_seconds"] for choice in each] == batch["passes"]
    assert batch["plain_seconds"] == batch["passes"][0]
    assert batch["choices"]["ngram"] in batch["drafts"]["ngram"]


def test_bytes_and_flops_of_each_part(plan: PlanCommand, llama: str) -> None:
    shown = plan("--model", llama, *H100, "--batch", 64).stdout
    cells = row_of(shown, "A step of plain decoding", 1)
    assert cells[:4] == ["64", "139", "21.5", "2.12"]
    # 64 rows: 80 layers of 855,638,016 weights; 1024 keys of 64 heads of 128 and 128; the head.
    flops = (2 * 64 * 80 * 855_638_016, 2 * 64 * 80 * 1024 * 64 * 256, 2 * 64 * 128256 * 8192)
    assert cells[4:7] == ["8762", "172", "134"] == [f"{f / 1e9:.0f}" for f in flops]


def write_bench(path: Path, *drafters: str) -> Path:
    """A file of runs in which every step has two drafts."""
    runs = [
        {
            "options": {"drafter": drafter, "temperature": 0.0, "batch": 1, "depth": 2},
            **{"steps": 10, "drafted": 20, "passed": [8, 4], "reached": [10, 8]},
        }
        for drafter in drafters
    ]
    path.write_text(json.dumps({"format": FORMAT, "model": {"name": "small"}, "runs": runs}))
    return path


def test_drafters_of_a_benchmark(plan: PlanCommand, llama: str, tmp_path: Path) -> None:
    file = write_bench(tmp_path / "bench.json", "ngram", "none")
    asked = ("--model", llama, *H100, "--bench", file, "--batch", 1, "--json", "--depth", 2)
    found = json.loads(plan(*asked).stdout)
    assert list(found["drafters"]) == ["ngram"]
    assert found["batches"][0]["best"]["tokens"] == [2.2, 2.2]
    assert found["drafters"]["ngram"]["acceptance"]["source"] == "measured: bench.json, small"
    assert_refused(
        plan(*asked, "--drafter", "eagle"), "bench.json holds no run of the drafter eagle"
    )


def test_a_drafter_without_a_plan_spoils_no_benchmark(
    plan: PlanCommand, llama: str, tmp_path: Path
) -> None:
    file = write_bench(tmp_path / "bench.json", "auto", "medusa+eagle", "ngram+eagle3", "model:/no")
    asked = ("--model", llama, *H100, "--bench", file, "--batch", 1, "--json")
    code, shown, errors = plan(*asked)
    assert code == 0
    assert list(json.loads(shown)["drafters"]) == ["auto", "ngram+eagle3"]
    first, second = errors.splitlines()
    assert first.startswith(f"note: medusa+eagle of {file} is left out: there is no plan for")
    assert second.startswith(f"note: model:/no of {file} is left out: ")
    write_bench(file, "medusa+eagle")
    assert_refused(plan(*asked), "there is no plan for medusa+eagle")
    write_bench(file, "none")
    assert_refused(plan(*asked), "holds no run of a drafter")


def test_a_short_run(
    plan: PlanCommand, folder: Path, calibration: list[set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("ROWS", (1, 2)), ("CONTEXTS", (16, 64)), ("PROMPTS", 1), ("TOKENS", 8)):
        monkeypatch.setattr(f"ridgeline.plan.measured.{name}", value)
    found = json.loads(
        plan("--model", folder, "--precision", "fp32", "--measure", "--json", "--batch", 2).stdout
    )
    assert list(found["drafters"]) == ["ngram"]
    assert found["drafters"]["ngram"]["acceptance"]["source"] == "measured here"
    assert found["basis"].startswith("measured for the model")
    assert found["batches"][0]["plain_seconds"] > 0


@pytest.mark.parametrize("hidden", [256, 8192])
def test_tables_fit_a_terminal(hidden: int, tmp_path: Path) -> None:
    """No line is too long, and no cell broken into two."""
    config = LLAMA_3_70B | {
        "hidden_size": hidden,
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": min(hidden // 128, 8),
    }
    path = write_config(config, tmp_path / "model")
    setup_ = set_up(Wanted(model=path, hardware="m1", drafters=("eagle3", "ngram")))
    made = make_plan(
        *(setup_.planner, setup_.contenders, setup_.shape, setup_.hardware, setup_.basis),
        *([1, 2, 4, 8, 16, 32, 64], 8),
    )
    console = Console(width=80, record=True, file=sys.stderr)
    show(console, made)
    shown = console.export_text()
    assert max(len(line) for line in shown.splitlines() if line.startswith(" ")) <= 80
    assert " tokens/s " in shown
    for part in shown.split(" ──")[1:]:
        _, *rows = part.splitlines()
        body = list(takewhile(str.strip, rows))
        assert body
        assert not any(row.startswith("  ") for row in body), "the rest of a cell above"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--hardware", "h900"), "there is no hardware 'h900'; it must be local or one of h100"),
        (("--precision", "int3"), "precision is 'int3'; it must be one of fp32, bf16"),
        (("--acceptance", "2"), "acceptance is '2'; it must be a number from 0 to 1"),
        (("--acceptance", "0.5", "--measure"), "only one of --acceptance, --bench and --measure"),
        (("--acceptance", ""), "acceptance is ''; it must be a number from 0 to 1"),
        (("--hardware", "LOCAL", "--devices", "2"), "this machine is one"),
        (("--batch", "0"), "batch is 0; it must be from 1 to 65536"),
        (("--depth", "65"), "depth is 65; it must be from 1 to 64"),
        (("--context", "-1"), "context is -1"),
        (("--context", "131073"), "context is 131073; llama-3-70b reads 1 to 8192 tokens"),
        (("--devices", "0"), "devices is 0"),
        (("--drafter", "oracle"), "there is no plan for the drafter 'oracle'"),
        (("--measure",), "--measure measures this machine; leave --hardware out"),
        (("--recalibrate",), "--recalibrate measures this machine; leave --hardware out"),
        (("--bench", "nowhere.json"), "cannot read nowhere.json"),
        (("--plot", "/nowhere/p.png"), "/nowhere/p.png"),
    ],
)
def test_mistakes_of_one_line(
    arguments: tuple[str, ...], message: str, plan: PlanCommand, llama: str
) -> None:
    assert_refused(plan("--model", llama, "--hardware", "h200", *arguments), message)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no folder that takes no file")
def test_a_picture_that_cannot_be_written_is_told_before_the_plan(
    plan: PlanCommand, llama: str
) -> None:
    refused = plan("--model", llama, *H100, "--plot", "/proc/plan.png")
    assert_refused(refused, "cannot write the picture /proc/plan.png: ")


def test_mistakes_on_this_machine(plan: PlanCommand, llama: str, tmp_path: Path) -> None:
    assert_refused(plan("--model", llama, "--devices", 2), "this machine is one")
    assert_refused(plan("--model", tmp_path / "none"), "none")
    moe = write_config(DEEPSEEK_V3, tmp_path / "moe")
    assert_refused(plan("--model", moe), "mixture of experts")
    assert_refused(plan("--model", llama, "--drafter", f"model:{moe}"), "is a mixture of experts")
