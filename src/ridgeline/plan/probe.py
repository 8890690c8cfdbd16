"""Models of random weights, to be timed: what the engine would run, at sizes of our choice."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from ridgeline.attention.interface import ATTENTION
from ridgeline.errors import ConfigError
from ridgeline.model.linear import native_kernels, native_module, pack, pack_linears
from ridgeline.model.native import NativeModel
from ridgeline.model.target import Model
from ridgeline.model.torch_target import TorchModel

DENSE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDED = {"int8": 8, "int4": 4}
_MODERATE = (0x20, 0x30)
"""Bytes of which every two are an fp16 number of 0.008 to 0.13: fit for scales and for integers."""


def native_kinds() -> set[str]:
    """Number formats of matrices that the native decoder computes with."""
    if native_kernels() is None:
        return set()
    known = native_module().packs_gguf
    packed = {kind.name for kind in GGMLQuantizationType if known(int(kind))}
    return {"fp32", "bf16", *ROUNDED} | packed


def probe_config(hidden: int, intermediate: int, layers: int, vocabulary: int) -> LlamaConfig:
    """A Llama of such sizes, with heads of dimension 64, four to a key."""
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(hidden // 256, 1),
        vocab_size=vocabulary,
        max_position_embeddings=1 << 17,
        tie_word_embeddings=False,
    )


def probe(config: LlamaConfig, kind: str, device: torch.device, native: bool) -> Model:
    """A model of random weights, on the native decoder or on transformers' layers.

    Raises:
        ConfigError: that path has no such weights.
    """
    if native:
        return NativeModel(config, RandomSource(config, kind), torch.float16)
    if kind not in DENSE:
        raise ConfigError(f"transformers' layers do not run with {kind} weights; use bf16 or fp32")
    with device:
        module = AutoModelForCausalLM.from_config(
            config, dtype=DENSE[kind], attn_implementation=ATTENTION
        )
    module.eval().requires_grad_(False)
    pack_linears(module)
    return TorchModel(module)


class RandomSource:
    """A `WeightSource` that makes its weights up."""

    def __init__(self, config: LlamaConfig, kind: str) -> None:
        self._kind = kind
        self._random = np.random.default_rng(0)
        hidden, inner = config.hidden_size, config.intermediate_size
        keys = config.num_key_value_heads * config.head_dim
        self._sizes = {
            **dict.fromkeys(("q_proj", "o_proj"), (hidden, hidden)),
            **dict.fromkeys(("k_proj", "v_proj"), (keys, hidden)),
            **dict.fromkeys(("gate_proj", "up_proj"), (inner, hidden)),
            "down_proj": (hidden, inner),
            "lm_head": (config.vocab_size, hidden),
        }
        self._hidden = hidden
        self.computes = kind
        self.embedding_bytes = 0

    def matrix(self, name: str) -> Any:
        """A packed matrix."""
        outputs, inputs = self._sizes[name.rpartition(".")[2]]
        if self._kind in DENSE or self._kind in ROUNDED:
            dtype = DENSE.get(self._kind, torch.bfloat16)
            linear = nn.Linear(inputs, outputs, bias=False, dtype=dtype, device="cpu")
            return pack(linear, ROUNDED.get(self._kind))
        kind = GGMLQuantizationType[self._kind]
        block, nbytes = GGML_QUANT_SIZES[kind]
        stored = self._random.integers(
            *_MODERATE, outputs * inputs // block * nbytes, dtype=np.uint8
        )
        return native_module().from_gguf(
            type=int(kind),
            blocks=stored,
            rows=np.arange(outputs, dtype=np.int32),
            bias=np.empty(0, np.float32),
            inputs=inputs,
        )

    def vector(self, name: str) -> NDArray[np.float32]:
        """Ones for a norm of the hidden states; the heads have none."""
        heads = name.endswith(("q_norm", "k_norm"))
        return np.ones(0 if heads else self._hidden, np.float32)

    def embed(self, tokens: Tensor) -> Tensor:
        """f32[T,H] for ids i64[T]."""
        return torch.ones(len(tokens), self._hidden, dtype=torch.float32, device="cpu")
