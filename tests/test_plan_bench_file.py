"""What a plan takes from a benchmark: acceptance and drafts by level, and what it refuses."""

from __future__ import annotations

import json
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from ridgeline.bench.record import FORMAT
from ridgeline.errors import ConfigError
from ridgeline.plan.acceptance import Acceptance, Range, of_run
from ridgeline.plan.bench_file import from_bench, lookup
from ridgeline.plan.cost import CostCurve
from ridgeline.plan.drafters import Planned, methods
from ridgeline.plan.planner import Contender, Planner


def run(drafter: str = "ngram", steps: Any = 10, **changes: Any) -> dict[str, Any]:
    """Options and figures that are not named are those of a short chain."""
    options = {"drafter": drafter, "temperature": 0.0, "batch": 1, "depth": 2}
    figures = {"drafted": 15, "passed": [8, 4], "reached": [9, 6], "memory": {"weights": 0}}
    named = options.keys() | {"policy", "nodes"}
    return {
        "options": options | {name: changes[name] for name in named & changes.keys()},
        "steps": steps,
        **figures,
        **{name: changes[name] for name in changes.keys() - named},
    }


def write(path: Path, *runs: Any, **rest: Any) -> Path:
    path.write_text(json.dumps({"format": FORMAT, "runs": runs, **rest}))
    return path


# Drafts by level


@pytest.mark.parametrize(
    ("depth", "figures"),
    [
        (1, {"drafted": 90, "reached": [90], "passed": [50]}),
        (2, {"drafted": 150, "reached": [90, 40], "passed": [50, 20]}),
        (4, {"drafted": 190, "reached": [90, 40, 12, 3], "passed": [50, 20, 6, 2]}),
        (8, {"drafted": 194, "reached": [90, 40, 12, 3], "passed": [50, 20, 6, 2]}),
    ],
)
def test_the_first_level_is_the_same_however_deep_was_measured(
    depth: int, figures: dict[str, Any]
) -> None:
    """Chains that end early leave deep levels empty, which says nothing of the first."""
    found = of_run(run(steps=100, depth=depth, **figures))
    assert found.drafted(1) == pytest.approx(0.9)
    assert found.tokens(1) == pytest.approx(1.5)
    assert found.drafted(depth) == pytest.approx(figures["drafted"] / 100), "all of them"
    assert len(found.nodes) == len(found.survival) == depth
    free = Contender(Planned("free", methods()["ngram"], None), Range(found, found, "made up"))
    curve = CostCurve(rows=(1, 100), row_seconds=(10.0, 109.0))
    choice = Planner(curve, lambda shape: curve, context=0).choice(free, 1, 8)
    assert choice.rows == 15
    assert choice.middle == pytest.approx(1.5 * 17 / (17 + 8 * 0.9))


def test_drafts_by_level_by_hand() -> None:
    """Of 50 accepted chains 40 go on, of 20 again 10: 0.8 and half of it, scaled to 0.6 left."""
    found = of_run(run(steps=100, depth=3, drafted=150, reached=[90, 40, 10], passed=[50, 20, 5]))
    assert found.nodes == pytest.approx((0.9, 0.6 * 2 / 3, 0.6 / 3))
    assert found.drafted(5) == pytest.approx(1.5 + 2 * 0.2), "beyond, as many as at the last"
    assert found.width == pytest.approx(0.5)


def test_trees_are_as_wide_at_every_level() -> None:
    found = of_run(
        run(steps=100, depth=2, nodes=10, drafted=900, reached=[100, 25], passed=[50, 20])
    )
    assert found.nodes == pytest.approx((6, 3))


@pytest.mark.parametrize(
    "figures",
    [
        {"steps": 0, "drafted": 0, "passed": [], "reached": []},
        {"drafted": 0, "passed": [], "reached": []},
        {"drafted": 0, "passed": [], "reached": [], "depth": 0},
    ],
)
def test_nothing_drafted(figures: dict[str, Any]) -> None:
    found = of_run(run(**figures))
    assert (found.tokens(4), found.drafted(4)) == (1, 0)


def test_drafts_of_which_none_is_accepted() -> None:
    found = of_run(run(depth=3, drafted=25, passed=[0], reached=[9]))
    assert found.nodes == pytest.approx((0.9, 0.8, 0.8))
    assert found.tokens(3) == 1


# Which runs count


def test_benchmarked_acceptance(tmp_path: Path) -> None:
    file = write(
        tmp_path / "bench.json",
        run(batch=4, passed=[0], reached=[9]),
        run(),
        run(temperature=1.0, passed=[5, 1], reached=[8, 4]),
        run("eagle:a"),
        run("eagle:b"),
        run("none", drafted=0, passed=[], reached=[]),
    )
    found = from_bench(file)
    assert list(found) == ["ngram", "eagle:a", "eagle:b"]
    assert found["ngram"].low == Acceptance((0.5, 0.1), 0.5, (0.8, 0.7))
    assert found["ngram"].high == Acceptance((0.8, 0.4), 0.8, (0.9, 0.6))
    assert found["ngram"].source == "measured: bench.json"
    assert lookup(found, "ngram") == found["ngram"]
    assert lookup(found, "ngram:min=3") == found["ngram"], "the only one of that name"
    assert lookup(found, "eagle:c") is None, "one of two"


