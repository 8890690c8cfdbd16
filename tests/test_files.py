"""Folders and files that cannot be read, or that contradict each other: one line, and at once."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline import LLM
from ridgeline.errors import ConfigError, ModelLoadError, RequestError
from ridgeline.model.fetch import demo_model
from ridgeline.model.load import load_model
from tests.engines import tiny_loaded
from tests.loading import refusal
from tests.tiny import END_OF_TURN, VOCAB_SIZE, save_tiny, tiny_model
from tests.tiny_gguf import write_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny("llama", tmp_path / "m")


def edit(file: Path, **fields: Any) -> None:
    """Changes fields of a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.fixture
def nobody(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which a test acts as another user than root, whom no mode keeps out."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setenv("RIDGELINE_CACHE", f"{name}/cache")
        Path(name).chmod(0o777)
        if user == 0:
            os.seteuid(65534)
        try:
            yield Path(name)
        finally:
            os.seteuid(user)
            for path in Path(name).iterdir():
                path.chmod(0o700)


@pytest.mark.parametrize("dtype", ["auto", "fp32"])
def test_a_file_without_rights(dtype: str, nobody: Path) -> None:
    file = write_gguf(tiny_model("llama"), nobody / "m.gguf")
    file.chmod(0)
    with pytest.raises(ModelLoadError, match=r"m\.gguf cannot be loaded: .*Permission denied"):
        load_model(str(file), dtype, "cpu")
    with pytest.raises(ModelLoadError, match=r"m\.gguf cannot be loaded: .*Permission denied"):
        LLM(tiny_loaded(), drafter=f"model:{file}", draft_dtype=dtype)


def test_a_folder_without_rights(nobody: Path) -> None:
    save_tiny("llama", nobody / "m").chmod(0)
    assert "m cannot be loaded: [Errno 13] Permission denied" in refusal(nobody / "m")


def test_a_cache_without_rights(nobody: Path) -> None:
    file = write_gguf(tiny_model("llama"), nobody / "m.gguf")
    (nobody / "cache").mkdir(mode=0)
    message = "failed in the cache folder .*cache.* RIDGELINE_CACHE can name another"
    for load in (lambda: load_model(str(file), device="cpu"), demo_model):
        with pytest.raises(ModelLoadError, match=message):
            load()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("x" * 5000, "File name too long"),
        ("/" + "x/" * 3000, "File name too long"),
        ("~nouser/x", "home directory"),
    ],
)
def test_paths_that_cannot_be_looked_up(path: str, message: str) -> None:
    for dtype in ("auto", "fp32"):
        with pytest.raises(ModelLoadError, match=rf"cannot be loaded: .*{message}") as error:
            load_model(path, dtype, "cpu")
        assert len(str(error.value)) < 600


@pytest.mark.parametrize(
    ("path", "kind", "message"),
    [
        ("~nouser/x", ConfigError, "RIDGELINE_CACHE is '~nouser/x', and there is no such home"),
        ("/" + "x" * 5000, ModelLoadError, "File name too long.; RIDGELINE_CACHE can name another"),
    ],
)
def test_cache_folders_that_cannot_be_looked_up(
    path: str, kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", path)
    with pytest.raises(kind, match=message) as error:
        demo_model()
    assert len(str(error.value)) < 600


@pytest.mark.parametrize(
    ("stated", "kept"),
    [
        (-1, set()),
        ([END_OF_TURN, -1, VOCAB_SIZE, 10**30], {END_OF_TURN}),
        (VOCAB_SIZE - 1, {VOCAB_SIZE - 1}),
    ],
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_end_tokens_outside_the_vocabulary_are_none(
    file: str, stated: Any, kept: set[int], folder: Path
) -> None:
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").write_text("{}")
    edit(folder / file, eos_token_id=stated)
    assert load_model(str(folder), "fp32", "cpu").end_tokens == kept


@pytest.mark.parametrize("stated", [True, 1.0, float("nan"), "x", [None], [[1]], {"a": 1}])
def test_end_tokens_that_are_no_integers(stated: Any, folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=stated)
    answer = refusal(folder)
    assert "states eos_token_id" in answer
    assert "must be a token id" in answer


@pytest.mark.parametrize("content", ["", "{", "[]", "\xff", "[" * 100_000])
def test_a_damaged_generation_config_is_named(content: str, folder: Path) -> None:
    (folder / "generation_config.json").write_bytes(content.encode("latin-1"))
    assert "generation_config.json" in refusal(folder)


def test_a_damaged_tokenizer_config_is_a_wrong_request(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", model_max_length="x")
    loaded = load_model(str(folder), "fp32", "cpu")
    with pytest.raises(RequestError, match="the tokenizer of m fails"):
        loaded.encode_prompt("the")
    with pytest.raises(RequestError, match="of m refuses these messages"):
        loaded.encode_chat([{"role": "user", "content": "the"}])


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (
            "num_hidden_layers",
            "states num_hidden_layers 1000000000, and the weights beside it are 36",
        ),
        ("num_attention_heads", "its files hold"),
        ("num_key_value_heads", "its files hold"),
        ("head_dim", "its files hold"),
        ("hidden_size", "its files hold"),
        ("intermediate_size", "its files hold"),
        ("vocab_size", "its files hold"),
    ],
)
@pytest.mark.parametrize("sharded", [False, True])
def test_absurd_sizes_are_refused_before_anything_is_made(
    field: str, message: str, sharded: bool, tmp_path: Path
) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path, max_shard_size="50KB" if sharded else "1GB")
    edit(tmp_path / "config.json", **{field: 10**9}, layer_types=None)
    assert message in refusal(tmp_path)


def test_an_index_without_files_is_named(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="50KB")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert "model.safetensors.index.json holds no weight_map" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("name", "dtype", "shown"),
    [
        ("model.layers.1.mlp.up_proj.weight", torch.int8, "I8"),
        ("model.embed_tokens.weight", torch.int32, "I32"),
        ("lm_head.weight", torch.float8_e4m3fn, "F8_E4M3"),
    ],
)
def test_integers_for_weights_are_refused(
    name: str, dtype: torch.dtype, shown: str, folder: Path
) -> None:
    weights = load_file(folder / "model.safetensors")
    weights[name] = weights[name].to(dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert f"holds {name} as {shown}, and its config.json does not say" in refusal(folder)


def test_integers_that_are_no_weights_are_left_alone(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.position_ids"] = torch.arange(4)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert load_model(str(folder), "fp32", "cpu").vocab_size == VOCAB_SIZE
