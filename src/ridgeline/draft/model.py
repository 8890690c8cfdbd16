"""A standalone draft model: a smaller model of the target's vocabulary writes ahead.

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (arXiv
2211.17192). The draft model's keys and values are further layers of the target's cache over the
same slots, so that sharing, rollback and preemption cover both models alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ridgeline.core.batch import Entry, pack
from ridgeline.core.sequence import Sequence as TokenSequence
from ridgeline.core.tree import DraftProposal, TokenTree
from ridgeline.draft.base import DraftContext, DraftRequest, Needs, Observation, register
from ridgeline.draft.growth import Growth
from ridgeline.draft.levels import grow, growth_for
from ridgeline.errors import ConfigError
from ridgeline.kv.store import KVStore
from ridgeline.model.load import LoadedModel, load_model

SAMPLES = ("Hello, world! 1234", "def f(x):\n    return x**2  # é", "自然语言 🙂 naïve")
"""Texts that equal tokenizers encode alike: a vocabulary alone does not show how it is used."""


class ModelDrafter:
    """Drafts trees with a model of its own, all requests together, one forward pass per level."""

    name = "model"

    def __init__(self, draft: LoadedModel, context: DraftContext) -> None:
        self.needs = Needs(kv=draft.model.layers, weights=draft.model.nbytes)
        self._draft = draft
        self._context = context
        self._held: dict[int, frozenset[int]] = {}  # per sequence: see `Growth.held`

    def bind(self, store: KVStore, first_layer: int) -> None:
        """Runs the draft model over the store's layers from `first_layer` on."""
        self._model = self._draft.model.bind(store, first_layer)

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftProposal]:
        """A tree for every request whose tokens the model has seen.

        Tokens it has not seen come first, at most `max_batch_tokens` of all requests together; a
        request left with some (a long prompt, in its first steps) gets an empty proposal.
        """
        growths = [self._start(request) for request in requests]
        active, logits = self._catch_up([growth for growth in growths if growth.depth > 0])
        while active:
            grow(active, logits, self._context.target.vocab_size)
            active = [growth for growth in active if growth.frontier]
            if active:
                logits = self._forward([e for growth in active for e in growth.entries()])
        for growth in growths:
            self._held[growth.sequence.id] = growth.held()
        return [growth.proposal() for growth in growths]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Counts what the draft model's layers hold of the accepted path; computes prompts.

        The engine has moved that path's rows in every layer. Not held are nodes that nothing was
        drafted below.
        """
        for observed in observations:
            sequence, tree = observed.sequence, observed.tree
            held = self._held.pop(sequence.id, frozenset())
            holds_root = sequence.draft_len == observed.start + tree.trunk
            if observed.check is not None and holds_root:
                path = (observed.check.path[1:] - tree.trunk).tolist()
                count = sum(1 for _ in takewhile(held.__contains__, path))
                sequence.draft_len = min(sequence.draft_len + count, sequence.kv_len)
        self._prefill([o.sequence for o in observations if o.tree.trunk > 1])

    def forget(self, sequence_id: int) -> None:
        """Drops what is kept of a step that the sequence did not live to see."""
        self._held.pop(sequence_id, None)

    def _start(self, request: DraftRequest) -> Growth:
        """A tree without nodes; of depth 0 once the sequence outgrows the draft's context."""
        room = self._draft.context_len - len(request.sequence.tokens) + 1
        depth = max(0, min(request.depth, room))
        return growth_for(replace(request, depth=depth), self._context)

    def _prefill(self, sequences: Sequence[TokenSequence]) -> None:
        """Computes the chunks that the target has just computed, within the same token budget.

        So the first draft need not wait for a prompt, and both models' blocks can be shared alike.
        """
        entries, fed = [], []
        for sequence in sequences:
            end = min(sequence.kv_len, self._draft.context_len)
            if sequence.draft_len < end and sequence.finish_reason is None:
                entries.append(_trunk(sequence, sequence.draft_len, end, logits=False))
                fed.append(sequence)
        if entries:
            self._forward(entries)
        for sequence, entry in zip(fed, entries, strict=True):
            sequence.draft_len = len(entry.slots)

    def _catch_up(self, growths: list[Growth]) -> tuple[list[Growth], Tensor]:
        """Feeds committed tokens; the trees that may start, and their first logits f32[A,V].

        Those that lack the fewest go first, so that a long prompt delays nobody's drafts.
        """
        budget = self._context.max_batch_tokens
        entries, fed = [], []
        for growth in sorted(growths, key=lambda growth: _unseen(growth.sequence)):
            sequence, unseen = growth.sequence, _unseen(growth.sequence)
            count = min(unseen, budget)
            if count == 0:
                break
            budget -= count
            start = len(sequence.tokens) - unseen
            entries.append(_trunk(sequence, start, start + count, logits=count == unseen))
            fed.append(growth)
        if not entries:
            return [], torch.empty(0)
        logits = self._forward(entries)
        for growth, entry in zip(fed, entries, strict=True):
            growth.sequence.draft_len = len(entry.slots)
        return [growth for growth, e in zip(fed, entries, strict=True) if len(e.keep)], logits

    def _forward(self, entries: Sequence[Entry]) -> Tensor:
        batch = pack(entries, self._model.store.device)
        # The target may emit an id that only its own padded vocabulary has.
        known = batch.tokens.clamp(max=self._draft.vocab_size - 1)
        return self._model.forward(replace(batch, tokens=known)).logits


