"""Tiny random models of every family the tests run: built in seconds, fp32, the same for a seed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

BOS, EOS, PAD, END_OF_TURN = 0, 1, 2, 3
SPECIAL = ("<bos>", "<eos>", "<pad>", "<turn>")  # the ids above, in order
MERGES = ("th", "in", "er", "an", "re", "on", "st", "en", "at", "or", "es", "ou")
VOCAB_SIZE = len(SPECIAL) + 256 + len(MERGES)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<turn>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
}
# What each family adds to or changes of the common part.
_LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 8,  # of the rotary part
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
}
_FAMILY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "gemma2": (
        "gemma2",
        {
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "query_pre_attn_scalar": 12,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "deepseek_v3": ("deepseek_v3", {**_LATENT, "first_k_dense_replace": 1}),
    "glm4_moe_lite": ("glm4_moe_lite", _LATENT),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            "layer_types": ["full_attention"] * 3,  # others carry a state
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
}
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "deepseek_v3")
"""Those that every test of whole models runs."""


def tiny_model(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random fp32 model of `family` in eval mode, with transformers' own eager attention.

    `overrides` replace fields of the configuration. The same arguments give the same weights.
    """
    model_type, changes = _FAMILY[family]
    fields = copy.deepcopy({**_COMMON, **changes, **overrides})
    config = AutoConfig.for_model(model_type, **fields)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
        )
        torch.manual_seed(seed)
        _randomise(model)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def _randomise(model: PreTrainedModel) -> None:
    """Weights large enough that attention is sharp and logits of a few units differ by prefix."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.add_(0.1 * torch.randn_like(parameter))  # around 1, or 0 where gemma adds 1
        elif "embed_tokens" in name:
            parameter.normal_()
        elif parameter.dim() == 1:
            parameter.normal_(std=0.2)
        else:
            gain = 4.0 if "lm_head" in name else 1.5
            parameter.normal_(std=gain / parameter.shape[-1] ** 0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.1)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `VOCAB_SIZE` tokens that round-trips every text.

    Ids: the special tokens, byte b at `len(SPECIAL) + b`, then the merges in order. As in GPT-2,
    nothing is added to a plain text; the chat template starts with the BOS token.
    """
    symbols = [*SPECIAL, *_byte_symbols(), *MERGES]
    tokenizer = Tokenizer(
        BPE(
            vocab={symbol: index for index, symbol in enumerate(symbols)},
            merges=[(merge[0], merge[1]) for merge in MERGES],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL[BOS],
        eos_token=SPECIAL[EOS],
        pad_token=SPECIAL[PAD],
        additional_special_tokens=[SPECIAL[END_OF_TURN]],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def _byte_symbols() -> list[str]:
    """The printable character that byte-level BPE writes for each byte 0..255."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (chr(0x100 + i) for i in range(256 - len(printable)))
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]


def save_tiny(family: str, folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """Write `tiny_model(family, ...)` as a transformers folder, tokenizer and two end tokens."""
    model = tiny_model(family, seed, **overrides)
    model.generation_config = GenerationConfig(
        bos_token_id=BOS, eos_token_id=[EOS, END_OF_TURN], pad_token_id=PAD
    )
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
