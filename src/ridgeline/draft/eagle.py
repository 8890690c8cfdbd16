"""EAGLE: a one-layer head extrapolates the target's last hidden state.

Sources: EAGLE (Li et al., arXiv 2401.15077), whose head it is, and EAGLE-2 (2406.16858), which
draws a dynamic tree with the same head.
"""

from __future__ import annotations

from ridgeline.draft.base import DraftContext, register
from ridgeline.draft.checkpoint import EAGLE, load_recurrent
from ridgeline.draft.head_files import read_files
from ridgeline.draft.heads import head_path
from ridgeline.draft.recurrent import RecurrentDrafter, drafter_of


@register("eagle")
def eagle_drafter(argument: str, context: DraftContext) -> RecurrentDrafter:
    """`eagle:PATH`, a folder or hub repository in EAGLE's own layout or that of speculators.

    Without a path, the head that is known for the model.

    Raises:
        ConfigError: no head is known, or a head of another model.
        ModelLoadError, UnsupportedModelError: see `load_recurrent`.
    """
    final = (len(context.target.model.layers),)
    files = read_files(head_path(argument, "eagle", context.target))
    head = load_recurrent(files, EAGLE, context.target, final)
    return drafter_of("eagle", [head], context)
