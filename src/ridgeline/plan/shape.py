"""The shape of a model: its weights by part, what it keeps of a token, what a token costs.

All of it comes from a configuration, or from a GGUF file's header; weights need not be there. The
model is built on the device "meta", as transformers would build it, so that parameters are counted
and not estimated, for every family alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ridgeline.errors import ConfigError
from ridgeline.model import hub
from ridgeline.model.files import local_path
from ridgeline.model.gguf_convert import gguf_config
from ridgeline.model.gguf_file import GGUFFile, read_gguf
from ridgeline.model.load import one_line_errors, quiet
from ridgeline.model.native import obstacle
from ridgeline.model.support import check_decoder, context_length, outline
from ridgeline.model.torch_target import layer_shapes
from ridgeline.plan.config_file import read_config

BITS = {"fp32": 32.0, "bf16": 16.0, "fp16": 16.0, "fp8": 8.0, "int8": 8.5, "int4": 4.5}
"""Bits of a stored weight; int8 and int4 with a 16-bit scale for every 32 weights."""
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_GGUF_NAMES = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}
EMBEDDING, LAYERS, EXPERTS, HEAD = "embedding", "layers", "experts", "head"


@dataclass(frozen=True)
class Part:
    """Weights that have the same number format and are used in the same way."""

    role: str
    """`EMBEDDING`: rows are looked up; `LAYERS`: each pass reads all; `EXPERTS`: a token reads
    `used` of `of`; `HEAD`: gives the logits"""
    kind: str
    """number format: a key of `BITS`, or a GGUF type such as Q4_K"""
    weights: int
    bits: float
    """bits of a weight, with its share of a scale"""
    matrices: bool = True
    """whether it is multiplied with; norms and biases are not"""
    widths: int = 0
    """inputs and outputs of its matrices, counted together: the activations that they move; of an
    expert's matrices those of one expert"""
    used: int = 1
    of: int = 1

    @property
    def nbytes(self) -> float:
        """Bytes as stored."""
        return self.weights * self.bits / 8


@dataclass(frozen=True)
class Attention:
    """One layer's attention, in numbers of a token."""

    queries: int
    """query heads"""
    kept: int
    """numbers in the cache"""
    key: int
    """dimension of a head's dot product"""
    value: int
    """dimension of what is summed; of latent attention both lie in the latent (arXiv 2405.04434)"""
    window: int | None = None
    """tokens that it sees, where those are not all"""

    def seen(self, context: float) -> float:
        """Of so many tokens."""
        return context if self.window is None else min(context, self.window)


