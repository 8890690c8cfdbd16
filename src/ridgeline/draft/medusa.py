"""Medusa: heads on the last hidden state, each of which predicts one position further ahead.

Source: Medusa (Cai et al., arXiv 2401.10774). Its typical acceptance is replaced by the engine's
lossless rules. Its fixed tree, chosen from accuracies measured beforehand, is replaced by the paths
that are likeliest at the step at hand, by the product of the heads' own probabilities.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ridgeline.core.sequence import Sequence as TokenSequence
from ridgeline.core.tree import DraftProposal, TokenTree
from ridgeline.draft.base import DraftContext, DraftRequest, Needs, Observation, register
from ridgeline.draft.checkpoint import absolute_ids, check_vocabulary, fill, hidden_size
from ridgeline.draft.head_files import HeadFiles, read_files
from ridgeline.draft.heads import head_path
from ridgeline.draft.levels import find, growth_for
from ridgeline.errors import ModelLoadError
from ridgeline.kv.store import KVStore
from ridgeline.model.linear import native_kernels, pack, product, weight_bytes
from ridgeline.model.load import LoadedModel, quantized_bits

_BLOCK = re.compile(r"(\d{1,6})\.(\d{1,6})\.linear\.(weight|bias)")
_HEAD = re.compile(r"(\d{1,6})\.(\d{1,6})\.weight")


class MedusaHeads(nn.Module):
    """K heads of residual blocks x + SiLU(Wx + b), each with an LM head or sharing one."""

    def __init__(self, heads: int, blocks: int, hidden: int, vocab_size: int | None) -> None:
        """`vocab_size` None: the target's LM head stands for those of the heads."""
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(blocks)) for _ in range(heads)
        )
        self.heads = nn.ModuleList(
            nn.Linear(hidden, vocab_size or 1, bias=False)
            for _ in range(heads if vocab_size else 0)
        )

    @property
    def layers(self) -> list[list[nn.Linear]]:
        """The residual blocks of each head."""
        return [list(cast("nn.ModuleList", blocks)) for blocks in self.blocks]  # type: ignore[arg-type]

    @property
    def lm_heads(self) -> list[nn.Linear]:
        """The heads' own LM heads; none where they share the target's."""
        return list(self.heads)  # type: ignore[arg-type]

    def hidden(self, x: Tensor) -> Tensor:
        """[K,T,H] for final hidden states [T,H]."""
        states = []
        for blocks in self.layers:
            y = x
            for block in blocks:
                y = y + F.silu(block(y))
            states.append(y)
        return torch.stack(states)


class MedusaDrafter:
    """Drafts from one hidden state, without a pass of its own for each level."""

    name = "medusa"

    def __init__(
        self, network: MedusaHeads, context: DraftContext, draft_ids: Tensor | None = None
    ) -> None:
        target = context.target.model
        self._context = context
        self._draft_ids = draft_ids
        self._heads = len(network.layers)
        self._run, size = _runner(network, context)
        self.needs = Needs(features=(len(target.layers),), weights=size)
        self._hidden: dict[int, Tensor] = {}  # per sequence: [H] of the last token but one

    def bind(self, store: KVStore, first_layer: int) -> None:
        """Nothing to bind: Medusa keeps no keys and values."""

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftProposal]:
        """A tree for every request whose last hidden state is known."""
        known = [r for r in requests if r.sequence.id in self._hidden]
        if not known:
            return [DraftProposal.empty() for _ in requests]
        hidden = torch.stack([self._hidden[r.sequence.id] for r in known])
        logits = self._run(hidden)  # [A,K,V]
        reach = [replace(r, depth=min(r.depth, self._heads)) for r in known]
        growths = [growth_for(r, self._context, width=r.nodes) for r in reach]
        rows = [self._rows(r.sequence) for r in known]
        vocab_size = self._context.target.vocab_size
        found = find(growths, rows, logits.flatten(0, 1), vocab_size, self._draft_ids)
        trees = {}
        for growth, levels in zip(growths, found, strict=True):
            for successors in levels:
                growth.hang([successors] * len(growth.frontier))
            trees[growth.sequence.id] = growth.proposal()
        return [trees.get(r.sequence.id, DraftProposal.empty()) for r in requests]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Keeps the hidden state that predicted each sequence's newest token."""
        for observed in observations:
            if observed.check is not None and observed.sequence.finish_reason is None:
                last = int(observed.check.path[-1])
                self._hidden[observed.sequence.id] = observed.features[0][last].clone()

    def forget(self, sequence_id: int) -> None:
        """Drops the hidden state."""
        self._hidden.pop(sequence_id, None)

    def _rows(self, sequence: TokenSequence) -> Any:
        """What follows the newest token, and the positions after it.

        What stands there in between is not known: processing sees the newest token repeated.
        """
        tokens = np.full(self._heads, sequence.tokens[-1], np.int64)
        tree = TokenTree(tokens, np.arange(-1, self._heads - 1, dtype=np.int32), trunk=1)
        return sequence.rows(tree, np.arange(self._heads))


