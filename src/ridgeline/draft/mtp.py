"""Multi-token prediction: the modules that a model was trained with draft for it.

Source: DeepSeek-V3 (arXiv 2412.19437, section 2.2). A module reads the normed embedding of a token
and the normed hidden state before it; applied again to its own hidden state it drafts a chain.
"""

from __future__ import annotations

import re
from dataclasses import replace

from ridgeline.draft.base import DraftContext, register
from ridgeline.draft.checkpoint import MTP, HeadFiles, load_recurrent, read_files
from ridgeline.draft.recurrent import RecurrentDrafter, drafter_of
from ridgeline.errors import ConfigError, ModelLoadError, UnsupportedModelError

MODULE = r"model\.layers\.(\d+)\."


@register("mtp")
def mtp_drafter(argument: str, context: DraftContext) -> RecurrentDrafter:
    """`mtp:PATH`, a folder or hub repository with a module in DeepSeek-V3's layout.

    Raises:
        ConfigError: no path, or a module of another model.
        ModelLoadError, UnsupportedModelError: see `load_recurrent`.
    """
    if not argument:
        raise ConfigError("drafter 'mtp' needs a module: mtp:PATH")
    files = _module(read_files(argument, MODULE))
    final = (len(context.target.model.layers),)
    head = load_recurrent(files, MTP, context.target, final)
    return drafter_of("mtp", head, context)


def _module(files: HeadFiles) -> HeadFiles:
    """The module's own tensors: those of the layer that has a projection, behind the model's own.

    Raises:
        ModelLoadError: there is none.
        UnsupportedModelError: there are several.
    """
    numbers = {
        int(match[1]) for name in files.tensors if (match := re.match(MODULE + r"eh_proj\.", name))
    }
    if not numbers:
        raise ModelLoadError(
            f"{files.path} holds no MTP module (model.layers.N.eh_proj.weight); give the folder of "
            "a model that was trained with one"
        )
    if len(numbers) > 1:
        raise UnsupportedModelError(f"{files.path} holds {len(numbers)} MTP modules; one can run")
    prefix = f"model.layers.{numbers.pop()}."
    own = {
        name.removeprefix(prefix): t for name, t in files.tensors.items() if name.startswith(prefix)
    }
    return replace(files, tensors=own)
