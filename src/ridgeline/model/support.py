"""Which models run here, and how far: decided before any weight is read.

A model runs if every layer keeps its past as keys and values handed to the registered attention
function once a pass: that is what a paged cache can hold, share, roll back and mask as a tree.
Some of it the configuration and the class say. The rest shows in a rehearsal: the model's own
forward pass over tensors without memory (device "meta").
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from ridgeline.attention.interface import ATTENTION
from ridgeline.errors import UnsupportedModelError, reason
from ridgeline.model.torch_target import layer_shapes

_ATTENTION_TYPES = ("full_attention", "sliding_attention")
_OTHER_CONFIGS = {"text_config", "attn_config", "ffn_config"}  # sub-configurations of a decoder
_POSITIVE = (
    *("max_position_embeddings", "sliding_window", "vocab_size", "head_dim"),
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
)
_RECURRENT = re.compile(r"mamba|rwkv|recurrent|xlstm|delta|linearattention|ssm|mixer", re.I)


def check_supported(config: PreTrainedConfig) -> int:
    """Hold the model against what can run here; returns the number of its weights' elements.

    Costs a fraction of a second and no memory to speak of.

    Raises:
        UnsupportedModelError: it cannot run; the message names the layer and the reason.
    """
    check_decoder(config)
    if quantisation := getattr(config, "quantization_config", None):
        method = dict(quantisation).get("quant_method", "an unknown method")
        raise UnsupportedModelError(
            f"the weights of this {config.model_type} model are quantised by {method}, which is "
            "not implemented; use the unquantised model or a GGUF file"
        )
    module = outline(config)
    with torch.device("meta"):
        _check_modules(module)
        # Where an operation needs values, such as the choice of experts, what comes before it ran,
        # and the engine asks for the shapes again once there are weights.
        with suppress(RuntimeError, NotImplementedError):
            layer_shapes(module)
        return sum(parameter.numel() for parameter in module.parameters())


def check_decoder(config: PreTrainedConfig) -> None:
    """What can be told from the configuration alone, however the weights are stored.

    Raises:
        UnsupportedModelError: it is no causal decoder of text whose every layer keeps its own keys
            and values.
    """
    name = config.model_type
    if config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder model; only causal decoders can be run"
        )
    if parts := set(config.sub_configs) - _OTHER_CONFIGS:
        raise UnsupportedModelError(
            f"{name} has parts beside a text decoder ({', '.join(sorted(parts))}), which are not "
            "implemented; use a text-only model"
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(f"transformers has no causal language model for {name}")
    for index, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in _ATTENTION_TYPES:
            raise UnsupportedModelError(
                f"layer {index} of this {name} model is of type {kind}; only full and "
                "sliding-window attention can be kept in pages and rolled back"
            )
    if shared := getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModelError(
            f"the last {shared} layers of this {name} model reuse the keys and values of earlier "
            "ones, which is not implemented"
        )


def outline(config: PreTrainedConfig) -> PreTrainedModel:
    """The model without memory for its weights, on the device "meta", with our attention.

    Raises:
        UnsupportedModelError: it cannot be built, or a number of its configuration makes no sense.
    """
    _check_numbers(config)
    with torch.device("meta"):
        return _build(copy.deepcopy(config))


def context_length(config: PreTrainedConfig) -> int:
    """The most tokens of one sequence: what transformers' configuration states.

    Yarn's factor counts where the configuration leaves it out of `max_position_embeddings`. The
    frequencies of "dynamic" and "longrope" scaling change with the longest sequence of the batch,
    so that a neighbour would change a request's logits; up to the original length they are
    constant, and there the context ends.

    Raises UnsupportedModelError when no length is stated.
    """
    length: int | None = getattr(config, "max_position_embeddings", None)
    if length is None:
        raise UnsupportedModelError(
            f"this {config.model_type} model states no max_position_embeddings"
        )
    for rope in _rope_parameters(config):
        kind = rope.get("rope_type", "default")
        original = rope.get("original_max_position_embeddings") or length
        if kind in ("dynamic", "longrope"):
            length = min(length, original)
        elif kind == "yarn":
            length = max(length, int(original * (rope.get("factor") or 1)))
    return length


def _build(config: PreTrainedConfig) -> PreTrainedModel:
    """The model with our attention, on the present device."""
    try:
        module: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation=ATTENTION, experts_implementation="batched_mm"
        )
    except Exception as error:  # whatever a class makes of its configuration
        why = f"{type(error).__name__}: {reason(error)}"
        if isinstance(error, KeyError) and error.args == (ATTENTION,):
            why = "it knows only attention functions of its own"
        raise UnsupportedModelError(
            f"this {config.model_type} model cannot be built: {why}"
        ) from error
    return module


def _check_numbers(config: PreTrainedConfig) -> None:
    """Refuse values that transformers takes and that make every logit senseless."""
    stated = {name: getattr(config, name, None) for name in _POSITIVE}
    for rope in _rope_parameters(config):
        stated |= {f"rotary {name}": rope.get(name) for name in ("rope_theta", "factor")}
    if stated["sliding_window"] == 0:  # how some configurations say that there is none
        del stated["sliding_window"]
    for name, value in stated.items():
        if isinstance(value, int | float) and not (math.isfinite(value) and value > 0):
            raise UnsupportedModelError(
                f"this {config.model_type} model states {name} {value}; it must be a finite "
                "number above 0"
            )


def _rope_parameters(config: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """The rotary parameters: one set, or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    yield from nested or [parameters]


def _check_modules(module: PreTrainedModel) -> None:
    """Refuse attention sinks, and a past that is not keys and values."""
    kind = module.config.model_type
    for name, part in module.named_modules():
        in_layer = re.search(r"\.\d", name)
        named_so = module._is_stateful and in_layer and _RECURRENT.search(type(part).__name__)
        if named_so or isinstance(part, nn.Conv1d | nn.RNNBase):
            raise UnsupportedModelError(
                f"{name} ({type(part).__name__}) of this {kind} model carries a state from token "
                "to token, which cannot be rolled back"
            )
        if any("sink" in parameter for parameter, _ in part.named_parameters(recurse=False)):
            raise UnsupportedModelError(
                f"{name} ({type(part).__name__}) of this {kind} model has attention sinks, which "
                "are not implemented"
            )
    if module._is_stateful:
        raise UnsupportedModelError(
            f"the layers of this {kind} model carry a state that cannot be rolled back"
        )
