"""Loading folders, hub ids and GGUF files, and every way in which that fails."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import _type_traits, dequantize
from huggingface_hub import constants
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from ridgeline.core.batch import Entry, pack
from ridgeline.core.tree import TokenTree
from ridgeline.errors import ConfigError, ModelLoadError, RequestError, UnsupportedModelError
from ridgeline.kv.store import KVStore
from ridgeline.model import device, gguf_convert
from ridgeline.model.fetch import demo_model
from ridgeline.model.gguf_file import read_gguf
from ridgeline.model.load import LoadedModel, load_model
from ridgeline.model.target import Target, layer_shapes
from tests.tiny import BOS, END_OF_TURN, EOS, FAMILIES, VOCAB_SIZE, save_tiny, tiny_model
from tests.tiny_gguf import write_gguf

CONTEXT = 256
PROMPT = torch.from_numpy(np.random.default_rng(1).integers(4, VOCAB_SIZE, 24))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return demo_model()


def logits(loaded: LoadedModel) -> Tensor:
    """f32[24,V] of PROMPT, run as the engine would."""
    store = KVStore(layer_shapes(loaded.module), 4, 16, "cpu")
    tree = TokenTree.plain(PROMPT.numpy())
    rows = np.arange(tree.size)
    return Target(loaded.module, store).forward(pack([Entry(tree, 0, rows, rows)])).logits


def eager_logits(model: PreTrainedModel) -> Tensor:
    return model(input_ids=PROMPT[None], use_cache=False).logits[0]


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).abs().max() < 1e-4  # of logits of about 15


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_gives_the_model_that_was_saved(family: str, tmp_path: Path) -> None:
    loaded = load_model(str(save_tiny(family, tmp_path / family)), "fp32", "cpu")
    assert_close(logits(loaded), eager_logits(tiny_model(family)))
    assert loaded.name == family
    assert loaded.end_tokens == {EOS, END_OF_TURN}  # the generation config's two
    assert loaded.context_len == CONTEXT
    assert loaded.vocab_size == VOCAB_SIZE
    assert not loaded.module.training
    assert not any(parameter.requires_grad for parameter in loaded.module.parameters())


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
    assert loaded.module.dtype == torch.bfloat16
    assert layer_shapes(loaded.module)[0].dtype == torch.bfloat16


def test_models_of_one_process_keep_their_own_attention_and_configuration(tmp_path: Path) -> None:
    # Faults 24: transformers' own model of a configuration beside two of ours.
    folder = str(save_tiny("mistral", tmp_path / "m"))
    stock = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    first = load_model(folder, "fp32", "cpu")
    save_tiny("mistral", tmp_path / "w", sliding_window=4)
    second = load_model(str(tmp_path / "w"), "bf16", "cpu")
    assert stock.config._attn_implementation == "eager"
    for loaded, window in ((first, 8), (second, 4)):
        assert loaded.module.config._attn_implementation == "ridgeline"
        assert loaded.module.config.sliding_window == window
    assert first.module.dtype == torch.float32
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
    for name in ("int8", torch.int8):
        with pytest.raises(ConfigError, match="must be auto, bf16, fp16 or fp32"):
            device.choose_dtype(name, cpu)
    for name in ("gpu", "cuda:x"):
        with pytest.raises(ConfigError, match="must be auto, cpu, cuda or cuda:N"):
            device.choose_device(name)
    with pytest.raises(ConfigError, match="CUDA devices here; use cpu"):
        device.choose_device("cuda:99")


def refusal(path: str | Path, kind: type[Exception] = ModelLoadError) -> str:
    """The one line that loading `path` ends in."""
    with pytest.raises(kind) as error:
        load_model(str(path), "fp32", "cpu")
    message = str(error.value)
    assert "\n" not in message
    return message


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
    settings.write_text(json.dumps({**config, "hidden_size": 96}))
    assert "cannot be loaded" in refusal(folder)
    settings.write_text(json.dumps({**config, "layer_types": ["linear_attention"] * 3}))
    assert "layer 0" in refusal(folder, UnsupportedModelError)
    settings.write_text("{")
    assert "cannot be loaded" in refusal(folder)
    settings.write_text(json.dumps({"model_type": "unheard_of"}))
    assert "cannot be loaded" in refusal(folder)


# GGUF

WIDE = {"hidden_size": 64, "intermediate_size": 256, "head_dim": 16}  # whole quantisation blocks


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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return write_gguf(tiny_model("llama", **WIDE), path).read_bytes()


def test_a_truncated_gguf_is_named_wherever_it_ends(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    for length in (0, 3, 4, 10, 23, 30, 100, 1000, 5000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert str(path) in refusal(path)
    assert "the file is cut short or damaged; download it again" in refusal(path)


def patched(whole: bytes, at: int, format: str, *values: int) -> bytes:
    raw = struct.pack(format, *values)
    return whole[:at] + raw + whole[at + len(raw) :]


def after(whole: bytes, text: bytes, shift: int = 0) -> int:
    return whole.index(text) + len(text) + shift


HOSTILE: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("magic", lambda w: patched(w, 0, "<I", 0), "does not begin with the letters GGUF"),
    ("version", lambda w: patched(w, 4, "<I", 9), "version 9"),
    ("tensors", lambda w: patched(w, 8, "<Q", 1 << 60), "more than"),
    ("entries", lambda w: patched(w, 16, "<Q", 1 << 60), "more than"),
    ("key length", lambda w: patched(w, 24, "<Q", 1 << 62), "inside its header"),
    ("value type", lambda w: patched(w, after(w, b"llama.vocab_size"), "<I", 77), "type 77"),
    (
        "array length",
        lambda w: patched(w, after(w, b"tokenizer.ggml.tokens", 8), "<Q", 1 << 40),
        "does not fit",
    ),
    (
        "array of arrays",
        lambda w: patched(w, after(w, b"tokenizer.ggml.tokens", 4), "<I", 9),
        "an array holds values of type 9",
    ),
    (
        "layers",
        lambda w: patched(w, after(w, b"llama.block_count", 4), "<I", 1 << 31),
        "block_count exceeds",
    ),
    (
        "heads",
        lambda w: patched(w, after(w, b"llama.attention.head_count", 4), "<I", 0),
        "describes no usable model",
    ),
    (
        "width",
        lambda w: patched(w, after(w, b"llama.feed_forward_length", 4), "<I", 1 << 31),
        "incomplete or damaged",
    ),
    (
        "dimensions",
        lambda w: patched(w, after(w, b"blk.0.ffn_up.weight"), "<I", 1 << 30),
        "has 1073741824 dimensions",
    ),
    (
        "shape",
        lambda w: patched(w, after(w, b"blk.0.ffn_up.weight", 4), "<QQ", 1 << 62, 1 << 62),
        "the file is cut short",
    ),
    (
        "kind",
        lambda w: patched(w, after(w, b"blk.0.ffn_up.weight", 20), "<I", 999),
        "unknown type 999",
    ),
    (
        "integers",
        lambda w: patched(w, after(w, b"blk.0.ffn_up.weight", 20), "<I", 26),
        "as I32, which the installed gguf package cannot unpack",
    ),
    (
        "offset",
        lambda w: patched(w, after(w, b"blk.0.ffn_up.weight", 24), "<Q", 1 << 50),
        "the file is cut short",
    ),
    (
        "name",
        lambda w: w.replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_xx.weight"),
        "has no place for",
    ),
    (
        "duplicate",
        lambda w: w.replace(b"blk.0.ffn_up.weight", b"blk.1.ffn_up.weight"),
        "occurs twice",
    ),
    ("family", lambda w: w.replace(b"llama", b"lorem"), "cannot read from GGUF"),
    (
        "token",
        lambda w: patched(w, after(w, b"tokenizer.ggml.eos_token_id", 4), "<I", 1 << 31),
        "describes no usable tokenizer",
    ),
]


@pytest.mark.parametrize(
    ("change", "message"), [h[1:] for h in HOSTILE], ids=[h[0] for h in HOSTILE]
)
def test_a_hostile_gguf_is_refused(
    change: Callable[[bytes], bytes], message: str, whole: bytes, tmp_path: Path, cache: Path
) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(change(whole))
    answer = refusal(path)
    assert message in answer
    assert str(path) in answer
    assert not list(cache.rglob("*.safetensors"))


def test_random_damage_to_the_header_never_gets_past_our_errors(
    whole: bytes, tmp_path: Path
) -> None:
    header = after(whole, b"output_norm.weight") + 24
    path = tmp_path / "damaged.gguf"
    refused = 0
    for seed in range(60):
        rng = random.Random(seed)
        damaged = bytearray(whole)
        for _ in range(rng.choice([1, 4])):
            damaged[rng.randrange(header)] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            header_read = read_gguf(path)
            config = gguf_convert.gguf_config(header_read)
            gguf_convert.WeightPlan(header_read, config, torch.float32)
        except ModelLoadError:
            refused += 1
    assert refused > 10


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
