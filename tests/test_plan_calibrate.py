"""Calibration: what is measured is kept, and figures become the curve of a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ridgeline.bench import clock
from ridgeline.bench.prompts import Prompt
from ridgeline.core.params import SamplingParams
from ridgeline.errors import ConfigError, ModelLoadError
from ridgeline.llm import LLM, Request
from ridgeline.model.load import LoadedModel
from ridgeline.plan import calibrate, calibration
from ridgeline.plan.calibrate import Effort, calibrated
from ridgeline.plan.calibration import Calibration, KindRates
from ridgeline.plan.cost import Sample
from ridgeline.plan.local import as_run, local_curve, local_hardware, runs_natively
from ridgeline.plan.measured import measured_acceptance, measured_curve, prompts_of
from ridgeline.plan.passes import Pass, Passes
from ridgeline.plan.probe import native_kinds, probe, probe_config
from ridgeline.plan.shape import HEAD, LAYERS, Attention, ModelShape, Part, read_shape
from tests.engines import tiny_loaded
from tests.tiny import save_tiny

CPU = torch.device("cpu")
QUICK = Effort(nbytes=1 << 16, rows=(1, 2, 4), contexts=(16, 64), rounds=1, steps=3)
NATIVE = bool(native_kinds())
needs_native = pytest.mark.skipif(not NATIVE, reason="no native extension")

SHAPE = ModelShape(
    "made up",
    hidden=8,
    vocabulary=16,
    parts=(
        Part(LAYERS, "bf16", 300, 16),
        Part(LAYERS, "bf16", 7, 16, matrices=False),
        Part(HEAD, "int8", 100, 8.5),
    ),
    attention=(Attention(4, 6, key=3, value=5), Attention(4, 6, key=3, value=5, window=9)),
    context=4096,
)
KNOWN = Calibration(
    machine={"processor": "made up", "threads": 2, "gpu": None},
    bandwidth=50.0,
    key=1e-3,
    pair=1e-4,
    step=0.5,
    sequence=0.25,
    kinds={
        "bf16": KindRates((1, 4), (1.0, 2.0), (0.01, 0.02)),
        "int8": KindRates((1, 4), (3.0, 4.0), (0.005, 0.006)),
    },
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is measured: number formats, and `bandwidth` for all the rest."""
    done: list[str] = []

    def rates(kind: str, *rest: Any) -> KindRates:
        done.append(kind)
        return KindRates((1, 4), (1.0, 1.0), (0.1, 0.2))

    def bandwidth(device: torch.device) -> float:
        done.append("bandwidth")
        return 7.0

    monkeypatch.setattr(calibrate, "_rates", rates)
    monkeypatch.setattr(calibrate, "_bandwidth", bandwidth)
    monkeypatch.setattr(calibrate, "_attention", lambda *_: (1.0, 2.0))
    monkeypatch.setattr(calibrate, "_overhead", lambda *_: (3.0, 4.0))
    return done


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock finds it a second later, so every pass takes one second."""
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=count().__next__))


def test_the_curve_of_a_model_by_hand() -> None:
    """300 of 400 weights are bf16: so are three quarters of two layers; the step adds 0.5."""
    curve = local_curve(SHAPE, KNOWN)
    assert curve.rows == (1, 4)
    assert curve.row_seconds == pytest.approx(
        (0.5 + 2 * (0.75 * 1 + 0.25 * 3) + 3 + 0.5, 0.5 + 2 * (0.75 * 2 + 0.25 * 4) + 6 + 0.6)
    )
    assert curve.key == pytest.approx(1e-3 * 12)
    assert curve.pair == pytest.approx(1e-4 * 2 * 4 * 8)
    assert (curve.sequence, curve.windows) == (0.25, (None, 9))


def test_the_machine_as_hardware() -> None:
    found = local_hardware(KNOWN, CPU)
    assert (found.name, found.title) == ("local", "made up, 2 threads")
    assert found.bandwidth == 50
    assert found.flops == {"bf16": 2 * 4 / 0.02, "int8": 2 * 4 / 0.006}
    assert found.memory > 1e9


def test_what_is_known_is_not_measured_again(measured: list[str], cache: Path) -> None:
    first = calibrated(["bf16"], CPU, NATIVE)
    assert measured == ["bandwidth", "bf16"]
    assert (first.step, first.sequence, first.key, first.pair) == (3, 4, 1, 2)
    assert calibrated(["bf16"], CPU, NATIVE) == first
    assert measured == ["bandwidth", "bf16"]
    more = calibrated(["bf16", "fp32"], CPU, NATIVE)
    assert measured == ["bandwidth", "bf16", "fp32"]
    assert more.kinds.keys() == {"bf16", "fp32"}
    calibrated(["fp32"], CPU, NATIVE, again=True)
    assert measured == ["bandwidth", "bf16", "fp32", "bandwidth", "fp32"]
    (file,) = (cache / "calibration").glob("*.json")
    assert json.loads(file.read_text())["machine"]["threads"] == torch.get_num_threads()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b'{"kinds": {"bf16": {"x": [1]}}}', b"\xff\xfe", b"[" * 100_000],
)
def test_a_damaged_file_is_measured_anew(content: bytes, measured: list[str], cache: Path) -> None:
    whole = calibrated(["bf16"], CPU, NATIVE)
    (file,) = (cache / "calibration").glob("*.json")
    file.write_bytes(content)
    assert calibrated(["bf16"], CPU, NATIVE) == whole
    assert measured == ["bandwidth", "bf16"] * 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("bandwidth", value) for value in (0, -1.0, None, "7", nan, inf, 10**400, [])),
        *(("step", value) for value in (nan, -1.0, None)),
        *(("sequence", -1), ("key", "x"), ("pair", inf)),
        *(("machine", value) for value in ({}, "this", {"threads": 2})),
        *(("kinds", value) for value in (7, {"bf16": None}, {"bf16": {}})),
    ],
)
def test_a_figure_that_cannot_be_is_measured_anew(
    name: str, value: Any, measured: list[str], cache: Path
) -> None:
    whole = calibrated(["bf16"], CPU, NATIVE)
    (file,) = (cache / "calibration").glob("*.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    assert calibrated(["bf16"], CPU, NATIVE) == whole
    assert measured == ["bandwidth", "bf16"] * 2


@pytest.mark.parametrize(
    "change",
    [
        {"rows": []},
        {"rows": [], "layer": [], "weight": []},
        {"rows": [1]},
        {"rows": "14"},
        {"rows": [4, 1]},
        {"rows": [0, 4]},
        {"rows": [1, nan]},
        {"rows": [1, 10**400]},
        {"layer": [1.0]},
        {"layer": [1.0, -1.0]},
        {"layer": [nan, 1.0]},
        {"weight": [0.0, 0.0]},
        {"weight": [-0.1, 0.1]},
        {"weight": [0.1, inf]},
        {"weight": [0.1, 10**400]},
        {"weight": ["a", "b"]},
    ],
)
def test_rates_that_cannot_be_are_measured_anew(
    change: dict[str, Any], measured: list[str], cache: Path
) -> None:
    whole = calibrated(["bf16"], CPU, NATIVE)
    (file,) = (cache / "calibration").glob("*.json")
    found = json.loads(file.read_text())
    found["kinds"]["bf16"] |= change
    file.write_text(json.dumps(found))
    assert calibrated(["bf16"], CPU, NATIVE) == whole
    assert measured == ["bandwidth", "bf16"] * 2


def test_formats_of_other_rows_are_measured_anew(measured: list[str], cache: Path) -> None:
    """A curve is a sum over formats at the same rows."""
    calibrated(["bf16", "fp32"], CPU, NATIVE)
    (file,) = (cache / "calibration").glob("*.json")
    found = json.loads(file.read_text())
    found["kinds"]["fp32"]["rows"] = [1, 3]
    file.write_text(json.dumps(found))
    calibrated(["bf16", "fp32"], CPU, NATIVE)
    assert measured == ["bandwidth", "bf16", "fp32"] * 2


def test_nothing_is_measured_that_cannot_be_kept(measured: list[str], cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(ModelLoadError, match=r"calibrating failed in the cache folder"):
        calibrated(["bf16"], CPU, NATIVE)
    assert measured == []


def test_figures_of_other_threads_and_paths_are_kept_apart(
    measured: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrated(["fp32"], CPU, NATIVE)
    calibrated(["fp32"], CPU, not NATIVE)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    calibrated(["fp32"], CPU, NATIVE)
    monkeypatch.setattr(calibration, "version", lambda name: "another")
    calibrated(["fp32"], CPU, NATIVE)
    assert len([*(cache / "calibration").glob("*.json")]) == 4


def test_a_layer_and_a_weight_are_told_apart() -> None:
    layer, weight = np.array([1e-4, 1e-4, 3e-4]), np.array([1e-9, 1.5e-9, 4e-9])
    layers, weights = [40, 3], [10**8, 11 * 10**7]
    seconds = np.array([n * layer + w * weight for n, w in zip(layers, weights, strict=True)])
    found = calibrate._solved(layers, weights, seconds)
    assert found[0] == pytest.approx(layer, rel=1e-6)
    assert found[1] == pytest.approx(weight, rel=1e-6)
    noisy = seconds * [[1.2], [0.8]]
    for values in calibrate._solved(layers, weights, noisy):
        assert [*values] == sorted(values)
        assert values[0] >= 0


def test_attention_is_what_contexts_add(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe has 8 layers of 8 heads of 64, two of them with keys: known costs come back."""
    kept, pairs = 8 * 2 * 2 * 64, 8 * 8 * 2 * 64

    def timed(self: Passes, sizes: Sequence[Pass], rounds: int) -> list[Sample]:
        return [
            Sample(b * n, b, s, 1e-3 + b * s * kept * 1e-9 + b * n * s * pairs * 1e-10)
            for b, n, s in sizes
        ]

    monkeypatch.setattr(Passes, "samples", timed)
    key, pair = calibrate._attention(CPU, NATIVE, QUICK)
    assert key == pytest.approx(1e-9, rel=1e-3)
    assert pair == pytest.approx(1e-10, rel=1e-3)


