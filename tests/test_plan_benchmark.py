"""The planner's benchmark keeps what is finished and counts errors as it says."""

import json

import pytest


@pytest.fixture
def benchmark(benchmark_named):
    return benchmark_named("plan")


def test_what_is_finished_is_not_measured_again(benchmark, tmp_path):
    out, source = tmp_path / "new" / "plan.json", {"arguments": {"rounds": 3}}
    done = []

    def run():
        done.append(1)
        return {"speed_up": 1.5}

    first = benchmark.Record(out, source, fresh=False)
    assert first.once("a", run) == first.once("a", run) == {"speed_up": 1.5}
    again = benchmark.Record(out, source, fresh=False)
    assert again.once("a", run) == {"speed_up": 1.5}
    assert len(done) == 1
    assert json.loads(out.read_text())["measured"]["a"].keys() >= {"time", "commit", "value"}
    with pytest.raises(SystemExit, match="has other arguments"):
        benchmark.Record(out, {"arguments": {"rounds": 4}}, fresh=False)
    benchmark.Record(out, source, fresh=True).once("a", run)
    assert len(done) == 2


def test_errors_by_hand(benchmark):
    passes = [(1, 0, 64, 1.1, 1.0), (1, 1, 64, 0.8, 1.0), (1, 2, 64, 1.0, 1.0)]
    drafted = [
        ("ngram", 1, {1: 1.2, 2: 1.8}, {0: 1.0, 1: 1.5, 2: 1.2}, 2),
        ("ngram", 8, {1: 0.9, 2: 0.8}, {0: 1.0, 1: 0.9, 2: 0.8}, 0),
    ]
    lines = "\n".join(benchmark.summary(passes, [(1, 3.0, 2.0)], drafted))
    assert "| pass | 3 | 10.0 % | 10.0 % | 20.0 % | 10 % |" in lines
    assert "| plain step | 1 | 50.0 % | 50.0 % | 50.0 % | 10 % | no |" in lines
    assert "| speed-up | 4 | 10.0 % | 17.5 % | 50.0 % | 15 % | yes |" in lines
    assert "| chosen depth | 2 | 10.0 % | 10.0 % | 20.0 % | 5 % | no |" in lines
