"""A standalone draft model: a smaller model of the target's vocabulary writes ahead.

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (arXiv
2211.17192). The draft model's keys and values are further layers of the target's cache over the
same slots, so that sharing, rollback and preemption cover both models alike.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ridgeline.core.batch import Entry, pack
from ridgeline.core.sampling import Rows, draw_drafts
from ridgeline.core.sequence import Sequence as TokenSequence
from ridgeline.core.tree import DraftProposal, TokenTree
from ridgeline.draft.base import DraftContext, DraftRequest, Needs, Observation, register
from ridgeline.draft.candidates import SIBLINGS, candidates
from ridgeline.errors import ConfigError
from ridgeline.kv.store import KVStore
from ridgeline.model.load import LoadedModel, load_model

SAMPLES = ("Hello, world! 1234", "def f(x):\n    return x**2  # é", "自然语言 🙂 naïve")
"""Texts that equal tokenizers encode alike: a vocabulary alone does not show how it is used."""


class ModelDrafter:
    """Drafts a chain with a model of its own, all requests together, one forward pass per depth.

    A chain ends early where the draft model gives it less than `confidence`; a further pass would
    hardly pay. Nodes left over become siblings of its nodes where they are likeliest. Sampled
    drafts for a rule that needs their distribution stay a chain of full length.
    """

    name = "model"

    def __init__(self, draft: LoadedModel, context: DraftContext) -> None:
        self.needs = Needs(kv=draft.model.layers, weights=draft.model.nbytes)
        self._draft = draft
        self._context = context
        self._fed: dict[int, int] = {}  # per sequence: chain nodes whose keys and values are held

    def bind(self, store: KVStore, first_layer: int) -> None:
        """Runs the draft model over the store's layers from `first_layer` on."""
        self._model = self._draft.model.bind(store, first_layer)

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftProposal]:
        """A chain, or a chain with siblings, for every request whose tokens the model has seen.

        Tokens it has not seen come first, at most `max_batch_tokens` of all requests together; a
        request left with some (a long prompt, in its first steps) gets an empty proposal.
        """
        chains = [self._start(request) for request in requests]
        active, logits = self._catch_up([chain for chain in chains if chain.length > 0])
        while active:
            self._extend(active, logits)
            active = [chain for chain in active if not chain.complete]
            if active:
                logits = self._forward([chain.entry() for chain in active])
        for chain in chains:
            self._fed[chain.sequence.id] = max(len(chain.tokens) - 1, 0)
        return [chain.proposal() for chain in chains]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Counts what the draft model's layers hold of the accepted path; computes prompts.

        The engine has moved that path's rows in every layer. Held are the chain's nodes except its
        last one, which nothing was drafted below.
        """
        for observed in observations:
            sequence, tree = observed.sequence, observed.tree
            fed = self._fed.pop(sequence.id, 0)
            holds_root = sequence.draft_len == observed.start + tree.trunk
            if observed.check is not None and holds_root:
                held = int((observed.check.path[1:] < tree.trunk + fed).sum())
                sequence.draft_len = min(sequence.draft_len + held, sequence.kv_len)
        self._prefill([o.sequence for o in observations if o.tree.trunk > 1])

    def forget(self, sequence_id: int) -> None:
        """Drops what is kept of a step that the sequence did not live to see."""
        self._fed.pop(sequence_id, None)

    def _start(self, request: DraftRequest) -> _Chain:
        """A chain without nodes; of length 0 once the sequence outgrows the draft's context."""
        room = self._draft.context_len - len(request.sequence.tokens) + 1
        length = max(0, min(request.depth, request.nodes, room))
        needs_q = not (self._context.coupled or request.sequence.params.greedy)
        return _Chain(request.sequence, length, request.nodes, needs_q, self._context.confidence)

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

    def _catch_up(self, chains: list[_Chain]) -> tuple[list[_Chain], Tensor]:
        """Feeds committed tokens; the chains that may start, and their first logits f32[A,V].

        Those that lack the fewest go first, so that a long prompt delays nobody's drafts.
        """
        budget = self._context.max_batch_tokens
        entries, fed = [], []
        for chain in sorted(chains, key=lambda chain: chain.unseen):
            sequence, count = chain.sequence, min(chain.unseen, budget)
            if count == 0:
                break
            budget -= count
            start = len(sequence.tokens) - chain.unseen
            whole = count == chain.unseen
            entries.append(_trunk(sequence, start, start + count, logits=whole))
            fed.append(chain)
        if not entries:
            return [], torch.empty(0)
        logits = self._forward(entries)
        for chain, entry in zip(fed, entries, strict=True):
            chain.sequence.draft_len = len(entry.slots)
        return [chain for chain, entry in zip(fed, entries, strict=True) if len(entry.keep)], logits

    def _forward(self, entries: Sequence[Entry]) -> Tensor:
        batch = pack(entries, self._model.store.device)
        # The target may emit an id that only its own padded vocabulary has.
        known = batch.tokens.clamp(max=self._draft.vocab_size - 1)
        return self._model.forward(replace(batch, tokens=known)).logits

    def _extend(self, chains: list[_Chain], logits: Tensor) -> None:
        """Adds to each chain the node that its row of the logits predicts."""
        rows = [chain.rows() for chain in chains]
        vocab_size = self._context.target.vocab_size
        point_masses = not any(chain.needs_q for chain in chains)
        tokens, q = draw_drafts(logits, rows, vocab_size, coupled=point_masses)
        drawn = tokens.tolist()
        if not all(chain.needs_q for chain in chains):
            for chain, token, ids, scores in zip(
                chains, drawn, *candidates(logits[:, :vocab_size], rows), strict=True
            ):
                chain.weigh(token, ids, scores)
        for i, (chain, token) in enumerate(zip(chains, drawn, strict=True)):
            chain.tokens.append(token)
            if q is not None and chain.needs_q:
                chain.q.append(q[i])