@pytest.mark.parametrize(
    ("several", "step", "sequence"),
    [(24.0, 8.0, 2.0), (10.0, 10.0, 0.0), (9.0, 10.0, 0.0), (80.0, 0.0, 10.0), (99.0, 0.0, 10.0)],
)
def test_the_engine_s_own_time(
    several: float, step: float, sequence: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 s around a pass of one sequence; of eight more, or by noise less or far too much."""
    spent = {1: iter([10.0, 90.0, 3.0]), 8: iter([several + 50, several, 1.0])}
    monkeypatch.setattr(calibrate, "_outside", lambda loaded, batch, steps: [next(spent[batch])])
    found = calibrate._overhead(CPU, NATIVE, replace(QUICK, rounds=3))
    assert found == pytest.approx((step, sequence))


def test_a_calibration_measures_everything(ticking: None) -> None:
    """Over the engine's own path: a pass takes one second whatever its rows, weights and context.

    A step looks at the clock before and after it, and so does its pass: two seconds are outside.
    """
    found = calibrated(["bf16"], CPU, NATIVE, effort=QUICK)
    rates = found.kinds["bf16"]
    assert rates.rows == QUICK.rows
    assert rates.layer == pytest.approx((1, 1, 1))
    assert rates.weight == pytest.approx((0, 0, 0), abs=1e-12)
    assert (found.step, found.sequence) == (2, 0)
    assert (found.key, found.pair) == pytest.approx((0, 0), abs=1e-12)
    assert found.bandwidth > 1e6, "bytes a second, no larger unit"


@needs_native
@pytest.mark.parametrize("kind", sorted(native_kinds()))
def test_probes_of_every_format_run(kind: str) -> None:
    model = probe(probe_config(256, 256, 2, 64), kind, CPU, native=True)
    passes = Passes(model, slots=64)
    assert passes.seconds(Pass(sequences=2, rows=3, context=16)) > 0


def test_probes_of_transformers_layers() -> None:
    model = probe(probe_config(256, 64, 1, 64), "fp32", CPU, native=False)
    assert Passes(model, slots=64).seconds(Pass(1, 4, 16)) > 0
    with pytest.raises(ConfigError, match="do not run with int4 weights; use bf16 or fp32"):
        probe(probe_config(256, 64, 1, 64), "int4", CPU, native=False)


def test_samples_are_medians_taken_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Passes(probe(probe_config(256, 64, 1, 64), "fp32", CPU, native=False), slots=64)
    done: list[Pass] = []

    def timed(self: Passes, size: Pass) -> float:
        done.append(size)
        return size.rows * {0: 100, 1: 3, 2: 9, 3: 5}[(len(done) - 1) // 2]

    monkeypatch.setattr(Passes, "seconds", timed)
    sizes = [Pass(1, 2, 8), Pass(2, 1, 4)]
    assert passes.samples(sizes, 3) == [Sample(2, 1, 8, 10), Sample(2, 2, 4, 5)]
    assert done == sizes * 4


def test_how_a_model_would_run(tmp_path: Path) -> None:
    shape = read_shape(str(save_tiny("llama", tmp_path / "llama", head_dim=16)))
    assert runs_natively(shape, CPU) == NATIVE
    assert as_run(shape, CPU) == shape
    odd = replace(shape, parts=tuple(replace(part, kind="IQ1_S") for part in shape.parts))
    assert set(as_run(odd, CPU).kinds) <= {"bf16", "fp32"}
    assert not runs_natively(read_shape(str(save_tiny("gemma2", tmp_path / "gemma"))), CPU)
    with pytest.raises(ConfigError, match=r"mixture of experts.*--hardware"):
        as_run(read_shape(str(save_tiny("deepseek_v3", tmp_path / "moe"))), CPU)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_loaded("llama", max_position_embeddings=2048)


def test_the_passes_of_the_very_model(loaded: LoadedModel, ticking: None) -> None:
    known = replace(KNOWN, step=100.0, sequence=10.0)
    curve = measured_curve(loaded, SHAPE, known, rows=(1, 2), contexts=(16, 64))
    assert set(curve.rows) >= {1, 2, 8}
    assert curve.row_seconds == pytest.approx([101] * len(curve.rows)), "a pass, and the step's own"
    assert curve.sequence == pytest.approx(10)


def test_measured_acceptance_is_the_engine_s(loaded: LoadedModel) -> None:
    """Over answers long enough for a random model to repeat itself."""
    request = Request([5, 6, 7], SamplingParams(max_tokens=300, ignore_eos=True))
    llm = LLM(loaded, drafter="ngram", depth=3, nodes=3, kv_tokens=1024, policy="fixed")
    (output,) = llm.generate([request])
    there = output.completions[0].speculation
    found = measured_acceptance(loaded, "ngram", 3, [Prompt("any", request)])
    assert there.accepted > 0
    assert found.tokens(3) == pytest.approx(1 + there.accepted / there.steps)
    assert found.drafted(3) == pytest.approx(there.drafted / there.steps)
    assert found.drafted(1) == there.drafted_steps / there.steps
    assert found.rate == sum(there.passed) / sum(there.reached)


def test_a_drafter_that_is_silent_has_no_acceptance(loaded: LoadedModel) -> None:
    found = measured_acceptance(loaded, "none", 3, prompts_of(loaded)[:1])
    assert (found.tokens(3), found.drafted(3)) == (1, 0)
