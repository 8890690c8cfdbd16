"""Loading folders and hub ids, what belongs to a model, and every way in which that fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer

from ridgeline.errors import ConfigError, RequestError, UnsupportedModelError
from ridgeline.model import device
from ridgeline.model.load import load_model
from tests.loading import CONTEXT, assert_close, eager_logits, logits, refusal
from tests.tiny import BOS, END_OF_TURN, EOS, FAMILIES, VOCAB_SIZE, save_tiny, tiny_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_gives_the_model_that_was_saved(family: str, tmp_path: Path) -> None:
    loaded = load_model(str(save_tiny(family, tmp_path / family)), "fp32", "cpu")
    assert_close(logits(loaded), eager_logits(tiny_model(family)))
    assert loaded.name == family
    assert loaded.end_tokens == {EOS, END_OF_TURN}  # the generation config's two
    assert loaded.context_len == CONTEXT
    assert loaded.vocab_size == VOCAB_SIZE


def test_a_sharded_folder(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    loaded = load_model(str(tmp_path), "fp32", "cpu")
    assert_close(logits(loaded), eager_logits(model))
    assert loaded.tokenizer is None
    assert loaded.end_tokens == {EOS}
    with pytest.raises(RequestError, match="has no tokenizer; give prompts as token ids"):
        loaded.encode_prompt("text")


def test_dtype_is_converted(tmp_path: Path) -> None:
    loaded = load_model(str(save_tiny("qwen2", tmp_path / "m")), "bf16", "cpu")
    assert loaded.model.dtype == torch.bfloat16
    assert loaded.model.layers[0].dtype == torch.bfloat16


def test_models_of_one_process_keep_their_own_attention_and_configuration(tmp_path: Path) -> None:
    # Faults 24: transformers' own model of a configuration beside two of ours.
    folder = str(save_tiny("mistral", tmp_path / "m"))
    stock = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    first = load_model(folder, "fp32", "cpu")
    save_tiny("mistral", tmp_path / "w", sliding_window=4)
    second = load_model(str(tmp_path / "w"), "bf16", "cpu")
    assert stock.config._attn_implementation == "eager"
    stock_second = AutoModelForCausalLM.from_pretrained(
        tmp_path / "w", dtype=torch.bfloat16, attn_implementation="eager"
    )
    assert (first.model.dtype, second.model.dtype) == (torch.float32, torch.bfloat16)
    assert (logits(second) - eager_logits(stock_second)).abs().max() < 0.3
    assert_close(logits(first), eager_logits(stock))


def test_prompts_are_encoded_as_transformers_does(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "m")
    loaded = load_model(str(folder), "fp32", "cpu")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert loaded.encode_prompt("the street") == tokenizer("the street").input_ids
    chat = [{"role": "user", "content": "hello"}]
    text = "<bos>user: hello<turn>assistant: "
    assert loaded.encode_chat(chat) == tokenizer.encode(text, add_special_tokens=False)

    tokenizer.add_bos_token = True
    tokenizer.save_pretrained(folder)
    loaded = load_model(str(folder), "fp32", "cpu")
    assert loaded.encode_prompt("the") == [BOS, *loaded.encode_text("the")]
    assert loaded.encode_chat(chat).count(BOS) == 1

    loaded.tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(RequestError, match=r"refuses these messages: no system role"):
        loaded.encode_chat(chat)
    loaded.tokenizer.chat_template = None
    with pytest.raises(RequestError, match=r"m has no chat template; give it a plain prompt"):
        loaded.encode_chat(chat)


def test_dtype_and_device_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert device.choose_device("cpu") == cpu
    assert device.choose_dtype("fp16", cpu) == device.choose_dtype(torch.float16, cpu)
    monkeypatch.setattr(device, "cpu_has_bf16", lambda: True)
    assert device.choose_dtype("auto", cpu) == torch.bfloat16
    monkeypatch.setattr(device, "cpu_has_bf16", lambda: False)
    assert device.choose_dtype("auto", cpu) == torch.float32
    assert device.choose_dtype("auto", torch.device("cuda")) == torch.bfloat16
    for given in (cpu, torch.device("cpu", 0), "cpu:0"):
        assert device.choose_device(given).type == "cpu"
    for name in ("int8", torch.int8, None, 3, ["fp32"]):
        with pytest.raises(ConfigError, match="must be auto, bfloat16, float16 or float32"):
            device.choose_dtype(name, cpu)  # type: ignore[arg-type]
    names = ("gpu", "cuda:x", "cuda:²", "cuda:٣", "cpu:999999999999", "cpu:1", "cuda:" + "9" * 5000)
    for name in (*names, None, 3, torch.device("meta")):
        with pytest.raises(ConfigError, match="must be auto, cpu, cuda or cuda:N"):
            device.choose_device(name)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="CUDA devices here; use cpu"):
        device.choose_device("cuda:99")


def test_paths_that_are_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "there is no file or folder" in refusal(tmp_path / "nothing")
    assert "there is no file or folder" in refusal("model.gguf")
    assert "holds no config.json" in refusal(tmp_path)
    (tmp_path / "model.txt").write_text("")
    assert "is no GGUF file" in refusal(tmp_path / "model.txt")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "give a GGUF file or a model folder, or connect" in refusal("someone/something")
    assert "neither a local file or folder nor a model" in refusal("not a valid name!")


def test_a_model_of_the_hub_cache_is_loaded_without_a_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--tiny"
    save_tiny("qwen3", repository / "snapshots" / "0123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123")
    loaded = load_model("someone/tiny", "fp32", "cpu")
    assert loaded.name == "someone/tiny"
    assert loaded.encode_prompt("the")
    assert_close(logits(loaded), eager_logits(tiny_model("qwen3")))


def test_damaged_folders(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "m")
    weights, settings = folder / "model.safetensors", folder / "config.json"
    whole, config = weights.read_bytes(), json.loads(settings.read_text())

    weights.write_bytes(whole[: len(whole) // 2])
    assert "cannot be loaded" in refusal(folder)
    weights.unlink()
    assert "cannot be loaded" in refusal(folder)
    weights.write_bytes(whole)

    settings.write_text(json.dumps({**config, "num_hidden_layers": 4}))
    assert "lacks 9 of the model's weights, such as model.layers.3." in refusal(folder)
    settings.write_text(json.dumps({**config, "intermediate_size": 96}))
    answer = refusal(folder)
    assert "holds model.layers.0.mlp." in answer
    assert "where config.json makes it [" in answer
    settings.write_text(json.dumps({**config, "rms_norm_eps": 0.0}))
    assert "states rms_norm_eps 0.0; it must be a finite" in refusal(folder, UnsupportedModelError)
    settings.write_text(json.dumps({**config, "layer_types": ["linear_attention"] * 3}))
    assert "layer 0" in refusal(folder, UnsupportedModelError)
    settings.write_text("{")
    assert "cannot be loaded" in refusal(folder)
    settings.write_text(json.dumps({"model_type": "unheard_of"}))
    assert "cannot be loaded" in refusal(folder)
