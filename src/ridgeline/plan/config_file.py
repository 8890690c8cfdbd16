"""A model's config.json, refused where transformers would go on with something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from ridgeline.errors import ModelLoadError

_MOST_LAYERS = 1000
_SIZES = {"num_hidden_layers": (), "hidden_size": ("n_embed",), "vocab_size": ()}
"""What every model states, and older names of it that transformers does not map."""


def read_config(file: Path) -> PreTrainedConfig:
    """The configuration; only its sizes are checked here.

    transformers makes lists as long as the layers, so an absurd number is refused before, and it
    has a default for every size, so that a missing one would be that of another model.

    Raises:
        ModelLoadError: it cannot be read, is no configuration, or lacks a size, or one is absurd.
    """
    try:
        stated = json.loads(file.read_bytes())
        counts = {key: value for key, value in stated.items() if isinstance(value, int)}
    except (OSError, ValueError, AttributeError, RecursionError):
        raise ModelLoadError(f"{file} is no model's config.json; give one") from None
    if "model_type" not in stated:
        raise ModelLoadError(f"{file} states no model_type, so it is no model's config.json")
    if counts.get("num_attention_heads") == 0:
        raise ModelLoadError(f"{file} states 0 num_attention_heads; a model has 1 or more")
    layers = max((value for key, value in counts.items() if "layer" in key), default=0)
    if layers > _MOST_LAYERS:
        raise ModelLoadError(f"{file} states {layers} layers; {_MOST_LAYERS} are the most here")
    config = AutoConfig.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
    _check_sizes(file, stated, config)
    return config


def _check_sizes(file: Path, stated: dict[str, Any], config: PreTrainedConfig) -> None:
    if "text_config" not in stated:  # where the sizes of some models lie
        for name, older in _SIZES.items():
            usual = config.attribute_map.get(name, name)
            if not stated.keys() & {name, usual, *older}:
                raise ModelLoadError(f"{file} states no {usual}; a model's config.json has one")
    queries, keys = (
        getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")
    )
    if isinstance(queries, int) and isinstance(keys, int) and keys > 0 and queries % keys:
        raise ModelLoadError(
            f"{file} states {queries} num_attention_heads and {keys} num_key_value_heads; the "
            "first must be a multiple of the second"
        )
