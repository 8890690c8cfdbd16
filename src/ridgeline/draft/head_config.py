"""What a draft head's config.json says of its layer, and of how its drafts are to be accepted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ridgeline.draft.head_files import HeadFiles
from ridgeline.errors import ModelLoadError, RidgelineError, UnsupportedModelError, reason

_REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads")
_HEADS = ("num_key_value_heads", "head_dim")
"""Where one of these is null or missing, it follows from the others."""
_LONGEST = "max_position_embeddings"
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
_MOST = {_LONGEST: 2**31 - 1}
_WIDEST = 2**20
"""Far beyond any layer, and small enough that no product of two sizes overflows."""
_LOSSLESS = {"verifier_accept_k": 1, "accept_tolerance": 0}
"""What a speculators folder may say of a verification that emits the target's own tokens."""


def layer_config(files: HeadFiles, biased: bool) -> LlamaConfig:
    """The layer's configuration, which a speculators folder nests.

    Args:
        files: the head.
        biased: whether queries, keys and values have biases.

    Raises:
        ModelLoadError: a field is missing or makes no sense.
        UnsupportedModelError: another activation than SiLU, or unknown rotary positions.
    """
    stated = files.config.get("transformer_layer_config", files.config)
    place = f"{files.path}/config.json"
    if not isinstance(stated, dict):
        raise ModelLoadError(f"{place}: transformer_layer_config is no object")
    fields = _sizes(stated, place)
    if "rms_norm_eps" in stated:
        fields["rms_norm_eps"] = _eps(stated["rms_norm_eps"], place)
    if (activation := stated.get("hidden_act", "silu")) != "silu":
        raise UnsupportedModelError(f"{place}: hidden_act is {activation!r:.80}; it must be 'silu'")
    rope = {name: stated[name] for name in _ROPE if stated.get(name) is not None}
    _check_rope_type(rope, place)
    try:
        config = LlamaConfig(**fields, **rope, attention_bias=biased)
        frequencies = LlamaRotaryEmbedding(config).inv_freq
        if not bool(torch.isfinite(frequencies).all()):
            raise ModelLoadError(f"{place}: {' and '.join(rope)} give no finite frequencies")
    except RidgelineError:
        raise
    except Exception as error:  # whatever transformers makes of the values
        raise ModelLoadError(f"{place}: {reason(error)}") from error
    if 2 * len(frequencies) != config.head_dim:
        raise UnsupportedModelError(f"{place}: rotary positions of a part of each head")
    return config


def check_lossless(files: HeadFiles) -> None:
    """Refuses a speculators folder that asks for a verification that would change the text.

    Raises:
        UnsupportedModelError: it does.
    """
    speculation = files.config.get("speculators_config")
    proposals = speculation.get("proposal_methods") if isinstance(speculation, dict) else None
    for proposal in proposals if isinstance(proposals, list) else []:
        for name, lossless in _LOSSLESS.items():
            value = proposal.get(name, lossless) if isinstance(proposal, dict) else lossless
            if value != lossless:
                raise UnsupportedModelError(
                    f"{files.path}/config.json: {name} is {value!r:.80}, which would change the "
                    f"text; only {lossless} runs here"
                )


def _sizes(stated: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The fields that are whole numbers."""
    fields = {}
    for name in (*_REQUIRED, *_HEADS, _LONGEST):
        value, most = stated.get(name), _MOST.get(name, _WIDEST)
        if (value is None and name in _HEADS) or (name == _LONGEST and name not in stated):
            continue
        if name not in stated:
            raise ModelLoadError(f"{place} lacks {name}")
        if type(value) is not int or not 1 <= value <= most:
            raise ModelLoadError(
                f"{place}: {name} is {value!r:.80}; it must be a whole number from 1 to {most}"
            )
        fields[name] = value
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    if hidden % heads:  # transformers refuses it even where head_dim is given
        raise ModelLoadError(f"{place}: hidden_size {hidden} is no multiple of {heads} heads")
    kv_heads = fields.get("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelLoadError(
            f"{place}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        )
    if heads * fields.get("head_dim", 1) > _WIDEST:
        raise ModelLoadError(
            f"{place}: {heads} heads of {fields['head_dim']} are wider than {_WIDEST}"
        )
    return fields


def _eps(value: Any, place: str) -> float:
    if type(value) not in (int, float) or not (math.isfinite(value) and 0 < value <= 1):
        raise ModelLoadError(
            f"{place}: rms_norm_eps is {value!r:.80}; it must be a small number above 0"
        )
    return float(value)


def _check_rope_type(rope: Mapping[str, Any], place: str) -> None:
    """Raises for a type that transformers would only warn of."""
    known = ("default", *ROPE_INIT_FUNCTIONS)
    for name in ("rope_scaling", "rope_parameters"):
        value = rope.get(name, {})
        if not isinstance(value, dict):
            raise ModelLoadError(f"{place}: {name} is {value!r:.80}; it must be an object or null")
        kind = value.get("rope_type", value.get("type", "default"))
        if kind not in known:
            raise UnsupportedModelError(
                f"{place}: {name} is of type {kind!r:.80}; known are {', '.join(known)}"
            )
