"""Which models run here, and how far: decided before any weight is read.

A model runs if every layer keeps its past as keys and values handed to the registered attention
function once a pass: that is what a paged cache can hold, share, roll back and mask as a tree.
Some of it the configuration and the class say. The rest shows in a rehearsal: the model's own
forward pass over tensors without memory (device "meta"), with a probe in the place of attention.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from ridgeline.errors import UnsupportedModelError

_ATTENTION_TYPES = ("full_attention", "sliding_attention")
_OTHER_CONFIGS = {"text_config", "attn_config", "ffn_config"}  # sub-configurations of a decoder
_PROBE = "ridgeline_probe"  # the name of the attention function of the rehearsal
_RECURRENT = re.compile(r"mamba|rwkv|recurrent|xlstm|delta|linearattention|ssm|mixer", re.I)


def check_supported(config: PreTrainedConfig) -> None:
    """Raise UnsupportedModelError, naming the layer and the reason, unless the model runs here.

    Costs a fraction of a second and no memory to speak of.
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
    if quantisation := getattr(config, "quantization_config", None):
        method = dict(quantisation).get("quant_method", "an unknown method")
        raise UnsupportedModelError(
            f"the weights of this {name} model are quantised by {method}, which is not "
            "implemented; use the unquantised model or a GGUF file"
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
    try:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(
                copy.deepcopy(config),
                attn_implementation=_PROBE,
                experts_implementation="batched_mm",
            )
    except Exception as error:  # whatever a model class makes of its configuration
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        if _PROBE in reason:
            reason = "it knows only attention functions of its own"
        raise UnsupportedModelError(f"this {name} model cannot be built: {reason}") from error
    _check_state(module)
    _Rehearsal(module).check()


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


def _rope_parameters(config: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """The rotary parameters: one set, or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    yield from nested or [parameters]


def _check_state(module: PreTrainedModel) -> None:
    """Refuse a past that is not keys and values: recurrences and convolutions over time."""
    kind = module.config.model_type
    for name, part in module.named_modules():
        in_layer = re.search(r"\.\d", name)
        named_so = module._is_stateful and in_layer and _RECURRENT.search(type(part).__name__)
        if named_so or isinstance(part, nn.Conv1d | nn.RNNBase):
            raise UnsupportedModelError(
                f"{name} ({type(part).__name__}) of this {kind} model carries a state from token "
                "to token, which cannot be rolled back"
            )
    if module._is_stateful:
        raise UnsupportedModelError(
            f"the layers of this {kind} model carry a state that cannot be rolled back"
        )


@dataclass(frozen=True)
class _Call:
    """One call of the attention function."""

    module: nn.Module
    mask: Tensor | None
    options: dict[str, Any]


def _probe(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    ctx: list[_Call] | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """In the place of attention: note the call, return an output of the right shape."""
    if ctx is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} does not hand keywords on to its attention function"
        )
    ctx.append(_Call(module, attention_mask, options))
    batch, heads, length, _ = query.shape
    return query.new_empty(batch, length, heads, value.shape[-1]), None


AttentionInterface.register(_PROBE, _probe)


class _Rehearsal:
    """One forward pass without memory, and what its attention layers asked for."""

    def __init__(self, module: PreTrainedModel) -> None:
        self.kind = module.config.model_type
        self.layers = module.config.num_hidden_layers
        self.calls: list[_Call] = []
        self.complete = True
        tokens = torch.zeros(1, 3, dtype=torch.long, device="meta")
        try:
            with torch.device("meta"), torch.no_grad():
                module(
                    input_ids=tokens,
                    position_ids=tokens,
                    use_cache=False,
                    logits_to_keep=1,
                    ctx=self.calls,
                )
        except UnsupportedModelError:
            raise
        except (RuntimeError, NotImplementedError):
            self.complete = False  # something depends on values, such as a routing; judge the rest
        except Exception as error:
            raise UnsupportedModelError(
                f"this {self.kind} model cannot run without transformers' own cache and mask "
                f"({type(error).__name__}: {error})".split("\n")[0]
            ) from error

    def check(self) -> None:
        """Raise UnsupportedModelError at the first thing that paged tree attention cannot give."""
        seen: set[int] = set()
        for call in self.calls:
            index = getattr(call.module, "layer_idx", None)
            layer = f"layer {index} ({type(call.module).__name__}) of this {self.kind} model"
            if index is None or index in seen or index >= self.layers:
                raise UnsupportedModelError(f"{layer} computes attention more than once a pass")
            seen.add(index)
            if call.mask is not None:
                raise UnsupportedModelError(f"{layer} makes an attention mask of its own")
            if call.options.get("is_causal", getattr(call.module, "is_causal", True)) is False:
                raise UnsupportedModelError(f"{layer} is not causal: it sees later tokens")
            if call.options.get("s_aux") is not None:
                raise UnsupportedModelError(
                    f"{layer} uses attention sinks (s_aux), which are not implemented"
                )
            for name, option in call.options.items():
                if isinstance(option, Tensor) and name != "position_ids":
                    raise UnsupportedModelError(
                        f"{layer} passes {name!r} to attention, which is not implemented"
                    )
        missing = set(range(self.layers if self.complete else 1)) - seen
        if missing:
            raise UnsupportedModelError(
                f"layer {min(missing)} of this {self.kind} model does not use the registered "
                "attention function"
            )
