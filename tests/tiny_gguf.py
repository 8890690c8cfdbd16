"""Writing tiny models as GGUF files, the way llama.cpp's converter does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from numpy.typing import NDArray
from transformers import PreTrainedModel
from transformers.integrations import GGUF_CONFIG_MAPPING

from tests.tiny import BOS, CHAT_TEMPLATE, END_OF_TURN, EOS, MERGES, PAD, SPECIAL, tiny_tokenizer

WIDE = {"hidden_size": 64, "intermediate_size": 256, "head_dim": 16}  # whole quantisation blocks
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "qwen3_moe": "qwen3moe",
}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    raw: dict[str, tuple[NDArray[np.uint8], GGMLQuantizationType]] | None = None,
    vectors: dict[str, NDArray[np.float32]] | None = None,
) -> Path:
    """Write `model` and the tiny tokenizer; matrices as `kind`, vectors as F32.

    `metadata` adds entries (their type is guessed from the value); `raw` replaces tensors of the
    file by stored bytes; `vectors` adds F32 ones.
    """
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = GGUFWriter(path, architecture)
    known = GGUF_CONFIG_MAPPING[architecture.replace("moe", "_moe")]
    stated = {key: getattr(config, name, None) for key, name in known.items() if name}
    rope = config.rope_parameters.get("full_attention") or config.rope_parameters
    stated |= {"rope.freq_base": rope["rope_theta"], "attention.key_length": config.head_dim}
    if architecture == "gemma2":
        stated["attn_logit_softcapping"] = config.attn_logit_softcapping
        stated["final_logit_softcapping"] = config.final_logit_softcapping
    if architecture == "qwen3moe":
        stated["expert_feed_forward_length"] = config.moe_intermediate_size
    entries = {f"{architecture}.{key}": value for key, value in stated.items() if value is not None}
    for key, value in {**entries, **_TOKENIZER, **(metadata or {})}.items():
        _add(writer, key, value)
    for name, values in (_tensors(model, architecture) | (vectors or {})).items():
        if raw and name in raw:
            writer.add_tensor(name, raw[name][0], raw_dtype=raw[name][1])
        elif values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _vocabulary() -> list[str]:
    vocabulary = tiny_tokenizer().get_vocab()
    return sorted(vocabulary, key=vocabulary.__getitem__)


_TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": _vocabulary(),
    "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(_vocabulary()) - len(SPECIAL)),
    "tokenizer.ggml.merges": [" ".join(merge) for merge in MERGES],
    "tokenizer.ggml.bos_token_id": BOS,
    "tokenizer.ggml.eos_token_id": EOS,
    "tokenizer.ggml.eot_token_id": END_OF_TURN,
    "tokenizer.ggml.padding_token_id": PAD,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": CHAT_TEMPLATE,
}


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    add[type(value)](key, value)


def _tensors(model: PreTrainedModel, architecture: str) -> dict[str, NDArray[np.float32]]:
    """The weights under GGUF's names, rearranged as the converter leaves them."""
    tensors = {}
    for name, weight in model.state_dict().items():
        if name in model.all_tied_weights_keys and model.config.tie_word_embeddings:
            continue
        values = weight.numpy()
        block = re.match(r"model\.layers\.(\d+)\.(.+)", name)
        prefix, rest = (f"blk.{block[1]}.", block[2]) if block else ("", name)
        if rest.startswith("mlp.experts."):
            if rest.endswith("down_proj"):
                tensors[f"{prefix}ffn_down_exps.weight"] = values
            else:
                gate, up = np.split(values, 2, axis=1)
                tensors[f"{prefix}ffn_gate_exps.weight"] = np.ascontiguousarray(gate)
                tensors[f"{prefix}ffn_up_exps.weight"] = np.ascontiguousarray(up)
            continue
        stem, suffix = rest.rsplit(".", 1)
        if stem == "post_attention_layernorm":  # the norm before the MLP, but for gemma
            stem = "post_attention_norm" if architecture.startswith("gemma") else "ffn_norm"
        gguf_name = f"{prefix}{_NAMES.get(stem, stem)}.{suffix}"
        if architecture.startswith("gemma") and gguf_name.endswith("norm.weight"):
            values = values + 1
        if architecture == "llama" and gguf_name.endswith(("q.weight", "k.weight")):
            # From halves to neighbouring pairs: how ggml rotates.
            pairs = values.reshape(-1, 2, model.config.head_dim // 2, values.shape[-1])
            values = np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))
        tensors[gguf_name] = values
    return tensors
