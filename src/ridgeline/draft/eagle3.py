"""EAGLE-3: a one-layer head over features of a low, a middle and a high layer of the target.

Source: EAGLE-3 (Li et al., arXiv 2503.01840).
"""

from __future__ import annotations

from typing import Any

from ridgeline.draft.base import DraftContext, register
from ridgeline.draft.checkpoint import EAGLE3, load_recurrent
from ridgeline.draft.head_files import HeadFiles, read_files
from ridgeline.draft.heads import head_path
from ridgeline.draft.recurrent import RecurrentDrafter, drafter_of
from ridgeline.errors import ModelLoadError

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
"""What a config.json calls the target layers whose inputs are read."""


@register("eagle3")
def eagle3_drafter(argument: str, context: DraftContext) -> RecurrentDrafter:
    """`eagle3:PATH`, a folder or hub repository in EAGLE-3's own layout or that of speculators.

    Without a path, the head that is known for the model.

    Raises:
        ConfigError: no head is known, or a head of another model.
        ModelLoadError, UnsupportedModelError: see `load_recurrent`.
    """
    files = read_files(head_path(argument, "eagle3", context.target))
    head = load_recurrent(
        files,
        EAGLE3,
        context.target,
        _features(files, len(context.target.model.layers)),
        residual_normed=bool(files.config.get("norm_before_residual", False)),
    )
    return drafter_of("eagle3", [head], context)


def default_features(layers: int) -> tuple[int, ...]:
    """A low, a middle and a high layer, as in the paper, of a target with so many."""
    return (min(2, layers), layers // 2, max(layers - 3, 0))


def _features(files: HeadFiles, layers: int) -> tuple[int, ...]:
    """Layers whose inputs are fused: those that the config names, or the default ones."""
    nested = files.config.get("eagle_config")
    named: Any = files.config.get(LAYER_IDS)
    if named is None and isinstance(nested, dict):
        named = nested.get(LAYER_IDS)
    if named is None:
        return default_features(layers)
    if (
        not isinstance(named, list)
        or not named
        or not all(type(i) is int and 0 <= i <= layers for i in named)
    ):
        raise ModelLoadError(
            f"{files.path}/config.json: {LAYER_IDS} is {named!r:.80}; it must be a list of layers "
            f"from 0 to {layers}"
        )
    return tuple(named)
