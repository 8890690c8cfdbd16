"""GGUF files: the model that was written comes back."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import _type_traits, dequantize
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from ridgeline.errors import ModelLoadError
from ridgeline.model import gguf_convert
from ridgeline.model.fetch import demo_model
from ridgeline.model.gguf_file import read_gguf
from ridgeline.model.load import load_model
from tests.loading import CONTEXT, assert_close, eager_logits, logits, refusal
from tests.tiny import BOS, END_OF_TURN, EOS, tiny_model
from tests.tiny_gguf import WIDE, write_gguf

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return demo_model()


def their_weights(path: Path, model: PreTrainedModel) -> dict[str, Tensor]:
    """What transformers itself reads from a GGUF file."""
    # Only the model's own names are needed; with its submodules this takes minutes.
    names = SimpleNamespace(
        config=model.config, state_dict=model.state_dict, named_children=lambda: ()
    )
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=names)
    weights: dict[str, Tensor] = read["tensors"]
    return weights


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "qwen3_moe"])
def test_gguf_files_give_the_model_that_was_written(family: str, tmp_path: Path) -> None:
    # Permuted queries and keys (llama), shifted norms (gemma), merged experts, untied heads.
    changes: dict[str, Any] = dict(WIDE)
    if family.startswith("gemma"):
        changes |= {"tie_word_embeddings": True, "query_pre_attn_scalar": WIDE["head_dim"]}
    if family == "gemma3":  # the file leaves the pattern to the reader: every sixth layer is full
        changes |= {"num_hidden_layers": 6, "layer_types": None}
    model = tiny_model(family, **changes)
    loaded = load_model(str(write_gguf(model, tmp_path / "m.gguf")), "fp32", "cpu")
    assert_close(logits(loaded), eager_logits(model))
    assert loaded.end_tokens == {EOS, END_OF_TURN}
    assert loaded.context_len == CONTEXT
    assert loaded.encode_chat([{"role": "user", "content": "a"}])[0] == BOS


def test_gguf_weights_equal_transformers_own_conversion(tmp_path: Path) -> None:
    model = tiny_model("llama", **WIDE)
    path = write_gguf(model, tmp_path / "m.gguf", GGMLQuantizationType.Q8_0)
    theirs = their_weights(path, model)
    folder = gguf_convert.gguf_folder(path, torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)


def test_a_gguf_in_bf16_is_rounded_once(tmp_path: Path) -> None:
    model = tiny_model("gemma2", tie_word_embeddings=True, **WIDE)
    path = write_gguf(model, tmp_path / "m.gguf")
    folder = gguf_convert.gguf_folder(path, torch.bfloat16)
    stored = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    for name, weight in model.state_dict().items():
        shift = 1 if "norm" in name else 0  # as it was stored
        assert torch.equal(stored[name], (weight + shift - shift).bfloat16()), name


@pytest.mark.parametrize("kind", list(_type_traits), ids=lambda kind: kind.name)
def test_every_type_that_gguf_unpacks(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    model = tiny_model("qwen2", **WIDE)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    size = (WIDE["hidden_size"], WIDE["intermediate_size"] // block * block_bytes)
    # Without one bit of an exponent no scale is infinite.
    raw = np.random.default_rng(kind).integers(0, 256, size, np.uint8) & 0xFB
    name = "blk.1.ffn_down.weight"
    path = write_gguf(model, tmp_path / "m.gguf", raw={name: (raw, kind)})
    folder = gguf_convert.gguf_folder(path, torch.float32)
    weights = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    found = weights["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_array_equal(found.numpy(), dequantize(raw, kind))


def test_a_gguf_is_converted_once(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tiny_model("qwen2", **WIDE), tmp_path / "m.gguf")
    first = gguf_convert.gguf_folder(path, torch.float32)
    made = (first / "model.safetensors").stat().st_mtime_ns
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(path.read_bytes())
    assert gguf_convert.gguf_folder(copy, torch.float32) == first  # by contents, not by name
    assert (first / "model.safetensors").stat().st_mtime_ns == made
    assert gguf_convert.gguf_folder(path, torch.bfloat16) != first
    write_gguf(tiny_model("qwen2", seed=1, **WIDE), path)
    assert gguf_convert.gguf_folder(path, torch.float32) != first
    assert not list(cache.rglob(".partial-*"))


def test_a_conversion_that_is_interrupted_leaves_nothing(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tiny_model("qwen2", **WIDE), tmp_path / "m.gguf")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(gguf_convert.WeightPlan, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            gguf_convert.gguf_folder(path, torch.float32)
    assert [entry.name for entry in (cache / "gguf").iterdir()] == ["digests"]
    assert gguf_convert.gguf_folder(path, torch.float32).is_dir()


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_llama3_rotary_divisors_are_honoured(tmp_path: Path) -> None:
    rope = {**LLAMA3, "original_max_position_embeddings": 8192, "rope_theta": 10000.0}
    model = tiny_model("llama", rope_parameters=rope, **WIDE)
    plain = 10000.0 ** -(torch.arange(8) / 8)
    factors = (plain / model.model.rotary_emb.inv_freq).numpy()
    assert factors.max() > 7

    def written(values: np.ndarray) -> Path:
        path = tmp_path / "m.gguf"
        return write_gguf(model, path, vectors={"rope_freqs.weight": values.astype(np.float32)})

    assert_close(logits(load_model(str(written(factors)), "fp32", "cpu")), eager_logits(model))
    assert "in a way other than Llama 3's" in refusal(written(factors[::-1].copy()))


def test_rotary_scaling_of_the_metadata(tmp_path: Path) -> None:
    def config(**scaling: Any) -> dict[str, Any]:
        entries = {f"qwen2.rope.scaling.{key}": value for key, value in scaling.items()}
        path = write_gguf(tiny_model("qwen2", **WIDE), tmp_path / "m.gguf", metadata=entries)
        return gguf_convert.gguf_config(read_gguf(path)).rope_parameters

    assert config(type="none")["rope_type"] == "default"
    linear = config(type="linear", factor=4.0)
    assert (linear["rope_type"], linear["factor"]) == ("linear", 4.0)
    yarn = config(type="yarn", factor=2.0, original_context_length=128)
    assert (yarn["rope_type"], yarn["original_max_position_embeddings"]) == ("yarn", 128)
    with pytest.raises(ModelLoadError, match="scales its rotary positions by 'odd'"):
        config(type="odd")


def test_numbers_are_split_into_digits_where_the_file_says_so(tmp_path: Path) -> None:
    model = tiny_model("qwen3", **WIDE)
    path = write_gguf(model, tmp_path / "m.gguf", metadata={"tokenizer.ggml.pre": "smollm"})
    tokenizer = gguf_convert.gguf_tokenizer(read_gguf(path)).backend_tokenizer
    pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("in  42")]
    assert pieces == ["in", "ĠĠ", "4", "2"]


@pytest.mark.parametrize("damage", ["cut", "emptied", "removed", "unsealed"])
def test_a_damaged_conversion_is_made_anew(damage: str, tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tiny_model("llama"), tmp_path / "m.gguf")
    expected = logits(load_model(str(path), "fp32", "cpu"))
    (folder,) = (f for f in (cache / "gguf").iterdir() if (f / "config.json").is_file())
    weights, tokenizer = folder / "model.safetensors", folder / "tokenizer.json"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-8])
    elif damage == "emptied":
        tokenizer.write_bytes(b" " * tokenizer.stat().st_size)
    elif damage == "removed":
        tokenizer.unlink()
    else:
        (folder / gguf_convert._SEALS).write_text("{")
    loaded = load_model(str(path), "fp32", "cpu")
    assert loaded.tokenizer is not None
    assert torch.equal(logits(loaded), expected)


def test_a_full_disk_while_the_tokenizer_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    def save(self: object, folder: object) -> None:
        raise Exception("No space left on device (os error 28)")

    path = write_gguf(tiny_model("llama"), tmp_path / "m.gguf")
    monkeypatch.setattr(gguf_convert.PreTrainedTokenizerFast, "save_pretrained", save)
    assert "failed in the cache folder" in refusal(path)
    assert not [*cache.rglob("*.json")]


@pytest.mark.smollm2
def test_smollm2_equals_transformers_own_load(smollm2: Path) -> None:
    loaded = load_model(str(smollm2), "fp32", "cpu")
    folder = gguf_convert.gguf_folder(smollm2, torch.float32)
    stock = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    theirs, ours = their_weights(smollm2, stock), stock.state_dict()
    assert theirs.keys() == ours.keys() - {"lm_head.weight"}  # tied
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert (logits(loaded) - eager_logits(stock)).abs().max() < 1e-3
    assert loaded.end_tokens >= {2}
    chat = loaded.encode_chat([{"role": "user", "content": "Hello"}])
    assert loaded.tokenizer.decode(chat).endswith("user\nHello<|im_end|>\n<|im_start|>assistant\n")
