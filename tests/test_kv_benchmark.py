"""The cache benchmark runs, and its memory figure (counted, not timed) is what is claimed."""

import json
import sys

import pytest
import torch


@pytest.fixture
def cache(benchmark_named):
    return benchmark_named("cache")


def test_pages_hold_hardly_more_than_is_needed(cache):
    figures = cache.memory(cache.LOADS["mixed"], steps=200)
    assert 0.96 <= figures["ratio"] <= 1
    assert 0.96 <= figures["ratio_in_a_step"] <= 1
    assert figures["ratio_reserving_context"] < 0.5
    wasted = (figures["used_bytes"] - figures["needed_bytes"]) / cache.bytes_per_token(cache.LAYERS)
    assert wasted / cache.SEQUENCES < cache.BLOCK_SIZE, "less than one block a sequence"


def test_the_report(cache, tmp_path, monkeypatch, capsys):
    out = tmp_path / "cache.json"
    arguments = ["--lengths", "32", "64", "--repeats", "2", "--steps", "5", "--out", str(out)]
    monkeypatch.setattr(
        sys, "argv", ["cache.py", *arguments, "--threads", str(torch.get_num_threads())]
    )
    cache.main()
    report = json.loads(out.read_text())
    assert report["provenance"]["arguments"]["lengths"] == [32, 64]
    assert report["provenance"]["arguments"]["out"] == "cache.json", "no path of this machine"
    assert report["provenance"]["versions"]["torch"] == torch.__version__
    assert len(report["operations"]) == 5
    assert all(set(row) == {"32", "64"} for row in report["operations"].values())
    markdown = out.with_suffix(".md").read_text()
    assert markdown in capsys.readouterr().out
    for name in (*report["operations"], *report["memory"]):
        assert f"| {name} |" in markdown


def test_lengths_must_be_whole_blocks(cache, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["cache.py", "--lengths", "100"])
    with pytest.raises(SystemExit):
        cache.main()
    assert "lengths are multiples of 16" in capsys.readouterr().err