@dataclass(frozen=True)
class ModelShape:
    """What a plan needs to know of a model."""

    name: str
    hidden: int
    vocabulary: int
    parts: tuple[Part, ...]
    attention: tuple[Attention, ...]
    """one entry a layer"""
    context: int
    """tokens that it reads at most"""
    tied: bool = False
    """whether the head is the embedding, which is then stored once"""
    cache_bits: int = 16
    modules: int = 0
    """modules that were trained with it to draft"""
    obstacle: str | None = None
    """why the native decoder does not compute it here, if it does not"""

    @property
    def layers(self) -> int:
        """How many."""
        return len(self.attention)

    @property
    def parameters(self) -> int:
        """All weights."""
        return sum(part.weights for part in self._stored())

    @property
    def active(self) -> int:
        """Weights that take part in one token, the embedding's included as is usual."""
        return sum(part.weights * part.used // part.of for part in self._stored())

    @property
    def nbytes(self) -> float:
        """Bytes of the weights."""
        return sum(part.nbytes for part in self._stored())

    @property
    def kv_per_token(self) -> float:
        """Bytes of one token in the cache."""
        return sum(layer.kept for layer in self.attention) * self.cache_bits / 8

    @property
    def kinds(self) -> dict[str, int]:
        """Weights that are multiplied with, by number format."""
        found: dict[str, int] = {}
        for part in self.parts:
            if part.matrices and part.role != EMBEDDING:
                found[part.kind] = found.get(part.kind, 0) + part.weights
        return found

    def in_format(self, kind: str) -> ModelShape:
        """The same model with its matrices stored as `kind`.

        As the engine does it: int8 and int4 round what has more bits than that and leave vectors
        and the embedding, the others hold for all matrices; the cache is fp32 where weights are.
        """
        rounds = kind.startswith("int")
        parts = []
        for part in self.parts:
            new = _plain(kind) if part.role == EMBEDDING or not part.matrices else kind
            if not rounds or (new == kind and part.bits > BITS[kind]):
                part = replace(part, kind=new, bits=BITS[new])
            parts.append(part)
        cache = self.cache_bits if rounds else 32 if kind == "fp32" else 16
        return replace(self, parts=tuple(parts), cache_bits=cache)

    def _stored(self) -> list[Part]:
        return [part for part in self.parts if not (self.tied and part.role == EMBEDDING)]


def read_shape(path: str) -> ModelShape:
    """The shape of a hub id, a folder, a GGUF file or a config.json; weights need not be there.

    In the number format of the file, or the one that the configuration states.

    Raises:
        ModelLoadError: nothing is there, or it cannot be read.
        ConfigError: its weights have a number format that is not planned for.
        UnsupportedModelError: the model cannot be built, or keeps more than keys and values.
    """
    with quiet(), one_line_errors(path):
        if path.endswith(".json") and Path(path).expanduser().is_file():
            file = Path(path).expanduser()
            return _from_config(_name(file.resolve().parent), read_config(file))
        local = local_path(path)
        if local is not None and local.is_file():
            header = read_gguf(local, whole=False)
            return _from_gguf(header, gguf_config(header))
        folder = local or hub.download(path, ("config.json",))
        return _from_config(_name(local) if local else path, read_config(folder / "config.json"))


def _name(path: Path) -> str:
    return path.resolve().name


def _from_config(name: str, config: PreTrainedConfig) -> ModelShape:
    check_decoder(config)
    module = outline(config)
    kind = "fp8" if _fp8(config) else _stated_kind(config)
    experts = _experts_used(config)
    plain = _plain(kind)  # a checkpoint in fp8 leaves the head as it was
    embedding = module.get_input_embeddings().weight
    head = module.get_output_embeddings().weight
    parts = [
        Part(EMBEDDING, plain, embedding.numel(), BITS[plain]),
        Part(HEAD, plain, head.numel(), BITS[plain], widths=sum(head.shape)),
    ]
    for parameter_name, parameter in module.named_parameters():
        if parameter is embedding or parameter is head:
            continue
        count, shape = parameter.numel(), tuple(parameter.shape)
        if len(shape) < 2:
            parts.append(Part(LAYERS, plain, count, BITS[plain], matrices=False))
        elif len(shape) == 3 and ".experts." in parameter_name:
            parts.append(
                Part(
                    *(EXPERTS, kind, count, BITS[kind]),
                    widths=sum(shape[1:]),
                    used=min(experts, shape[0]),
                    of=shape[0],
                )
            )
        else:
            parts.append(Part(LAYERS, kind, count, BITS[kind], widths=shape[0] + shape[-1]))
    return ModelShape(
        name=name,
        hidden=config.hidden_size,
        vocabulary=embedding.shape[0],
        parts=_merged(parts),
        attention=_attention(config, module),
        context=context_length(config),
        tied=head is embedding,
        cache_bits=32 if kind == "fp32" else 16,
        modules=getattr(config, "num_nextn_predict_layers", None) or 0,
        obstacle=obstacle(config, torch.device("cpu")),
    )


def _from_gguf(header: GGUFFile, config: PreTrainedConfig) -> ModelShape:
    check_decoder(config)
    experts = _experts_used(config)
    parts = []
    tied = "output.weight" not in header.tensors
    for tensor in header.tensors.values():
        kind = _GGUF_NAMES.get(tensor.kind.name, tensor.kind.name)
        count = 1
        for size in tensor.shape:
            count *= size
        stored = (kind, count, 8 * tensor.nbytes / count)
        widths = sum(tensor.shape[-2:])
        if tensor.name == "token_embd.weight":
            parts.append(Part(EMBEDDING, *stored))
            if tied:
                parts.append(Part(HEAD, *stored, widths=widths))
        elif tensor.name == "output.weight":
            parts.append(Part(HEAD, *stored, widths=widths))
        elif len(tensor.shape) == 3:
            of = tensor.shape[0]
            parts.append(Part(EXPERTS, *stored, widths=widths, used=min(experts, of), of=of))
        else:
            matrix = len(tensor.shape) == 2
            parts.append(Part(LAYERS, *stored, matrices=matrix, widths=widths if matrix else 0))
    return ModelShape(
        name=_name(header.path).removesuffix(".gguf"),
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        parts=_merged(parts),
        attention=_attention(config, outline(config)),
        context=context_length(config),
        tied=tied,
        obstacle=obstacle(config, torch.device("cpu")),
    )


def _plain(kind: str) -> str:
    """The format of what is not multiplied, where matrices are of `kind`."""
    return kind if BITS[kind] >= BITS["bf16"] else "bf16"


def _stated_kind(config: PreTrainedConfig) -> str:
    kind = _DTYPES.get(config.dtype or torch.bfloat16)
    if kind is None:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise ConfigError(
            f"the weights of this {config.model_type} model are stated as {config.dtype}, which is "
            f"not planned for; its dtype must be one of {known}"
        )
    return kind


def _fp8(config: PreTrainedConfig) -> bool:
    stated = getattr(config, "quantization_config", None)
    method = dict(stated).get("quant_method") if stated else None
    if method not in (None, "fp8"):
        raise ConfigError(
            f"the weights of this {config.model_type} model are quantised by {method}, whose size "
            "is not known here; give the unquantised model and --precision"
        )
    return method == "fp8"


def _experts_used(config: PreTrainedConfig) -> int:
    """Experts that a token goes through, 1 where there are none."""
    return int(getattr(config, "num_experts_per_tok", None) or 1)


def _merged(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Parts that differ in nothing but their sizes, added up."""
    found: dict[Part, Part] = {}
    for part in parts:
        alike = replace(part, weights=0, widths=0)
        before = found.get(alike, alike)
        found[alike] = replace(
            before, weights=before.weights + part.weights, widths=before.widths + part.widths
        )
    return tuple(found.values())


def _attention(config: PreTrainedConfig, module: PreTrainedModel) -> tuple[Attention, ...]:
    """Each layer's, as the engine's cache would keep it."""
    shapes = layer_shapes(module)
    windows = list(_windows(config, len(shapes)))
    layers = []
    for shape, window in zip(shapes, windows, strict=True):
        (heads, key), (_, value) = shape.key, shape.value
        queries, kept = config.num_attention_heads, heads * (key + value)
        layers.append(Attention(queries, kept, key, value or config.kv_lora_rank, window))
    return tuple(layers)


def _windows(config: PreTrainedConfig, layers: int) -> Iterator[int | None]:
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) or None
    if kinds is None:  # a family that has a window at all uses it in every layer
        yield from [window] * layers
        return
    yield from (window if kind == "sliding_attention" else None for kind in kinds)
