"""Known heads: found by the model's name, used where no drafter or no path is named."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.draft.auto import chosen
from ridgeline.draft.heads import METHODS, SHIPPED, head_for, known_heads, model_key
from ridgeline.errors import ConfigError
from ridgeline.model.load import LoadedModel
from tests.engines import tiny_loaded
from tests.heads import write_head

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    return tmp_path


def named(name: str) -> LoadedModel:
    return replace(tiny_loaded(), name=name)


def place(home: Path, model: str, method: str) -> Path:
    written = write_head(method, home / "written" / method, tiny_loaded()).partition(":")[2]
    return Path(shutil.copytree(written, home / "heads" / model / method))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("SmolLM2-135M-Instruct.Q4_1", "smollm2-135m-instruct"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m-instruct"),
        ("qwen2.5-coder-1.5b-instruct-q4_k_m", "qwen2.5-coder-1.5b-instruct"),
        ("Qwen/Qwen2.5-Coder-1.5B-Instruct/", "qwen2.5-coder-1.5b-instruct"),
        ("model-IQ4_XS", "model"),
        ("model.BF16", "model"),
        ("model-f16", "model"),
        ("model-q", "model-q"),
        ("Qwen2.5-1.5B", "qwen2.5-1.5b"),
    ],
)
def test_names(name: str, key: str) -> None:
    assert model_key(name) == key


def test_a_head_is_used_for_its_model_alone(cache: Path) -> None:
    place(cache, "tiny-1b", "medusa")
    place(cache, "tiny-1b", "eagle")
    path = place(cache, "tiny-1b", "eagle3")
    target = named("Org/Tiny-1B.Q4_K_M")
    head = head_for(target)
    assert head is not None
    assert (head.method, head.path) == ("eagle3", path)
    assert head_for(target, "eagle").method == "eagle"  # type: ignore[union-attr]
    assert head_for(target, "mtp") is None
    assert head_for(named("tiny-2b")) is None
    assert chosen("auto", target) == f"drafter ngram+eagle3, whose head is in {path}"
    assert chosen("auto", named("other")) == "drafter ngram, as no draft head is known for other"
    for model, name in ((target, "ngram+eagle3"), (named("other"), "ngram")):
        assert LLM(model, drafter="auto", kv_tokens=1024).drafter.name == name  # type: ignore[union-attr]


@pytest.mark.parametrize("method", [m for m in METHODS if m != "mtp"])
def test_a_method_alone_means_the_known_head(method: str, cache: Path) -> None:
    target = named("tiny-1b")
    with pytest.raises(ConfigError, match=rf"no {method} head is known for tiny-1b; .*{method}:"):
        LLM(target, drafter=method, kv_tokens=1024)
    place(cache, "tiny-1b", method)
    plain = LLM(target, kv_tokens=1024).generate("the rest", PARAMS)
    drafted = LLM(target, drafter=method, kv_tokens=1024, policy="fixed").generate(
        "the rest", PARAMS
    )
    assert plain[0].token_ids == drafted[0].token_ids


def test_auto_takes_no_argument(cache: Path) -> None:
    with pytest.raises(ConfigError, match="takes no argument"):
        LLM(tiny_loaded(), drafter="auto:x", kv_tokens=1024)


def test_what_ships_is_small_and_complete() -> None:
    for head in known_heads():
        if head.path.is_relative_to(SHIPPED):
            files = {file.name for file in head.path.iterdir()}
            assert files == {"config.json", "model.safetensors", "provenance.json"}
            limit = 10 if "smollm2" in head.model else 25
            assert sum(file.stat().st_size for file in head.path.iterdir()) <= limit * 2**20
