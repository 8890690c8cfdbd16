"""A model's files, held against its configuration before anything large is made of them.

transformers makes what a configuration asks for first and looks at the files then: absurd sizes
would take minutes and all memory until the contradiction shows.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from transformers import GenerationConfig, PreTrainedConfig

from ridgeline.errors import ModelLoadError, reason
from ridgeline.model.gguf_convert import gguf_folder

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_FLOATS = ("F64", "F32", "F16", "BF16")
_WEIGHTS = ("weight", "_proj")  # how matrices' names end; other tensors may be masks or counters


class StoredTensor(NamedTuple):
    """What a safetensors header says of a tensor."""

    dtype: str
    shape: tuple[int, ...]


def local_path(path: str) -> Path | None:
    """The GGUF file or model folder that `path` names; None: a hub id.

    Raises:
        ModelLoadError: it is neither.
        OSError, RuntimeError, ValueError: it cannot be looked up.
    """
    if not path:
        raise ModelLoadError("the model's name is empty; give a hub id, a folder or a GGUF file")
    local = Path(path).expanduser()
    if local.is_file():
        if local.suffix != ".gguf":
            raise ModelLoadError(f"{path} is no GGUF file; give a .gguf file or a model folder")
        return local
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise ModelLoadError(f"the folder {path} holds no config.json, so it is not a model")
        return local
    if local.suffix == ".gguf" or path.startswith(("/", ".", "~")) or path.count("/") > 1:
        raise ModelLoadError(f"there is no file or folder {path!r}")
    return None


def local_folder(path: str, dtype: torch.dtype) -> Path | None:
    """The transformers folder that `path` means, converted if it is a GGUF file; None: a hub id.

    Raises:
        As `local_path`.
    """
    local = local_path(path)
    return gguf_folder(local, dtype) if local and local.is_file() else local


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of the safetensors files that transformers would read; none without files.

    Raises:
        ModelLoadError: the index of the files is damaged.
        OSError, SafetensorError: a file is missing or damaged.
    """
    names = ["model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if not (folder / names[0]).is_file():
        names = []
        if index.is_file():
            parts = _json_object(index).get("weight_map")
            if not isinstance(parts, dict):
                raise ModelLoadError(f"{index} holds no weight_map; download it again")
            names = sorted({str(name) for name in parts.values()})
    tensors = {}
    for name in names:
        with safe_open(folder / name, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is no dictionary
                part = file.get_slice(key)
                tensors[key] = StoredTensor(part.get_dtype(), tuple(part.get_shape()))
    return tensors


def check_layers(folder: Path, stored: dict[str, StoredTensor]) -> None:
    """Refuse more layers than there are tensors: a layer has several, and takes time to build.

    transformers must not have read the configuration before: it makes lists of that length.

    Raises:
        ModelLoadError: there are more, or there is no configuration.
    """
    config = _json_object(folder / "config.json")
    for name in _LAYERS:
        layers = config.get(name)
        if stored and isinstance(layers, int) and layers > len(stored):
            raise ModelLoadError(
                f"{folder}/config.json states {name} {layers}, and the weights beside it are "
                f"{len(stored)} tensors: they belong to different models"
            )


def check_weights(path: str, numbers: int, stored: dict[str, StoredTensor]) -> None:
    """Refuse files with far fewer than the model's `numbers`, or with integers for weights.

    Weights that are missing or of another shape are named when the files are read; this bounds the
    memory that it takes until then.

    Raises:
        ModelLoadError: see above.
    """
    held = sum(prod(tensor.shape) for tensor in stored.values())
    if stored and numbers > 2 * held:
        raise ModelLoadError(
            f"the config.json of {path} makes a model of {numbers} numbers, and its files hold "
            f"{held}: they belong to different models, or the download is incomplete"
        )
    for name, tensor in stored.items():
        if name.endswith(_WEIGHTS) and tensor.dtype not in _FLOATS:
            raise ModelLoadError(
                f"{path} holds {name} as {tensor.dtype}, and its config.json does not say how it "
                "was quantised; use the unquantised model or a GGUF file"
            )


def check_generation_config(folder: Path) -> None:
    """Refuse a damaged file, which transformers passes over, and with it the end tokens.

    Raises:
        ModelLoadError: it is damaged.
    """
    file = folder / "generation_config.json"
    if file.is_file():
        _json_object(file)


def end_tokens(generation: GenerationConfig, config: PreTrainedConfig) -> frozenset[int]:
    """Where transformers would stop: the generation config's end tokens, else the config's.

    Ids outside the vocabulary, such as the -1 that often stands for none, never occur and are left
    out.

    Raises:
        ModelLoadError: one is no integer.
    """
    ends = generation.eos_token_id
    if ends is None:
        ends = config.eos_token_id
    if ends is None:
        return frozenset()
    ends = ends if isinstance(ends, list | tuple) else [ends]
    for end in ends:
        if not isinstance(end, int) or isinstance(end, bool):
            raise ModelLoadError(
                f"the configuration states eos_token_id {end!r:.80}; it must be a token id"
            )
    return frozenset(end for end in ends if 0 <= end < config.vocab_size)


def _json_object(file: Path) -> dict[str, object]:
    """The object in a JSON file; ModelLoadError naming the file if it holds none."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(
            f"{file} cannot be loaded: {reason(error)}; download it again"
        ) from None
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} holds no JSON object; download it again")
    return content
