"""Drafting with recurrent heads: EAGLE, EAGLE-3 and MTP modules share all of it.

A head's entry for token i reads the target's hidden state of token i-1 and the embedding of token
i, and predicts token i+1. So it lies at token i's own slot, is known as soon as the target has
computed token i-1, and depends on tokens up to i alone: a block of the cache can be shared by its
tokens' hash. Token 0 has no entry, and positions count from token 1, as the heads were trained.

Where there are several (MTP modules), one reads what the one before it gave: module k's entry for
token i reads module k-1's hidden state of token i-1, which makes it a function of tokens up to i
too, predicts token i+1, and exists from token k+1 on. This is how they are trained (DeepSeek-V3,
arXiv 2412.19437, section 2.2). Level s of a draft is predicted by module s mod n; below a drafted
token, whose target state is unknown, module 0 reads the hidden state that predicted.

Drafted tokens' entries are given up after the step, and the accepted tokens' entries are computed
anew from the target's hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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

MOST_WAITING = 1024
"""Hidden states of a sequence that may wait for the next draft before its entries are computed:
where nothing is drafted meanwhile they cost memory alone."""


@dataclass
class _Known:
    """What the entries of one sequence that are still to be computed will read."""

    token: int
    """the one before the first such entry's"""
    target: Tensor
    """[P,H]: the target's hidden states of `token`, the token after it, ..."""
    modules: Tensor
    """[n-1,H]: those that all modules but the last gave for `token`; zeros where unknown"""
    later: list[tuple[Tensor, ...]] = field(default_factory=list)
    """of the tokens after those of `target`, as the target gave them: by step, and by layer"""
    count: int = 0
    """tokens whose states are in `target` or `later`"""