def _trunk(sequence: TokenSequence, start: int, end: int, logits: bool) -> Entry:
    """Committed tokens start..end-1; logits of the last one if asked for."""
    tree = TokenTree.plain(sequence.tokens[start:end])
    keep = np.arange(tree.root, tree.size) if logits else np.empty(0, np.int64)
    return Entry(tree, start, sequence.table.slots(0, end), keep)


class _Chain:
    """The proposal for one request while it grows."""

    def __init__(
        self, sequence: TokenSequence, length: int, nodes: int, needs_q: bool, confidence: float
    ) -> None:
        self.sequence = sequence
        self.length = length
        self.nodes = nodes
        self.needs_q = needs_q
        # What a stopping rule sees must not bear on q, so sampled chains have their full length.
        self._least = math.log(confidence) if confidence and not needs_q else -math.inf
        self.tokens: list[int] = []
        self.q: list[Tensor] = []
        self._logprob = 0.0
        self._siblings: list[tuple[float, int, int]] = []  # log-probability of path, parent, token

    @property
    def unseen(self) -> int:
        """Committed tokens to feed; always the last one, for its logits."""
        committed = len(self.sequence.tokens)
        return committed - min(self.sequence.draft_len, committed - 1)

    @property
    def complete(self) -> bool:
        """Whether the chain has its length, has ended the text or will hardly be accepted."""
        return (
            len(self.tokens) == self.length
            or self.tokens[-1] in self.sequence.end_tokens
            or self._logprob < self._least
        )

    def rows(self) -> Rows:
        """The row that predicts the chain's next node."""
        tokens = np.array([self.sequence.tokens[-1], *self.tokens], np.int64)
        tree = TokenTree(tokens, np.arange(-1, len(self.tokens), dtype=np.int32), trunk=1)
        return self.sequence.rows(tree, np.array([len(self.tokens)]))

    def entry(self) -> Entry:
        """Feeds the newest node, at its slot."""
        kv_len = len(self.sequence.tokens) + len(self.tokens) - 1
        slots = self.sequence.table.slots(0, kv_len + 1)
        return Entry(TokenTree.plain(self.tokens[-1:]), kv_len, slots, np.zeros(1, np.int64))

    def weigh(self, token: int, ids: list[int], scores: list[float]) -> None:
        """Remembers what else could have been drafted in place of `token`, the next node."""
        chosen = -np.inf
        for other, score in zip(ids, scores, strict=True):
            if other == token:
                chosen = score
            else:
                path = (self._logprob + score, len(self.tokens) - 1, other)
                self._siblings.append(path)
        self._logprob += chosen

    def proposal(self) -> DraftProposal:
        """The chain, and behind it the likeliest siblings of its nodes."""
        if self.q:
            return DraftProposal.chain(self.tokens, torch.stack(self.q))
        least = self._least + math.log(SIBLINGS)
        worth = [sibling for sibling in self._siblings if sibling[0] >= least]
        siblings = heapq.nlargest(self.nodes - len(self.tokens), worth)
        tokens = [*self.tokens, *(token for _, _, token in siblings)]
        parents = [*range(-1, len(self.tokens) - 1), *(parent for _, parent, _ in siblings)]
        return DraftProposal(np.array(tokens, np.int64), np.array(parents, np.int32))


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
