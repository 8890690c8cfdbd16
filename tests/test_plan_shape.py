"""What a plan reads off a configuration or a header, against sums made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from ridgeline.errors import RidgelineError
from ridgeline.model.gguf_file import read_gguf
from ridgeline.plan.shape import EMBEDDING, EXPERTS, HEAD, LAYERS, ModelShape, read_shape
from tests.plan_models import DEEPSEEK_V3, LLAMA_3_70B, QWEN_2_5_7B, write_config
from tests.tiny import VOCAB_SIZE, save_tiny, tiny_model
from tests.tiny_gguf import write_gguf


def shape_of(config: dict[str, Any], folder: Path) -> ModelShape:
    return read_shape(write_config(config, folder))


def weights(shape: ModelShape, role: str, matrices: bool = True) -> int:
    return sum(p.weights for p in shape.parts if p.role == role and p.matrices == matrices)


def test_llama_3_70b(tmp_path: Path) -> None:
    shape = shape_of(LLAMA_3_70B, tmp_path)
    layer = 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672
    assert layer == 855_638_016
    assert weights(shape, LAYERS) == 80 * layer
    assert weights(shape, LAYERS, matrices=False) == (2 * 80 + 1) * 8192
    assert weights(shape, HEAD) == weights(shape, EMBEDDING) == 128256 * 8192
    assert shape.parameters == shape.active == 70_553_706_496
    assert shape.nbytes == 2 * 70_553_706_496  # 141 GB
    assert shape.kv_per_token == 80 * 2 * 8 * 128 * 2 == 327_680
    assert (shape.layers, shape.hidden, shape.vocabulary) == (80, 8192, 128256)


def test_qwen_2_5_7b(tmp_path: Path) -> None:
    shape = shape_of(QWEN_2_5_7B, tmp_path)
    layer = 2 * 3584**2 + 2 * 3584 * 512 + 3 * 3584 * 18944
    assert layer == 233_046_016
    biases, norms = 3584 + 2 * 512, 2 * 3584
    assert weights(shape, LAYERS) == 28 * layer
    assert weights(shape, LAYERS, matrices=False) == 28 * (biases + norms) + 3584
    assert shape.parameters == 7_615_616_512
    assert shape.kv_per_token == 28 * 2 * 4 * 128 * 2 == 57_344
    assert {layer.window for layer in shape.attention} == {None}  # use_sliding_window is false


def test_deepseek_v3(tmp_path: Path) -> None:
    """671 B weights of which 37 B take part, a latent of 576 numbers a layer: arXiv 2412.19437."""
    shape = shape_of(DEEPSEEK_V3, tmp_path)
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    expert, dense = 3 * 7168 * 2048, 3 * 7168 * 18432
    assert (attention, expert, dense) == (187_105_280, 44_040_192, 396_361_728)
    assert weights(shape, EXPERTS) == 58 * 256 * expert
    assert weights(shape, LAYERS) == 61 * attention + 3 * dense + 58 * (expert + 256 * 7168)
    assert shape.parameters == 671_026_404_352
    assert shape.active == shape.parameters - 58 * 248 * expert == 37_552_282_624
    assert shape.kv_per_token == 61 * (512 + 64) * 2 == 70_272
    assert {(a.queries, a.kept, a.key, a.value) for a in shape.attention} == {(128, 576, 576, 512)}
    assert shape.modules == 1
    (experts,) = (part for part in shape.parts if part.role == EXPERTS)
    assert (experts.used, experts.of, experts.kind) == (8, 256, "fp8")
    assert experts.widths == 58 * (7168 + 4096 + 2048 + 7168)  # gate and up in one, and down
    head = next(part for part in shape.parts if part.role == HEAD)
    assert head.kind == "bf16"


def test_number_formats(tmp_path: Path) -> None:
    shape = shape_of(LLAMA_3_70B, tmp_path)
    table, vectors = 128256 * 8192, 161 * 8192
    matrices = 80 * 855_638_016 + table
    assert shape.in_format("fp32").nbytes == 4 * shape.parameters
    assert shape.in_format("fp32").kv_per_token == 2 * shape.kv_per_token
    assert shape.in_format("fp8").nbytes == matrices + 2 * (table + vectors)
    four = shape.in_format("int4")
    assert four.nbytes == matrices * 4.5 / 8 + 2 * (table + vectors)
    assert four.kv_per_token == shape.kv_per_token
    assert four.kinds == {"int4": matrices}
    assert four.in_format("int8") == four, "what has fewer bits is left"


def test_a_tied_head_is_stored_once(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path, tie_word_embeddings=True)
    tied = read_shape(str(folder))
    assert tied.tied
    assert tied.parameters == sum(p.numel() for p in tiny_model("llama").parameters()) - (
        VOCAB_SIZE * 48
    )
    assert weights(tied, HEAD) == VOCAB_SIZE * 48


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "deepseek_v3", "qwen3_moe"])
def test_all_weights_are_counted(family: str, tmp_path: Path) -> None:
    shape = read_shape(str(save_tiny(family, tmp_path)))
    assert shape.parameters == sum(p.numel() for p in tiny_model(family).parameters())
    assert set(shape.kinds) == {"fp32"}
    assert (shape.active < shape.parameters) == any(p.role == EXPERTS for p in shape.parts)


def test_windows(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    every = read_shape(str(save_tiny("mistral", tmp_path / "all"))).attention
    assert [layer.window for layer in every] == [8, 8, 8]
    some = read_shape(str(save_tiny("gemma3", tmp_path / "some"))).attention
    assert [layer.window for layer in some] == [8, None, 8, None]
    assert [layer.seen(100) for layer in some] == [8, 100, 8, 100]
    assert some[0].seen(5) == 5


def test_a_header_is_enough(tmp_path: Path) -> None:
    model = tiny_model("llama", hidden_size=256, intermediate_size=512, head_dim=64)
    file = write_gguf(model, tmp_path / "tiny.gguf", GGMLQuantizationType.Q4_1)
    whole = read_shape(str(file))
    stored = read_gguf(file).tensors.values()
    assert whole.nbytes == sum(tensor.nbytes for tensor in stored)
    assert whole.parameters == sum(p.numel() for p in model.parameters())
    assert whole.name == "tiny"
    assert whole.kv_per_token == 3 * 2 * 2 * 64 * 2
    assert set(whole.kinds) >= {"Q4_1"}
    assert next(p.bits for p in whole.parts if p.kind == "Q4_1") == 5
    beginning = tmp_path / "beginning" / "tiny.gguf"
    beginning.parent.mkdir()
    beginning.write_bytes(file.read_bytes()[: -sum(tensor.nbytes for tensor in stored)])
    assert read_shape(str(beginning)) == whole
    with pytest.raises(RidgelineError, match="cut short"):
        read_gguf(beginning)


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "qwen3_moe"])
def test_a_header_says_what_a_configuration_says(family: str, tmp_path: Path) -> None:
    """All but the order of parts: weights by role, experts, and what is kept of a token."""
    header = read_shape(str(write_gguf(tiny_model(family), tmp_path / "tiny.gguf")))
    config = read_shape(str(save_tiny(family, tmp_path / "folder")))
    assert header.parameters == config.parameters
    assert header.active == config.active
    assert header.tied == config.tied
    for role in (EMBEDDING, LAYERS, EXPERTS, HEAD):
        assert weights(header, role) == weights(config, role)
    assert [(p.used, p.of) for p in header.parts if p.role == EXPERTS] == [
        (p.used, p.of) for p in config.parts if p.role == EXPERTS
    ]
    assert header.attention == config.attention


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**9}, "1000 are the most here"),
        ({"model_type": None}, "states no model_type"),
        ({"model_type": "nonsense"}, "nonsense"),
        ({"hidden_size": -1}, "not a multiple"),
        ({"num_attention_heads": 0}, "states 0 num_attention_heads"),
        ({"num_key_value_heads": 7}, "states 64 num_attention_heads and 7 num_key_value_heads"),
        ({"num_hidden_layers": None}, "states no num_hidden_layers; a model's config"),
        ({"hidden_size": None}, "states no hidden_size"),
        ({"vocab_size": None}, "states no vocab_size"),
        ({"model_type": "gpt2", "num_hidden_layers": None}, "states no n_layer"),
        ({"torch_dtype": "float64"}, "float64, which is not planned for; its dtype must be one of"),
        ({"torch_dtype": "nonsense"}, "nonsense"),
        ({"model_type": "t5"}, "an encoder-decoder model"),
        ({"model_type": "gemma3"}, r"parts beside a text decoder \(vision_config\)"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised by awq"),
    ],
)
def test_configurations_that_make_no_sense(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = {key: value for key, value in (LLAMA_3_70B | change).items() if value is not None}
    with pytest.raises(RidgelineError, match=message) as caught:
        shape_of(config, tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "[1", json.dumps("llama")])
def test_files_that_are_no_configuration(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(RidgelineError, match=r"no model's config\.json|no model_type"):
        read_shape(str(file))
