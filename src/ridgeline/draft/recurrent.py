"""Drafting with a recurrent head: EAGLE, EAGLE-3 and MTP modules share all of it.

The head's entry for token i reads the target's hidden state of token i-1 and the embedding of token
i, and predicts token i+1. So it lies at token i's own slot, is known as soon as the target has
computed token i-1, and depends on tokens up to i alone: a block of the cache can be shared by its
tokens' hash. Token 0 has no entry, and positions count from token 1, as the heads were trained.

Drafted tokens' entries are computed from the head's own hidden states. They are given up after the
step, and the accepted tokens' entries are computed anew from the target's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.batch import Entry, pack
from ridgeline.core.sequence import Sequence as TokenSequence
from ridgeline.core.tree import DraftProposal, TokenTree
from ridgeline.draft.base import DraftContext, DraftRequest, Needs, Observation
from ridgeline.draft.checkpoint import LoadedHead
from ridgeline.draft.growth import Growth
from ridgeline.draft.levels import grow, growth_for
from ridgeline.draft.paged_head import PagedHead, paged_head
from ridgeline.kv.store import KVStore
from ridgeline.model.load import quantized_bits

MOST_WAITING = 64
"""Hidden states of a sequence that may wait for the next draft before its entries are computed."""


class RecurrentDrafter:
    """Drafts trees with one recurrent head, all requests together, one pass per level."""

    def __init__(
        self,
        name: str,
        head: PagedHead,
        features: tuple[int, ...],
        context: DraftContext,
        draft_ids: Tensor | None = None,
    ) -> None:
        """`draft_ids` i64[Vd] are the tokens that the head's logits stand for; None: all ids."""
        self.name = name
        self.needs = Needs(features=features, kv=(head.kv,))
        self._head = head
        self._context = context
        self._draft_ids = draft_ids
        # Per sequence: hidden states [P,H] that entries of draft_len, draft_len + 1, ... will read.
        self._waiting: dict[int, Tensor] = {}

    def bind(self, store: KVStore, first_layer: int) -> None:
        """Runs the head over the store's layer `first_layer`."""
        self._head.bind(store, first_layer)

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftProposal]:
        """A tree for every request whose last token's hidden state is known."""
        growths = [
            growth_for(request, self._context) if request.sequence.id in self._waiting else None
            for request in requests
        ]
        active = [growth for growth in growths if growth is not None]
        if not active:
            return [DraftProposal.empty() for _ in requests]
        sequences = [growth.sequence for growth in active]
        logits, hidden = self._feed(sequences, [len(s.tokens) for s in sequences])
        while active:
            parts = torch.split(hidden, [len(growth.frontier) for growth in active])
            for growth, part in zip(active, parts, strict=True):
                growth.keep_hidden(growth.frontier, part)
            grow(active, logits, self._context.target.vocab_size, self._draft_ids)
            active = [growth for growth in active if growth.frontier]
            if active:
                logits, hidden = self._expand(active)
        return [DraftProposal.empty() if g is None else g.proposal() for g in growths]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Takes the target's hidden states of the accepted path; computes prompts' entries."""
        long = []
        for observed in observations:
            sequence = observed.sequence
            if sequence.finish_reason is not None:
                continue
            self._take(observed)
            if observed.tree.trunk > 1 or len(self._waiting[sequence.id]) > MOST_WAITING:
                long.append(sequence)
        # Slots exist for tokens whose keys the target holds: the entries of the others wait.
        held = [max(sequence.draft_len, 1) for sequence in long]
        long = [s for s, first in zip(long, held, strict=True) if s.kv_len > first]
        if long:
            self._feed(long, [sequence.kv_len for sequence in long], logits=False)

    def forget(self, sequence_id: int) -> None:
        """Drops the hidden states that wait."""
        self._waiting.pop(sequence_id, None)

    def _take(self, observed: Observation) -> None:
        sequence, tree = observed.sequence, observed.tree
        nodes = np.arange(tree.trunk)
        if observed.check is not None:
            nodes = np.concatenate([nodes, observed.check.path[1:]])
        at = torch.from_numpy(nodes).to(self._head.device)
        features = torch.cat([layer[at] for layer in observed.features], -1)
        hidden = self._head.hidden_from(features)
        first = max(sequence.draft_len, 1) - 1  # the token whose hidden state is read next
        waiting = self._waiting.get(sequence.id)
        if waiting is None or first + len(waiting) != observed.start:
            # The first of a text, or after a shared prefix: the hidden states before are not known.
            waiting = hidden.new_zeros(max(observed.start - first, 0), hidden.shape[1])
            hidden = hidden[max(first - observed.start, 0) :]
        self._waiting[sequence.id] = torch.cat([waiting, hidden])

    def _feed(
        self, sequences: Sequence[TokenSequence], ends: Sequence[int], logits: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Computes the entries of all tokens before `ends`; logits and hidden states of the last.

        Returns:
            f32[A,Vd] and [A,H]; of no rows without `logits`.
        """
        entries, hidden = [], []
        for sequence, end in zip(sequences, ends, strict=True):
            first = max(sequence.draft_len, 1)
            tree = TokenTree.plain(sequence.tokens[first:end])
            keep = np.arange(tree.root, tree.size) if logits else np.empty(0, np.int64)
            entries.append(Entry(tree, first - 1, sequence.table.slots(1, end), keep))
            waiting = self._waiting[sequence.id]
            hidden.append(waiting[: tree.size])
            self._waiting[sequence.id] = waiting[tree.size :]
            sequence.draft_len = end
        return self._head.run(pack(entries, self._head.device), torch.cat(hidden))

    def _expand(self, active: Sequence[Growth]) -> tuple[Tensor, Tensor]:
        """Logits f32[F,Vd] and hidden states [F,H] of the frontiers' nodes."""
        entries, hidden = [], []
        for growth in active:
            entries += growth.entries(first=1)
            hidden += growth.parents_hidden()
        return self._head.run(pack(entries, self._head.device), torch.stack(hidden))


def drafter_of(name: str, head: LoadedHead, context: DraftContext) -> RecurrentDrafter:
    """A drafter with a loaded head, on the native path where there is one.

    Raises:
        ConfigError: `context.quantize` is no such format.
    """
    target = context.target.model
    paged = paged_head(head.network, target, quantized_bits(context.quantize))
    ids = None if head.draft_ids is None else head.draft_ids.to(target.device)
    return RecurrentDrafter(name, paged, head.network.shape.features, context, ids)
