"""A draft model for the tiny model, checked at every proposal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

from ridgeline import EngineConfig, SamplingParams
from ridgeline.core.batch import Entry
from ridgeline.core.sampling import draw_drafts
from ridgeline.core.sequence import Sequence as TokenSequence
from ridgeline.core.tree import DraftProposal, graft
from ridgeline.draft.base import DraftContext, DraftRequest, Observation
from ridgeline.draft.model import ModelDrafter
from ridgeline.engine import Engine
from ridgeline.model.load import LoadedModel
from ridgeline.model.torch_target import TorchModel
from tests.engines import tiny_loaded, torch_module
from tests.tiny import tiny_model

GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.8, top_k=30, seed=5)
PENALTIES = replace(SAMPLED, repetition_penalty=1.3, bad_words=((30,), (40, 41)), min_tokens=4)


@cache
def relative(noise: float = 0.15, **overrides: Any) -> LoadedModel:
    """A draft model for `tiny_loaded()`: its weights with noise, so that it is right at times."""
    loaded = tiny_loaded(**overrides)
    module = tiny_model("llama", **overrides)
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        spread = noise * parameter.std() if parameter.dim() > 1 else 0.0
        parameter.add_(spread * torch.randn(parameter.shape, generator=generator))
    module.set_attn_implementation("ridgeline")
    return replace(loaded, name="relative", model=TorchModel(module))


def padded(loaded: LoadedModel, vocab_size: int) -> LoadedModel:
    """The same model with further ids, unknown to its tokenizer, that it gives weight to."""
    module = tiny_model("llama", vocab_size=vocab_size)
    for ours, theirs in zip(module.parameters(), torch_module(loaded).parameters(), strict=True):
        ours[: len(theirs)] = theirs
    module.set_attn_implementation("ridgeline")
    return replace(loaded, model=TorchModel(module), vocab_size=vocab_size)


class CheckedDrafter(ModelDrafter):
    """Compares each proposal with the draft model run on the whole text, without a cache."""

    def __init__(self, draft: LoadedModel, context: DraftContext) -> None:
        super().__init__(draft, context)
        self.alone = tiny_model("llama", **_shape(draft))
        self.alone.load_state_dict(torch_module(draft).state_dict())
        self.fed: list[list[int]] = []  # positions fed, by forward pass
        self.sizes: list[dict[int, int]] = []  # nodes proposed by sequence, by call
        self.accepted: list[int] = []
        self.behind: list[int] = []  # committed tokens to feed, by sequence and step

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftProposal]:
        for sequence in (request.sequence for request in requests):
            if sequence.output_len > 1:
                self.behind.append(len(sequence.tokens) - sequence.draft_len)
        proposals = super().propose(requests)
        self.sizes.append({r.sequence.id: len(p) for r, p in zip(requests, proposals, strict=True)})
        for request, proposal in zip(requests, proposals, strict=True):
            if len(proposal):
                self._check(request, proposal)
        return proposals

    def _check(self, request: DraftRequest, proposal: DraftProposal) -> None:
        """Every node's children are what the model alone would draft there, in order if drawn."""
        sequence = request.sequence
        sampled = not (self._context.coupled or sequence.params.greedy)
        assert (proposal.q is not None) == sampled
        tree = graft(sequence.tokens[-1:], proposal, self._context.target.vocab_size)
        room = self._draft.context_len - len(sequence.tokens) + 1
        assert tree.depth.max() <= min(request.depth, room)
        inner = np.flatnonzero([len(tree.children(node)) > 0 for node in range(tree.size)])
        paths = [tree.tokens[tree.path(node)].tolist() for node in inner]
        text = [torch.tensor([[*sequence.tokens, *path]]) for path in paths]
        known = [tokens.clamp(max=self._draft.vocab_size - 1) for tokens in text]
        logits = torch.stack([self.alone(input_ids=tokens).logits[0, -1] for tokens in known])
        widest = 32 if not sampled else max(len(tree.children(node)) for node in inner)
        expected = draw_drafts(
            logits,
            [sequence.rows(tree, inner)],
            self._context.target.vocab_size,
            coupled=not sampled,
            count=widest,
        )
        for i, node in enumerate(inner):
            assert not path_ends(paths[i], sequence)
            drafted = tree.tokens[tree.children(node)].tolist()
            found = expected.tokens[i, : len(drafted)].tolist()
            if sampled:
                assert drafted == found, f"sequence {sequence.id}"
            else:
                assert set(drafted) == set(found), f"sequence {sequence.id}"
        if proposal.q is not None:
            assert expected.q is not None
            torch.testing.assert_close(proposal.q[inner], expected.q, atol=1e-4, rtol=1e-3)

    def observe(self, observations: Sequence[Observation]) -> None:
        super().observe(observations)
        for seen in observations:
            assert 0 <= seen.sequence.draft_len <= seen.sequence.kv_len
            if seen.check is not None and seen.tree.drafted:
                self.accepted.append(seen.check.accepted)

    def _forward(self, entries: Sequence[Entry]) -> torch.Tensor:
        self.fed.append([e.kv_len + int(d) for e in entries for d in e.tree.depth])
        return super()._forward(entries)


def path_ends(path: Sequence[int], sequence: TokenSequence) -> bool:
    """Whether the text ends on the way."""
    return any(token in sequence.end_tokens for token in path)


def _shape(loaded: LoadedModel) -> dict[str, int]:
    config = torch_module(loaded).config
    return {name: getattr(config, name) for name in ("vocab_size", "max_position_embeddings")}


def start(
    draft: LoadedModel | None = None, target: LoadedModel | None = None, **options: Any
) -> tuple[Engine, CheckedDrafter]:
    config = EngineConfig(**{"kv_tokens": 2048, "depth": 4, "policy": "fixed", **options})
    context = DraftContext(
        target=target or tiny_loaded(),
        coupled=config.verify == "match",
        sampled_siblings=config.verify == "rejection",
        depth=config.depth,
        nodes=config.draft_nodes,
        max_batch_tokens=config.max_batch_tokens,
        dtype="float32",
        confidence=options.get("confidence", 0.0),
    )
    drafter = CheckedDrafter(draft or relative(), context)
    return Engine(context.target, drafter, config), drafter


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        engine.pool.check(s.table for s in engine.scheduler.running)


def run(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[TokenSequence]:
    sequences = [s for prompt in prompts for s in engine.add(prompt, params)]
    finish(engine)
    assert engine.pool.used == 0
    return sequences