def _unseen(sequence: TokenSequence) -> int:
    """Committed tokens to feed; always the last one, for its logits."""
    committed = len(sequence.tokens)
    return committed - min(sequence.draft_len, committed - 1)


def _trunk(sequence: TokenSequence, start: int, end: int, logits: bool) -> Entry:
    """Committed tokens start..end-1; logits of the last one if asked for."""
    tree = TokenTree.plain(sequence.tokens[start:end])
    keep = np.arange(tree.root, tree.size) if logits else np.empty(0, np.int64)
    return Entry(tree, start, sequence.table.slots(0, end), keep)


def _difference(ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase) -> str | None:
    """What makes token ids mean different things in two tokenizers; None if nothing does.

    Ids that only one of the two knows (padding of the vocabulary) and added tokens, which
    fine-tuning renames, may differ: they cost acceptance at most.
    """
    added = {*ours.added_tokens_decoder, *theirs.added_tokens_decoder}
    known = {index: token for token, index in ours.get_vocab().items() if index not in added}
    for token, index in theirs.get_vocab().items():
        if known.get(index, token) != token:
            return f"token {index} is {known[index]!r} in one and {token!r} in the other"
    for text in SAMPLES:
        plain, drafted = (t.encode(text, add_special_tokens=False) for t in (ours, theirs))
        if plain != drafted:
            return f"they encode {text!r} differently"
    return None


@register("model")
def model_drafter(argument: str, context: DraftContext) -> ModelDrafter:
    """`model:PATH`, where PATH is whatever a target model may be loaded from.

    Raises:
        ConfigError: no path, or a model with another tokenizer.
        ModelLoadError, UnsupportedModelError: the model cannot be loaded or run.
    """
    if not argument:
        raise ConfigError("drafter 'model' needs a model to draft with: model:PATH")
    target = context.target
    draft = load_model(
        argument,
        context.dtype,
        str(target.model.device),
        quantize=context.quantize,
        default_dtype=target.model.dtype,
    )
    if target.tokenizer is not None and draft.tokenizer is not None:
        difference = _difference(target.tokenizer, draft.tokenizer)
        if difference:
            raise ConfigError(
                f"draft model {draft.name} has another tokenizer than the target {target.name}: "
                f"{difference}; use a draft model of the target's own family"
            )
    return ModelDrafter(draft, context)
