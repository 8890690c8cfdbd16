"""One forward pass of a transformers model over a packed batch of token trees.

The model runs unmodified; it must have been loaded with the attention that
`ridgeline.attention.interface` registers, which keeps its keys and values in our store.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ridgeline.attention.interface import ATTENTION, AttentionContext, layer_name
from ridgeline.core.batch import Batch
from ridgeline.errors import ConfigError, UnsupportedModelError
from ridgeline.kv.store import KVStore, LayerShape
from ridgeline.model.linear import PackedLinear, weight_bytes
from ridgeline.model.target import TargetOutput, check_features
from ridgeline.model.threads import operator_threads


class TorchModel:
    """A transformers model, loaded with the attention that Ridgeline registers."""

    def __init__(self, module: PreTrainedModel) -> None:
        self.module = module
        self.layers = layer_shapes(module)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return torch.device(self.module.device)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations, keys and values."""
        return self.layers[0].dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its weights, the embedding included."""
        return weight_bytes(self.module)

    @property
    def computes(self) -> str:
        """For people."""
        return f"{str(self.dtype).removeprefix('torch.')}, transformers' layers"

    def embed(self, tokens: Tensor) -> Tensor:
        """See `Model.embed`."""
        embedded: Tensor = self.module.get_input_embeddings()(tokens)
        return embedded

    def unembed(self, hidden: Tensor) -> Tensor:
        """See `Model.unembed`."""
        logits: Tensor = self.module.get_output_embeddings()(hidden.to(self.dtype))
        return logits.float()

    def head_rows(self, ids: Tensor) -> Tensor:
        """See `Model.head_rows`."""
        weight: Tensor = self.module.get_output_embeddings().weight
        return weight[ids].float()

    def bind(self, store: KVStore, first_layer: int = 0) -> TorchTarget:
        """The model over the store's layers from `first_layer` on."""
        return TorchTarget(self.module, store, first_layer)


class TorchTarget:
    """A `Target` on transformers' own forward pass."""

    def __init__(self, module: PreTrainedModel, store: KVStore, first_layer: int = 0) -> None:
        self.module = module
        self.store = store
        self.first_layer = first_layer
        self._decoder = module.get_decoder()
        self._latent = _has_latent_attention(module)
        self._native = any(isinstance(layer, PackedLinear) for layer in module.modules())

    def forward(self, batch: Batch, features: Sequence[int] = ()) -> TargetOutput:
        """See `Target.forward`."""
        context = AttentionContext(self.store, batch, self.first_layer)
        threads = operator_threads(batch) if self._native else nullcontext()
        with torch.inference_mode(), threads, self._captured(features) as states:
            logits = self.module(
                input_ids=batch.tokens[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=batch.keep,
                ctx=context,
                **({"cache": context} if self._latent else {}),
            ).logits
            return TargetOutput(logits[0].float(), tuple(states[i][0] for i in features))

    @contextmanager
    def _captured(self, features: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Hidden states [1,T,H] by index, filled in by hooks that live only as long as this."""
        states: dict[int, Tensor] = {}
        if not features:
            yield states
            return
        layers = next(m for m in self._decoder.children() if isinstance(m, torch.nn.ModuleList))
        check_features(features, len(layers))
        handles = []
        try:
            for index in set(features):

                def keep_input(_: Any, args: tuple[Tensor, ...], index: int = index) -> None:
                    states[index] = args[0]

                def keep_output(_: Any, __: Any, output: Any, index: int = index) -> None:
                    states[index] = output.last_hidden_state

                if index < len(layers):
                    handles.append(layers[index].register_forward_pre_hook(keep_input))
                else:
                    handles.append(self._decoder.register_forward_hook(keep_output))
            yield states
        finally:
            for handle in handles:
                handle.remove()


def layer_shapes(module: PreTrainedModel) -> tuple[LayerShape, ...]:
    """What each attention layer keeps of a token, found by running the model on one token.

    So it holds for every architecture, and a layer that cannot run here shows before any request.

    Raises:
        ConfigError: the model was not loaded with Ridgeline's attention.
        UnsupportedModelError: a layer keeps something else than keys and values, masks in a way
            that it does not hand to its attention, or asks for something not computed here.
    """
    config = module.config.get_text_config()
    if config._attn_implementation != ATTENTION:
        raise ConfigError(
            f"the model was loaded with attention {config._attn_implementation!r}; load it with "
            f"attn_implementation={ATTENTION!r}"
        )
    probe = ShapeProbe(config)
    token = torch.zeros((1, 1), dtype=torch.int64, device=module.device)
    try:
        with torch.inference_mode():
            module(
                input_ids=token,
                position_ids=token,
                use_cache=False,
                logits_to_keep=token[0, :0],
                ctx=probe,
                **({"cache": probe} if _has_latent_attention(module) else {}),
            )
    except (AttributeError, TypeError) as error:
        # What a model does that builds a mask or reads a cache of its own: it finds None.
        raise UnsupportedModelError(
            f"{type(module).__name__} cannot run on Ridgeline's cache: {error}"
        ) from error
    count = max(config.num_hidden_layers, *probe.shapes, 0)
    for index in range(config.num_hidden_layers):
        if index not in probe.shapes:
            raise UnsupportedModelError(
                f"layer {index} of {type(module).__name__} keeps no keys and values, so it cannot "
                "be rolled back; only models whose every layer is attention can run here"
            )
    return tuple(probe.shapes[index] for index in range(count))


class ShapeProbe:
    """A `LayerContext` that only records what each layer would keep."""

    def __init__(self, config: Any) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self._config = config
        self._latent_dim = 0

    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Notes the layer's shapes; gives zeros."""
        index = module.layer_idx
        self._check_window(module, window)
        if self._latent_dim:
            if module.kv_b_proj.bias is not None:
                raise UnsupportedModelError(f"{layer_name(module)} has a bias in kv_b_proj")
            shape = LayerShape((1, self._latent_dim), (1, 0), key.dtype)
        else:
            heads = key.shape[1]
            shape = LayerShape((heads, key.shape[3]), (heads, value.shape[3]), key.dtype)
        if index in self.shapes:
            raise UnsupportedModelError(
                f"{layer_name(module)} computes attention more than once a pass, which would "
                "overwrite its own keys and values"
            )
        self.shapes[index] = shape
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def update(
        self, latent: Tensor, rotary: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Notes that the layer keeps latents."""
        self._latent_dim = latent.shape[-1] + rotary.shape[-1]
        return latent, rotary

    def _check_window(self, module: Any, window: int | None) -> None:
        """Refuse a layer whose attention is told another window than transformers' mask has."""
        kinds = getattr(self._config, "layer_types", None)
        if kinds is not None:
            kind = kinds[module.layer_idx]
        elif hasattr(sys.modules[type(module).__module__], "create_sliding_window_causal_mask"):
            kind = "sliding_attention"
        else:
            kind = "full_attention"
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(
                f"{layer_name(module)} is of type {kind!r}; only full_attention and "
                "sliding_attention can run here"
            )
        masked = (self._config.sliding_window or None) if kind == "sliding_attention" else None
        if window != masked:
            raise UnsupportedModelError(
                f"{layer_name(module)} masks with window {masked}, but tells its attention of "
                f"window {window}"
            )


def _has_latent_attention(module: PreTrainedModel) -> bool:
    """Whether layers cache compressed latents that `kv_b_proj` expands (DeepSeek's MLA)."""
    return any(hasattr(part, "kv_b_proj") for part in module.modules())
