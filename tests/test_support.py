"""Which models are refused, by which name and reason, before any weight exists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from ridgeline.errors import UnsupportedModelError
from ridgeline.model.load import load_model
from ridgeline.model.support import check_supported, context_length
from tests.loading import CONTEXT, logits
from tests.tiny import FAMILIES, save_tiny, tiny_model

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def config(model_type: str, **fields: Any) -> PreTrainedConfig:
    made: PreTrainedConfig = AutoConfig.for_model(model_type, **{**SMALL, **fields})
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tested_family_is_supported_and_left_as_it_was(family: str) -> None:
    model = tiny_model(family)
    before = model.config.to_dict()
    check_supported(model.config)
    assert model.config.to_dict() == before
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("model_type", ["gpt2", "phi3", "qwen3_moe", "olmo2", "starcoder2"])
def test_other_decoders_on_the_attention_interface_are_supported(model_type: str) -> None:
    ends = {"pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1}
    check_supported(config(model_type, **ends))


REFUSED = [
    ("qwen3_next", {}, r"layer 0 of this qwen3_next model is of type linear_attention"),
    ("jamba", {}, r"layer 0 of this jamba model is of type linear_attention"),
    ("mamba", {}, r"layer 0 of this mamba model is of type"),
    ("recurrent_gemma", {}, r"layer 0 of this recurrent_gemma model is of type"),
    ("rwkv", {"attention_hidden_size": 32}, r"rwkv\.blocks\.0 \(RwkvBlock\).* carries a state"),
    (
        "lfm2",
        {"layer_types": ["full_attention", "conv"]},
        r"layer 1 of this lfm2 model is of type conv",
    ),
    ("llama4_text", {"layer_types": ["chunked_attention"] * 2}, r"layer 0 .* chunked_attention"),
    ("gpt_oss", {"num_local_experts": 2}, r"model\.layers\.0\.self_attn .* has attention sinks"),
    (
        "gemma3n_text",
        {"num_kv_shared_layers": 1},
        r"the last 1 layers .* keys and values of earlier",
    ),
    ("diffllama", {}, r"layer 0 .* computes attention more than once a pass"),
    ("t5", {}, r"t5 is an encoder-decoder model"),
    ("gemma3", {}, r"gemma3 has parts beside a text decoder \(vision_config\)"),
    ("falcon", {"alibi": True}, r"it knows only attention functions of its own"),
    ("bloom", {}, r"layer 0 of BloomForCausalLM keeps no keys and values"),
    ("mpt", {}, r"MptForCausalLM cannot run"),
    ("bert", {}, r"layer 0 \(BertSelfAttention\) attends to later tokens"),
    ("vit", {}, r"transformers has no causal language model for vit"),
]


@pytest.mark.parametrize(("model_type", "fields", "message"), REFUSED, ids=[r[0] for r in REFUSED])
def test_what_cannot_run_is_refused_by_name(
    model_type: str, fields: dict[str, Any], message: str
) -> None:
    small = SMALL if model_type not in ("gemma3", "t5", "vit", "mpt", "falcon") else {}
    with pytest.raises(UnsupportedModelError, match=message) as refusal:
        check_supported(AutoConfig.for_model(model_type, **{**small, **fields}))
    assert "\n" not in str(refusal.value)


def test_quantised_checkpoints_are_refused() -> None:
    quantised = config("llama", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UnsupportedModelError, match="quantised by gptq"):
        check_supported(quantised)


@pytest.mark.parametrize(
    "fields",
    [
        {"rms_norm_eps": 0.0},
        {"rms_norm_eps": float("inf")},
        {"max_position_embeddings": 0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": -2.0}},
    ],
)
def test_senseless_numbers_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="it must be a finite number above 0"):
        check_supported(config("llama", **fields))
    with pytest.raises(UnsupportedModelError, match="states sliding_window -4"):
        check_supported(config("mistral", sliding_window=-4))


@pytest.mark.parametrize("family", ["mistral", "qwen2_moe"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])  # on the native decoder, on torch
def test_a_window_of_0_is_none(family: str, dtype: str, tmp_path: Path) -> None:
    zero = save_tiny(family, tmp_path / "zero")
    settings = json.loads((zero / "config.json").read_text())
    logits_of = []
    for window in (0, CONTEXT):
        (zero / "config.json").write_text(json.dumps({**settings, "sliding_window": window}))
        logits_of.append(logits(load_model(str(zero), dtype, "cpu")))
    assert torch.equal(*logits_of)


ROPES = [
    ({"rope_type": "default"}, 256),
    ({"rope_type": "linear", "factor": 4.0}, 256),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
    ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}, 256),
    ({"rope_type": "dynamic", "factor": 4.0}, 256),
    (
        {
            "rope_type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 64,
        },
        64,
    ),
    (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        256,
    ),
]


@pytest.mark.parametrize(("rope", "length"), ROPES)
def test_the_context_ends_where_the_frequencies_would_change(
    rope: dict[str, Any], length: int
) -> None:
    scaled = config(
        "llama", max_position_embeddings=256, rope_parameters={"rope_theta": 10000.0, **rope}
    )
    assert context_length(scaled) == length


def test_a_context_that_is_not_stated_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="max_position_embeddings"):
        context_length(config("bloom"))
