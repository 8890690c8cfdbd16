"""GGUF files on the native decoder: the file's weights as they are, without a dense copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from transformers import AutoModelForCausalLM

from ridgeline.errors import ModelLoadError
from ridgeline.model.files import local_folder
from ridgeline.model.gguf_file import read_gguf
from ridgeline.model.load import load_model
from ridgeline.model.native import ModuleSource, NativeModel
from ridgeline.model.native_gguf import GGUFSource
from ridgeline.model.torch_target import TorchModel
from tests.loading import assert_close, eager_logits, logits
from tests.tiny import tiny_model
from tests.tiny_gguf import write_gguf

pytest.importorskip("ridgeline._native")
WIDE = {"hidden_size": 64, "intermediate_size": 256, "head_dim": 16}
T = GGMLQuantizationType


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [T.F32, T.F16, T.BF16])
def test_unquantised_files_give_the_model_that_was_written(
    family: str, tied: bool, kind: GGMLQuantizationType, tmp_path: Path
) -> None:
    # Biases (qwen2), norms of heads (qwen3), queries and keys whose rows the file permutes (llama).
    model = tiny_model(family, **WIDE, tie_word_embeddings=tied)
    stored = {T.F32: torch.float32, T.F16: torch.float16, T.BF16: torch.bfloat16}[kind]
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.copy_(parameter.to(stored))
    exact = eager_logits(model)
    loaded = load_model(str(write_gguf(model, tmp_path / "m.gguf", kind)))
    assert isinstance(loaded.model, NativeModel)
    assert loaded.model.dtype == torch.float16  # of the cache
    error = (logits(loaded) - exact).abs()
    if kind == T.BF16:  # inputs may be rounded to bf16 too, as transformers rounds everything
        assert error.mean() < 0.6 * (eager_logits(model.bfloat16()) - exact).abs().mean()
    else:
        assert error.max() < 0.05  # of about 15


@pytest.mark.parametrize("kind", [T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0])
def test_quantised_files_stay_near_their_dense_model(
    kind: GGMLQuantizationType, tmp_path: Path, cache: Path
) -> None:
    model = tiny_model("llama", **WIDE)
    path = str(write_gguf(model, tmp_path / "m.gguf", kind))
    loaded = load_model(path)
    assert isinstance(loaded.model, NativeModel)
    assert kind.name in loaded.model.computes
    assert not list(cache.rglob("*.safetensors")), "no dense copy is made"
    dense = load_model(path, "fp32")
    exact, near = (logits(m).log_softmax(-1) for m in (dense, loaded))
    assert (exact.exp() * (exact - near)).sum(-1).mean() < 0.02
    assert_close(logits(load_model(path)), logits(loaded))  # from the kept description


@pytest.mark.parametrize(
    ("kind", "quantize"), [(T.Q8_0, "int4"), (T.BF16, "int8"), (T.F16, "int4")]
)
def test_wider_weights_are_rounded_as_they_are_read(
    kind: GGMLQuantizationType, quantize: str, tmp_path: Path, cache: Path
) -> None:
    path = write_gguf(tiny_model("llama", **WIDE), tmp_path / "m.gguf", kind)
    loaded = load_model(str(path), quantize=quantize)
    bits = int(quantize[3:])
    assert f"at most {bits} bits" in loaded.model.computes
    assert not list(cache.rglob("*.safetensors")), "no dense copy is made"
    folder = local_folder(str(path), torch.float32)
    dense = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    direct = GGUFSource(read_gguf(path), dense.config, bits)
    through = ModuleSource(dense, bits)
    for name in [n for n, m in dense.named_modules() if isinstance(m, torch.nn.Linear)]:
        assert torch.equal(unpacked(direct.matrix(name)), unpacked(through.matrix(name))), name


def unpacked(matrix: Any) -> torch.Tensor:
    values = torch.empty(matrix.outputs, matrix.inputs)
    matrix.unpack(values.data_ptr(), values.numel())
    return values


def test_weights_that_are_narrow_enough_stay_as_they_are(tmp_path: Path) -> None:
    path = str(write_gguf(tiny_model("llama", **WIDE), tmp_path / "m.gguf", T.Q4_1))
    narrow, plain = load_model(path, quantize="int4"), load_model(path)
    assert narrow.model.computes == plain.model.computes
    assert torch.equal(logits(narrow), logits(plain))


def test_other_types_run_on_a_dense_copy(tmp_path: Path) -> None:
    model = tiny_model("llama", **WIDE)
    down = "blk.0.ffn_down.weight"
    weights = model.get_submodule("model.layers.0.mlp.down_proj").weight.numpy()
    raw = {down: (quantize(weights, T.TQ1_0), T.TQ1_0)}
    path = write_gguf(model, tmp_path / "m.gguf", raw=raw)
    loaded = load_model(str(path))
    assert isinstance(loaded.model, NativeModel), "dense, on the decoder"
    assert loaded.model.dtype != torch.float16
    gemma = tiny_model("gemma2", **WIDE, tie_word_embeddings=True, query_pre_attn_scalar=16)
    path = write_gguf(gemma, tmp_path / "g.gguf")
    assert isinstance(load_model(str(path), "fp32").model, TorchModel)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    model = tiny_model("llama", **WIDE)
    state = model.state_dict()
    del state["model.layers.1.mlp.up_proj.weight"]
    model.state_dict = lambda: state  # type: ignore[method-assign]
    path = write_gguf(model, tmp_path / "m.gguf")
    with pytest.raises(ModelLoadError, match=r"holds 0 values for model\.layers\.1\.mlp\.up_proj"):
        load_model(str(path))


def test_numbers_that_cannot_be_are_refused_before_memory_is_touched(tmp_path: Path) -> None:
    model = tiny_model("llama", **WIDE)
    raw = {"blk.0.attn_q.weight": (np.zeros((64, 36), np.uint8), T.Q4_0)}
    good = write_gguf(model, tmp_path / "m.gguf", raw=raw)
    assert isinstance(load_model(str(good)).model, NativeModel)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(good.read_bytes()[:-4096])
    with pytest.raises(ModelLoadError, match="cut short or damaged"):
        load_model(str(cut))


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    # As many values, rows and columns exchanged: found before any of them is read.
    model = tiny_model("llama", **WIDE)
    weights = model.get_input_embeddings().weight.numpy()
    raw = {"token_embd.weight": (np.ascontiguousarray(weights.T), T.F32)}
    path = write_gguf(model, tmp_path / "m.gguf", raw=raw)
    for dtype in ("auto", "fp32"):
        with pytest.raises(ModelLoadError):
            load_model(str(path), dtype)