def _runner(network: MedusaHeads, context: DraftContext) -> tuple[Any, int]:
    """A function from hidden states [A,H] to logits f32[A,K,V], and the bytes of its weights."""
    target = context.target.model
    if target.device.type == "cpu" and native_kernels() is not None:
        heads = _NativeHeads(network.float(), context)
        return heads, heads.nbytes
    dtype = torch.float32 if target.device.type == "cpu" else target.dtype
    network = network.to(target.device, dtype).eval()

    def run(hidden: Tensor) -> Tensor:
        states = network.hidden(hidden.to(dtype))
        if network.heads:
            pairs = zip(network.lm_heads, states, strict=True)
            return torch.stack([head(state) for head, state in pairs], 1).float()
        flat = target.unembed(states.transpose(0, 1).flatten(0, 1))
        return flat.view(len(hidden), -1, flat.shape[-1])

    return run, weight_bytes(network)


class _NativeHeads:
    """The heads as native matrices."""

    def __init__(self, network: MedusaHeads, context: DraftContext) -> None:
        bits = quantized_bits(context.quantize)

        def matrix(linear: nn.Linear) -> Any:
            return pack(linear, bits if linear.in_features % 32 == 0 else None)

        self._blocks = [[matrix(block) for block in blocks] for blocks in network.layers]
        self._heads = [matrix(head) for head in network.lm_heads]
        self._target = context.target.model
        matrices = [*itertools.chain(*self._blocks), *self._heads]
        self.nbytes = sum(matrix.nbytes for matrix in matrices)

    def __call__(self, hidden: Tensor) -> Tensor:
        states = []
        for blocks in self._blocks:
            y = hidden.float()
            for block in blocks:
                y = y + F.silu(product(block, y))
            states.append(y)
        if self._heads:
            pairs = zip(self._heads, states, strict=True)
            return torch.stack([product(head, state) for head, state in pairs], 1)
        flat = self._target.unembed(torch.stack(states, 1).flatten(0, 1))
        return flat.view(len(hidden), -1, flat.shape[-1])


@register("medusa")
def medusa_drafter(argument: str, context: DraftContext) -> MedusaDrafter:
    """`medusa:PATH`, a folder or hub repository in Medusa's own layout.

    Without a path, the heads that are known for the model.

    Raises:
        ConfigError: no head is known, or heads of another model.
        ModelLoadError: the files are missing, damaged or incomplete.
    """
    files = read_files(head_path(argument, "medusa", context.target))
    network, ids = load_medusa(files, context.target)
    on_device = None if ids is None else ids.to(context.target.model.device)
    return MedusaDrafter(network, context, on_device)


def load_medusa(files: HeadFiles, target: LoadedModel) -> tuple[MedusaHeads, Tensor | None]:
    """The heads, and the tokens i64[V] that their logits stand for; None: all ids in order.

    How many there are is read off the tensors: published configurations state it wrongly.

    Raises:
        ModelLoadError, ConfigError: see `medusa_drafter`.
    """
    tensors = dict(files.tensors)
    ids = absolute_ids(files, tensors.pop("d2t", None), target)
    blocks: dict[tuple[int, int, str], Tensor] = {}
    heads: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        if match := _BLOCK.fullmatch(name):
            blocks[int(match[1]), int(match[2]), match[3]] = tensor
        elif match := _HEAD.fullmatch(name):
            heads[int(match[1])] = tensor
        else:
            raise ModelLoadError(f"{files.path} holds {name:.80}, which is no part of Medusa heads")
    if not blocks:
        raise ModelLoadError(f"{files.path} holds no Medusa heads (0.0.linear.weight, ...)")
    places = {(i, j) for i, j, _ in blocks}
    count, depth = (len({place[axis] for place in places}) for axis in (0, 1))
    if places != set(itertools.product(range(count), range(depth))):
        raise ModelLoadError(
            f"{files.path} lacks Medusa heads, or blocks of some: it has {len(places)} blocks up "
            f"to {'.'.join(map(str, max(places)))}.linear, and none may be missing in between"
        )
    width = hidden_size(target)
    if ids is not None and not heads:
        rows = target.model.head_rows(ids)
        heads = dict.fromkeys(range(count), rows)
    if heads and sorted(heads) != list(range(count)):
        raise ModelLoadError(f"{files.path} holds {count} heads and {len(heads)} LM heads")
    check_vocabulary(files, heads.get(0), ids, target)
    with torch.device("meta"):
        network = MedusaHeads(count, depth, width, len(heads[0]) if heads else None)
    state = {f"blocks.{i}.{j}.{kind}": t for (i, j, kind), t in blocks.items()}
    state |= {f"heads.{i}.weight": t for i, t in heads.items()}
    fill(network, state, files, target)
    return network.requires_grad_(False), ids
