"""Known heads: found by the model's name, used where no drafter or no path is named."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.cli import execute
from ridgeline.draft.auto import chosen
from ridgeline.draft.heads import METHODS, SHIPPED, head_for, known_heads, model_key
from ridgeline.errors import ConfigError, RidgelineError
from ridgeline.model.load import LoadedModel
from tests.engines import tiny_loaded
from tests.heads import write_head
from tests.tiny import save_tiny

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
    for model, said in (
        (target, f"drafter ngram+eagle3, whose head is in {path}"),
        (named("other"), "drafter ngram, as no draft head is known for other"),
    ):
        drafter = LLM(model, drafter="auto", kv_tokens=1024).drafter
        assert drafter is not None
        assert chosen("auto", model, drafter) == said
        assert drafter.name == said.split(",")[0].split()[1]


@pytest.mark.parametrize("damage", ["of another model", "cut weights", "no configuration"])
def test_a_head_that_cannot_be_used_is_left_out(
    damage: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody asked for it; whoever does is told."""
    path = place(cache, "tiny-1b", "eagle3")
    target = named("tiny-1b")
    if damage == "of another model":
        shape = {"vocab_size": 40, "hidden_size": 96}
        target = replace(tiny_loaded("llama", **shape), name="tiny-1b")
    elif damage == "cut weights":
        file = path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:1000])
    else:
        (path / "config.json").write_text("[]")
    llm = LLM(target, drafter="auto", kv_tokens=1024)
    assert llm.drafter.name == "ngram"  # type: ignore[union-attr]
    (said,) = caplog.messages
    assert said.startswith("note: the known eagle3 head cannot be used: ")
    assert str(path) in said
    assert "\n" not in said
    expected = "drafter ngram, as the known eagle3 head cannot be used"
    assert chosen("auto", target, llm.drafter) == expected
    with pytest.raises(RidgelineError, match=re.escape(str(path))):
        LLM(target, drafter="eagle3", kv_tokens=1024)
    shutil.rmtree(path)
    place(cache, "tiny-1b", "eagle3")
    assert LLM(named("tiny-1b"), drafter="auto", kv_tokens=1024).drafter.name == "ngram+eagle3"  # type: ignore[union-attr]


@pytest.mark.parametrize("known", [True, False])
def test_an_unknown_quantisation_is_no_fault_of_a_head(known: bool, cache: Path) -> None:
    if known:
        place(cache, "tiny-1b", "eagle3")
    with pytest.raises(ConfigError, match="quantize is 'int3'"):
        LLM(named("tiny-1b"), drafter="auto", kv_tokens=1024, draft_quantize="int3")


def test_a_model_of_a_known_name_writes_by_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(save_tiny("llama", tmp_path / "SmolLM2-135M-Instruct"))
    command = ["generate", "--model", folder, "--prompt", "the rest", "--max-tokens", "4"]
    assert execute(command) == 0
    capsys.readouterr()
    assert execute([*command, "--drafter", "mtp"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "d2t names ids outside" in line


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