class RecurrentDrafter:
    """Drafts trees with recurrent heads, all requests together, level by level."""

    def __init__(
        self,
        name: str,
        heads: Sequence[PagedHead],
        features: tuple[int, ...],
        context: DraftContext,
        draft_ids: Sequence[Tensor | None],
    ) -> None:
        """`draft_ids` i64[Vd] are the tokens that a head's logits stand for; None: all ids."""
        self.name = name
        self.needs = Needs(
            features=features,
            kv=tuple(head.kv for head in heads),
            weights=sum(head.nbytes for head in heads),
        )
        self._heads = heads
        self._context = context
        self._draft_ids = draft_ids
        self._known: dict[int, _Known] = {}

    def bind(self, store: KVStore, first_layer: int) -> None:
        """Runs the heads over the store's layers from `first_layer` on."""
        for layer, head in enumerate(self._heads, start=first_layer):
            head.bind(store, layer)

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftProposal]:
        """A tree for every request whose last token has an entry in every head."""
        growths = [
            growth_for(request, self._context) if self._ready(request.sequence) else None
            for request in requests
        ]
        active = [growth for growth in growths if growth is not None]
        if not active:
            return [DraftProposal.empty() for _ in requests]
        sequences = [growth.sequence for growth in active]
        logits, hidden = self._feed(sequences, [len(s.tokens) for s in sequences])
        level = 0
        while active:
            parts = torch.split(hidden, [len(growth.frontier) for growth in active])
            for growth, part in zip(active, parts, strict=True):
                growth.keep_hidden(growth.frontier, part)
            ids = self._draft_ids[level % len(self._heads)]
            grow(active, logits, self._context.target.vocab_size, ids)
            active = [growth for growth in active if growth.frontier]
            level += 1
            if active:
                logits, hidden = self._expand(active, level)
        return [DraftProposal.empty() if g is None else g.proposal() for g in growths]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Takes the target's hidden states of the accepted path; computes prompts' entries."""
        plain = all(observed.tree.size == 1 for observed in observations)
        running = [o for o in observations if o.sequence.finish_reason is None]
        for observed in running:
            self._take(observed, plain)
        long = [observed.sequence for observed in running if observed.tree.trunk > 1]
        if not long and running:  # of those that wait, one a step, so that none takes long
            most = max(running, key=lambda o: self._known[o.sequence.id].count).sequence
            long = [most] if self._known[most.id].count > MOST_WAITING else []
        # Slots exist for tokens whose keys the target holds: the entries of the others wait.
        held = [max(sequence.draft_len, 1) for sequence in long]
        long = [s for s, first in zip(long, held, strict=True) if s.kv_len > first]
        if long:
            self._feed(long, [sequence.kv_len for sequence in long], logits=False)

    def forget(self, sequence_id: int) -> None:
        """Drops the hidden states that wait."""
        self._known.pop(sequence_id, None)

    def _ready(self, sequence: TokenSequence) -> bool:
        """Whether all hidden states are known that the entries up to the last token will read."""
        known, last = self._known.get(sequence.id), len(sequence.tokens) - 1
        if known is None or last < len(self._heads):
            return False
        return known.token == _before(sequence) and known.token + known.count == last

    def _take(self, observed: Observation, plain: bool) -> None:
        """`plain`: all sequences had a single node, and what is kept keeps no rows of others."""
        sequence, tree, features = observed.sequence, observed.tree, observed.features
        if not plain:
            nodes = np.arange(tree.trunk)
            if observed.check is not None:
                nodes = np.concatenate([nodes, observed.check.path[1:]])
            at = torch.from_numpy(nodes).to(self._heads[0].device)
            features = tuple(layer.index_select(0, at) for layer in features)
        token = _before(sequence)
        known = self._known.get(sequence.id)
        if known and known.token == token and token + known.count == observed.start:
            known.later.append(features)
            known.count += len(features[0])
            return
        # The first of a text, or after a shared prefix: the hidden states before are not known.
        hidden = self._hidden([features])
        before = hidden.new_zeros(max(observed.start - token, 0), hidden.shape[1])
        target = torch.cat([before, hidden[max(token - observed.start, 0) :]])
        modules = hidden.new_zeros(len(self._heads) - 1, hidden.shape[1])
        self._known[sequence.id] = _Known(token, target, modules, count=len(target))

    def _hidden(self, steps: Sequence[tuple[Tensor, ...]]) -> Tensor:
        """[T,H] of the features of so many tokens."""
        layers = [torch.cat(layer) for layer in zip(*steps, strict=True)]
        return self._heads[0].hidden_from(torch.cat(layers, -1))

    def _settle(self, known: Sequence[_Known]) -> None:
        """Makes hidden states of what came later, of all sequences together."""
        waiting = [k for k in known if k.later]
        if not waiting:
            return
        sizes = [k.count - len(k.target) for k in waiting]
        hidden = self._hidden([step for k in waiting for step in k.later])
        for k, later in zip(waiting, torch.split(hidden, sizes), strict=True):
            k.target, k.later = torch.cat([k.target, later]), []

    def _feed(
        self, sequences: Sequence[TokenSequence], ends: Sequence[int], logits: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Computes the entries of all tokens before `ends`, in every head.

        Returns:
            Logits f32[A,Vd] of the last ones in the first head, and what the heads read below
            them, [A,n,H]; of no meaning without `logits`.
        """
        known = [self._known[sequence.id] for sequence in sequences]
        self._settle(known)
        firsts = [k.token + 1 for k in known]
        inputs = [
            k.target[: end - first] for k, first, end in zip(known, firsts, ends, strict=True)
        ]
        predicted, outputs = torch.empty(0), []
        for index, head in enumerate(self._heads):
            entries, sizes = [], []
            for sequence, first, end in zip(sequences, firsts, ends, strict=True):
                start = max(first, index + 1)
                sizes.append(max(end - start, 0))
                if start < end:
                    tree = TokenTree.plain(sequence.tokens[start:end])
                    predicts = logits and index == 0
                    keep = np.arange(tree.root if predicts else tree.size, tree.size)
                    slots = sequence.table.slots(index + 1, end)
                    entries.append(Entry(tree, start - index - 1, slots, keep))
            hidden = torch.cat(inputs)
            if entries:
                result, hidden = head.run(pack(entries, head.device), hidden)
                predicted = result if index == 0 else predicted
            rows = torch.split(hidden, sizes)
            nothing = hidden.new_zeros(1, hidden.shape[1])
            outputs.append(torch.cat([r[-1:] if len(r) else nothing for r in rows]))
            # The next head starts one token later, or at the same one and reads what was kept.
            inputs = [
                torch.cat([k.modules[index : min(index + 1, k.token)], r[:-1]])
                for k, r in zip(known, rows, strict=True)
            ]
        for sequence, k, end, last in zip(
            sequences, known, ends, torch.stack(outputs, 1), strict=True
        ):
            k.target = k.target[end - k.token - 1 :]
            k.token, k.modules, k.count = end - 1, last[:-1], len(k.target)
            sequence.draft_len = end
        return predicted, _below(0, outputs)

    def _expand(self, active: Sequence[Growth], level: int) -> tuple[Tensor, Tensor]:
        """Logits f32[F,Vd] of the frontiers' nodes, and what the heads read below them [F,n,H]."""
        used, count = level % len(self._heads), len(self._heads)
        # A head that neither this level nor a later one is predicted by needs no entries any more.
        wanted = {later % count for later in range(level, self._context.depth)}
        hidden = torch.stack([h for growth in active for h in growth.parents_hidden()])
        logits, outputs = torch.empty(0), list(hidden.unbind(1))
        for index in sorted(wanted):
            entries = [e for growth in active for e in growth.entries(first=index + 1)]
            batch = pack(entries, self._heads[index].device)
            if index == used:
                logits, outputs[index] = self._heads[index].run(batch, hidden[:, index])
            else:
                batch = replace(batch, keep=batch.keep[:0])
                _, outputs[index] = self._heads[index].run(batch, hidden[:, index])
        return logits, _below(used, outputs)


def _before(sequence: TokenSequence) -> int:
    """The token before the first one whose entry is still to be computed."""
    return max(sequence.draft_len, 1) - 1


def _below(used: int, outputs: Sequence[Tensor]) -> Tensor:
    """[F,n,H]: what the heads read below rows that head `used` predicted from.

    Args:
        used: its number.
        outputs: [F,H] of every head.
    """
    return torch.stack([outputs[used], *outputs[:-1]], 1)


def drafter_of(name: str, heads: Sequence[LoadedHead], context: DraftContext) -> RecurrentDrafter:
    """A drafter with loaded heads, on the native path where there is one.

    Raises:
        ConfigError: `context.quantize` is no such format.
    """
    target, bits = context.target.model, quantized_bits(context.quantize)
    paged = [paged_head(head.network, target, bits) for head in heads]
    ids = [None if head.draft_ids is None else head.draft_ids.to(target.device) for head in heads]
    return RecurrentDrafter(name, paged, heads[0].network.shape.features, context, ids)