def test_a_pair_is_another_drafter_than_its_first(tmp_path: Path) -> None:
    found = from_bench(write(tmp_path / "bench.json", run("ngram+eagle:a")))
    assert lookup(found, "ngram") is lookup(found, "ngram:min=3") is None
    assert lookup(found, "ngram+eagle") == found["ngram+eagle:a"]


def test_the_model_is_named(tmp_path: Path) -> None:
    found = from_bench(write(tmp_path / "bench.json", run(), model={"name": "Llama-8B"}))
    assert found["ngram"].source == "measured: bench.json, Llama-8B"


PAUSED = {"drafted": 4, "reached": [2, 1], "passed": [1, 1], "policy": "goodput"}


def test_a_policy_that_always_drafts_comes_first(tmp_path: Path) -> None:
    runs = run(**PAUSED), run(batch=16, policy="fixed")
    assert from_bench(write(tmp_path / "b.json", *runs))["ngram"].low.survival == (0.8, 0.4)


def test_pauses_of_a_policy_are_not_the_drafter_s() -> None:
    """A head drafts where it is let; n-grams have nothing to say in most steps."""
    head = of_run(run("mtp", **PAUSED, memory={"weights": 1}))
    assert (head.survival, head.nodes) == ((0.5, 0.5), (1, 1))
    assert of_run(run(**PAUSED)).survival == (0.1, 0.1)


# What is refused


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", '{"format": "x", "runs": []}', '{"runs": 1}', "[" * 100_000, b"\xff\xfe"],
)
def test_files_that_are_no_benchmark(text: str | bytes, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError, match=r"bench\.json holds no results"):
        from_bench(file)
    with pytest.raises(ConfigError, match=r"cannot read .*other"):
        from_bench(tmp_path / "other.json")


@pytest.mark.parametrize(
    "runs",
    [
        [],
        [run("none", drafted=0, passed=[], reached=[])],
        [run(steps=0, **{"drafted": 0, "passed": [], "reached": []})],
    ],
)
def test_files_without_drafts(runs: list[Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run of a drafter; `ridgeline bench --drafter"):
        from_bench(write(tmp_path / "bench.json", *runs))


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (run(3), "drafter is not the spec of a drafter"),  # type: ignore[arg-type]
        (run(steps=-10), "steps is not a whole number of 0 or more"),
        (run(steps=True), "steps is not a whole number"),
        (run(drafted=inf), "drafted is not a whole number"),
        (run(drafted=10**9), "1000000000 drafts in 10 steps"),
        (run(drafted=14), "14 drafts in 10 steps, of which 15 were looked at"),
        (run(passed=[8, nan]), "passed is not a list of whole numbers"),
        (run(reached=7), "reached is not a list of whole numbers"),
        (run(reached=[9]), "drafts are accepted that were not looked at"),
        (run(passed=[8_000_000, 4]), "drafts are accepted that were not looked at"),
        (run(steps=5), "drafts are accepted that were not looked at"),
        (run(depth=1), "drafts are 2 deep, but at most 1 were asked for"),
        (run(depth=1000), "depth is not a whole number from 0 to"),
        (run(batch="1"), "batch is not a whole number"),
        (run(temperature=nan), "temperature is not a number of 0 or more"),
        (run(policy=1), "policy is not the name of a policy"),
        (run(policy="goodput", memory={"weights": "x"}), "weights is not a whole number"),
        (run(policy="goodput", memory=None), "it lacks what a run has"),
        ({"options": {}}, "it lacks what a run has"),
        ({**run(), "options": {"drafter": "ngram"}}, "it lacks what a run has"),
        *(
            ({**run(), "options": {**run(policy="fixed")["options"], name: None}}, f"{name} is not")
            for name in ("drafter", "temperature", "batch", "depth", "policy")
        ),
        *(
            (
                {**run(), "options": {k: v for k, v in full.items() if k != name}},
                "it lacks what a run has",
            )
            for full in [run(policy="fixed")["options"]]
            for name in ("drafter", "temperature", "batch", "depth")
        ),
        ([], "it lacks what a run has"),
    ],
)
def test_damaged_runs(damaged: Any, message: str, tmp_path: Path) -> None:
    file = write(tmp_path / "bench.json", run(), damaged)
    with pytest.raises(ConfigError, match=f"run 2 of .*bench.json is damaged: {message}") as caught:
        from_bench(file)
    assert "\n" not in str(caught.value)
