"""Models of the Llama family on the native decoder: the whole forward pass in one call.

Activations are fp32, sums of a row do not depend on the rows beside it, and attention takes the
positions of a sequence one after the other: a token's logits have the same bits whether its prefix
was computed whole or in chunks, decoded or verified in any tree, alone or in a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ridgeline.core.batch import Batch
from ridgeline.kv.store import KVStore, LayerShape
from ridgeline.model.linear import TYPES, native_kernels, native_module, pack, product
from ridgeline.model.target import TargetOutput, check_features

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose layers the decoder computes."""
_ROTARY = ("default", "linear", "llama3", "yarn")  # the kinds that depend on the position alone
_MATRICES = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)


class WeightSource(Protocol):
    """Where a decoder's weights come from; names are those of transformers' modules."""

    def matrix(self, name: str) -> Any:
        """A packed matrix with its bias."""

    def vector(self, name: str) -> NDArray[np.float32]:
        """A norm's weight; empty if the model has no such norm."""

    def embed(self, tokens: Tensor) -> Tensor:
        """f32[T,H] for ids i64[T]."""

    @property
    def embedding_bytes(self) -> int:
        """What the embedding takes, in memory or in a mapped file."""

    @property
    def computes(self) -> str:
        """The number format, for people."""


class NativeModel:
    """A decoder with its embedding."""

    def __init__(
        self, config: PreTrainedConfig, source: WeightSource, cache_dtype: torch.dtype
    ) -> None:
        """Packs what `source` gives; `config` must have no `obstacle`."""
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        dim = head_dim(config)
        frequencies, scale = _rotary(config)
        self._source = source
        self.decoder = native_module().Decoder(
            hidden=config.hidden_size,
            input=config.hidden_size,
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            eps=config.rms_norm_eps,
            inverse_frequencies=frequencies,
            rotary_scale=scale,
        )
        self._matrix_bytes = 0
        for index in range(config.num_hidden_layers):
            name = f"model.layers.{index}."
            weights = [source.matrix(name + matrix) for matrix in _MATRICES]
            self._matrix_bytes += sum(matrix.nbytes for matrix in weights)
            self.decoder.add_layer(
                attention_norm=source.vector(name + "input_layernorm"),
                mlp_norm=source.vector(name + "post_attention_layernorm"),
                query_norm=source.vector(name + "self_attn.q_norm"),
                key_norm=source.vector(name + "self_attn.k_norm"),
                weights=weights,
                window=_window(config, index),
            )
        self.head = source.matrix("lm_head")
        self.decoder.finish(norm=source.vector("model.norm"), head=self.head)
        self._cache_dtype = cache_dtype
        self.layers = (LayerShape((kv_heads, dim), (kv_heads, dim), cache_dtype),) * (
            config.num_hidden_layers
        )

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self._cache_dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its matrices and the embedding; norms and biases are left out."""
        embedding: int = self._source.embedding_bytes
        return self._matrix_bytes + int(self.head.nbytes) + embedding

    @property
    def computes(self) -> str:
        """For people."""
        return f"{self._source.computes}, native {native_kernels()} decoder"

    def bind(self, store: KVStore, first_layer: int = 0) -> NativeTarget:
        """The model over the store's layers from `first_layer` on."""
        return NativeTarget(self, store, first_layer)

    def embed(self, tokens: Tensor) -> Tensor:
        """See `Model.embed`; fp32."""
        return self._source.embed(tokens)

    def unembed(self, hidden: Tensor) -> Tensor:
        """See `Model.unembed`."""
        return product(self.head, hidden)

    def head_rows(self, ids: Tensor) -> Tensor:
        """See `Model.head_rows`."""
        rows = torch.empty(len(ids), self.head.inputs, dtype=torch.float32, device="cpu")
        self.head.rows(outputs=ids.numpy(), to=rows.data_ptr(), size=rows.numel())
        return rows


class NativeTarget:
    """A `Target` on the native decoder."""

    def __init__(self, model: NativeModel, store: KVStore, first_layer: int) -> None:
        self.store = store
        self._model = model
        self._caches = LayerCaches(store, first_layer, len(model.layers))

    def forward(self, batch: Batch, features: Sequence[int] = ()) -> TargetOutput:
        """See `Target.forward`."""
        check_features(features, len(self._model.layers))
        model, hidden = self._model, self._model.embed(batch.tokens)
        states = {index: torch.empty_like(hidden) for index in features}
        logits = decode(model.decoder, model.head, batch, hidden, self._caches, states)
        return TargetOutput(logits, tuple(states[index] for index in features))


class LayerCaches:
    """Where some layers of a store keep their keys and values, for the decoder."""

    def __init__(self, store: KVStore, first: int, count: int) -> None:
        layers = range(first, first + count)
        sides = [side[i].data_ptr() for i in layers for side in (store.keys, store.values)]
        self.addresses = np.array(sides, np.int64)
        self.type = TYPES[store.layers[first].dtype]
        self.slots = len(store.keys[first])
        self._store = store  # else the memory could go


