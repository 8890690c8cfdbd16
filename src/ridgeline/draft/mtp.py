"""Multi-token prediction: the modules that a model was trained with draft for it.

Source: DeepSeek-V3 (arXiv 2412.19437, section 2.2). A module reads the normed embedding of a token
and the normed hidden state before it, and what it gives the next module reads; how several take
turns is told in `recurrent`. They lie in the model's own checkpoint, in one of two layouts:
DeepSeek-V3's, as layers behind the model's own, or Qwen3-Next's, under "mtp.", whose modules share
all but their decoder layer. A decoder layer of the Llama family runs as every recurrent head does;
any other is transformers' own (`block`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from torch import Tensor

from ridgeline.draft.base import DraftContext, register
from ridgeline.draft.block import BlockHead, load_block
from ridgeline.draft.checkpoint import MTP, load_recurrent
from ridgeline.draft.head_files import HeadFiles, read_files
from ridgeline.draft.heads import head_path
from ridgeline.draft.recurrent import RecurrentDrafter, drafter_of
from ridgeline.errors import ModelLoadError
from ridgeline.model.native import FAMILIES

_DEEPSEEK = re.compile(r"(model\.layers\.(\d{1,6})\.)eh_proj\.weight")
_QWEN = "mtp."
_QWEN_LAYER = re.compile(r"(layers\.(\d{1,6})\.).*")
_QWEN_SHARED = {
    "fc": "eh_proj",
    "norm": "shared_head.norm",
    "pre_fc_norm_hidden": "hnorm",
    "pre_fc_norm_embedding": "enorm",
}
"""Parts that Qwen3-Next's modules share, and DeepSeek-V3's names for them."""


@register("mtp")
def mtp_drafter(argument: str, context: DraftContext) -> RecurrentDrafter:
    """`mtp:PATH`, the modules in a folder or hub repository.

    Without a path, the module that is known for the model, else those of its own checkpoint.

    Raises:
        ConfigError: the target has no checkpoint to look into, or they are another model's.
        ModelLoadError, UnsupportedModelError: see `read_modules` and `load_recurrent`.
    """
    target = context.target
    own = None if (target.source or "").endswith(".gguf") else target.source
    modules, carries_normed = read_modules(head_path(argument, "mtp", target, own))
    final = (len(target.model.layers),)
    if modules[0].config.get("model_type", FAMILIES[0]) in FAMILIES:
        heads = [
            load_recurrent(m, MTP, target, final, carries_normed=carries_normed) for m in modules
        ]
        return drafter_of("mtp", heads, context)
    blocks = [BlockHead(load_block(m, target), target.model, carries_normed) for m in modules]
    return RecurrentDrafter("mtp", blocks, final, context, [None] * len(blocks))


def read_modules(path: str) -> tuple[list[HeadFiles], bool]:
    """The modules of a checkpoint, in order, each with its tensors under DeepSeek-V3's names.

    Returns:
        The modules, and whether their normed hidden state is what the next step reads.

    Raises:
        ModelLoadError: there is none, or the files are damaged; see `read_files`.
    """
    files = read_files(path, _of_modules)
    starts = {int(m[2]): m[1] for name in files.tensors if (m := _DEEPSEEK.fullmatch(name))}
    if starts:
        found = [_below(files.tensors, starts[number]) for number in sorted(starts)]
        return [replace(files, tensors=tensors) for tensors in found], False
    tensors = _below(files.tensors, _QWEN)
    starts = {int(m[2]): m[1] for name in tensors if (m := _QWEN_LAYER.fullmatch(name))}
    if not starts:
        raise ModelLoadError(
            f"{path} holds no MTP module (model.layers.N.eh_proj.weight, or mtp.layers.N); give "
            "the folder of a model that was trained with one"
        )
    shared = {
        f"{_QWEN_SHARED.get(part, part)}.{kind}": tensor
        for (part, _, kind), tensor in ((n.partition("."), t) for n, t in tensors.items())
        if part != "layers"
    }
    found = [shared | _below(tensors, starts[number]) for number in sorted(starts)]
    return [replace(files, tensors=tensors) for tensors in found], True


def _of_modules(names: Collection[str]) -> list[str]:
    """Of the names of a model's tensors, those of its modules."""
    starts = {m[1] for name in names if (m := _DEEPSEEK.fullmatch(name))} or {_QWEN}
    return [name for name in names if name.startswith(tuple(starts))]


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin so, without that beginning."""
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