def decode(
    decoder: Any,
    head: Any,
    batch: Batch,
    embedding: Tensor,
    caches: LayerCaches,
    features: Mapping[int, Tensor],
    hidden: Tensor | None = None,
) -> Tensor:
    """One pass of a native decoder, whose last matrix is `head`.

    Args:
        decoder, head: the native objects.
        batch: the packed rows.
        embedding: f32[T,E], the tokens'.
        caches: of the decoder's layers.
        features: f32[T,H] to write hidden states to: i takes the input of layer i, the number of
            layers stands for the output of the final norm, and one more for its input.
        hidden: f32[T,H], which a draft head reads beside the embedding.

    Returns:
        f32[K,V], logits of the batch's `keep` rows.
    """
    trees = [entry.tree for entry in batch.entries]
    # Whatever torch's defaults are meanwhile: loading a model changes them for a while.
    logits = torch.empty((len(batch.keep), head.outputs), dtype=torch.float32, device="cpu")
    addresses = np.zeros(len(caches.addresses) // 2 + 2, np.int64)
    for index, feature in features.items():
        addresses[index] = feature.data_ptr()
    decoder.forward(
        embeddings=embedding.data_ptr(),
        embeddings_size=embedding.numel(),
        states=0 if hidden is None else hidden.data_ptr(),
        states_size=0 if hidden is None else hidden.numel(),
        positions=batch.positions.numpy(),
        sizes=np.array([tree.size for tree in trees], np.int32),
        trunks=np.array([tree.trunk for tree in trees], np.int32),
        kv_lens=np.array([entry.kv_len for entry in batch.entries], np.int64),
        slots=np.concatenate([entry.slots for entry in batch.entries]),
        parents=np.concatenate([tree.parents for tree in trees]),
        caches=caches.addresses,
        cache_type=caches.type,
        cache_slots=caches.slots,
        keep=batch.keep.numpy(),
        logits=logits.data_ptr(),
        logits_size=logits.numel(),
        features=addresses,
    )
    return logits


class ModuleSource:
    """The weights of a loaded transformers model, packed as they are or rounded to few bits."""

    def __init__(self, module: PreTrainedModel, bits: int | None = None) -> None:
        self._module = module
        self._bits = bits
        self._embedding = module.get_input_embeddings().weight

    @property
    def computes(self) -> str:
        """The number format, for people."""
        if self._bits:
            return f"int{self._bits}"
        return str(self._embedding.dtype).removeprefix("torch.")

    @property
    def embedding_bytes(self) -> int:
        """What the embedding takes in memory."""
        return int(self._embedding.nbytes)

    def matrix(self, name: str) -> Any:
        """A packed matrix with its bias; the module's own copy goes, so memory grows by one."""
        parent, _, last = name.rpartition(".")
        linear = self._module.get_submodule(name)
        packed = pack(linear, self._bits)
        setattr(self._module.get_submodule(parent), last, torch.nn.Identity())
        return packed

    def vector(self, name: str) -> NDArray[np.float32]:
        """A norm's weight."""
        try:
            weight = self._module.get_submodule(name).weight
        except AttributeError:
            return np.empty(0, np.float32)
        values: NDArray[np.float32] = weight.detach().float().numpy()
        return values

    def embed(self, tokens: Tensor) -> Tensor:
        """f32[T,H] for ids i64[T]."""
        rows: Tensor = self._embedding[tokens]
        return rows.float().contiguous()


def obstacle(
    config: PreTrainedConfig, device: torch.device, dtype: torch.dtype = torch.float32
) -> str | None:
    """Why the native decoder does not compute such a model; None if it does."""
    if native_kernels() is None:
        return "the native extension is not built"
    if device.type != "cpu":
        return f"the model runs on {device}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"the native decoder has no {str(dtype).removeprefix('torch.')} weights"
    if config.model_type not in FAMILIES:
        return f"{config.model_type} is not of the Llama family"
    if config.hidden_act != "silu":
        return f"its MLP uses {config.hidden_act}"
    kind = config.rope_parameters["rope_type"]
    if kind not in _ROTARY or config.rope_parameters.get("partial_rotary_factor", 1) != 1:
        return f"its rotary positions ({kind}) are not implemented"
    if head_dim(config) % 16:
        return f"its heads' dimension {head_dim(config)} is no multiple of 16"
    return None


def rounding_obstacle(config: PreTrainedConfig) -> str | None:
    """Why such a model's weights cannot be rounded in groups of 32 inputs; None if they can."""
    heads = config.num_attention_heads * head_dim(config)
    for size in (config.hidden_size, config.intermediate_size, heads):
        if size % 32:
            return f"its matrices have rows of {size} weights, no multiple of 32"
    return None


def head_dim(config: PreTrainedConfig) -> int:
    """The dimension of a head."""
    stated = getattr(config, "head_dim", None)
    return int(stated or config.hidden_size // config.num_attention_heads)


def _rotary(config: PreTrainedConfig) -> tuple[NDArray[np.float32], float]:
    """Inverse frequencies f32[dim/2], and what sines and cosines are multiplied by."""
    with torch.device("meta"):
        rotary = type(AutoModelForCausalLM.from_config(config).get_decoder().rotary_emb)
    made = rotary(config)
    return made.inv_freq.float().numpy(), float(made.attention_scaling)


def _window(config: PreTrainedConfig, index: int) -> int:
    """Positions that layer `index` sees; 0: all."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[index] != "sliding_attention":
        return 0
    if kinds is None and config.model_type != "mistral":
        return 0
    return int(getattr(config, "sliding_window", None) or 0)
