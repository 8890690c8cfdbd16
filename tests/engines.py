"""Engines over tiny models, and a drafter that knows the answer, for the tests of whole runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from ridgeline import LLM, SamplingParams
from ridgeline.core.tree import DraftProposal
from ridgeline.draft.base import (
    DraftContext,
    DraftRequest,
    Needs,
    Observation,
    register,
)
from ridgeline.kv.store import KVStore
from ridgeline.model.load import LoadedModel
from ridgeline.model.torch_target import TorchModel
from tests.tiny import BOS, EOS, tiny_model, tiny_tokenizer

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


TRUTH: dict[tuple[int, ...], list[int]] = {}
"""For the oracle drafter: whole texts (prompt and output) by their first tokens."""
KEY = 3


@cache
def tiny_loaded(family: str = "llama", seed: int = 0, **overrides: Any) -> LoadedModel:
    """A tiny model as `load_model` would give it."""
    module = tiny_model(family, seed, **overrides)
    module.set_attn_implementation("ridgeline")
    return LoadedModel(
        name=f"tiny-{family}",
        model=TorchModel(module),
        tokenizer=tiny_tokenizer(),
        end_tokens=frozenset([EOS]),
        context_len=module.config.max_position_embeddings,
        vocab_size=module.config.vocab_size,
    )


def torch_module(loaded: LoadedModel) -> PreTrainedModel:
    """The transformers model inside."""
    assert isinstance(loaded.model, TorchModel)
    return loaded.model.module


def tiny_llm(family: str = "llama", drafter: str = "none", **options: Any) -> LLM:
    """An LLM over a tiny model; the pool holds 4096 tokens unless `options` say otherwise,
    and every step may draft."""
    defaults = {"kv_tokens": 4096, "policy": "fixed"}
    return LLM(tiny_loaded(family), drafter=drafter, **{**defaults, **options})


def random_prompts(count: int, seed: int, longest: int = 40) -> list[list[int]]:
    """Random prompts, every other one repeating itself."""
    rng = random.Random(seed)
    prompts = []
    for i in range(count):
        prompt = [rng.randrange(4, 260) for _ in range(rng.randint(KEY, longest))]
        if i % 2:
            prompt = prompt[: KEY + len(prompt) // 4] * 3
        prompts.append([BOS, *prompt])
    return prompts


class SimpleDrafter:
    """A drafter's methods but `propose`: it has no layers and keeps nothing."""

    needs = Needs()

    def bind(self, store: KVStore, first_layer: int) -> None:
        pass

    def observe(self, observations: Sequence[Observation]) -> None:
        pass

    def forget(self, sequence_id: int) -> None:
        pass


class OracleDrafter(SimpleDrafter):
    """Proposes random trees that often contain a piece of the true continuation (`TRUTH`)."""

    name = "oracle"

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab = vocab_size
        self._rng = random.Random(seed)

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftProposal]:
        return [self._tree(request) for request in requests]

    def _tree(self, request: DraftRequest) -> DraftProposal:
        sequence, rng = request.sequence, self._rng
        truth = TRUTH.get(tuple(sequence.tokens[: sequence.prompt_len]), [])
        ahead = truth[len(sequence.tokens) :]
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        true_tip = -1  # last node of the true path so far
        for node in range(rng.randint(0, request.nodes)):
            on_path = depths[true_tip] if true_tip >= 0 else 0
            if on_path < min(len(ahead), request.depth) and rng.random() < 0.6:
                parent, token = true_tip, ahead[on_path]
            else:
                parent, token = rng.randint(-1, node - 1), rng.randrange(self._vocab)
            depth = 1 + (depths[parent] if parent >= 0 else 0)
            if depth > request.depth or (parent, token) in zip(parents, tokens, strict=True):
                break
            if parent == true_tip and on_path < len(ahead) and token == ahead[on_path]:
                true_tip = node
            tokens.append(token)
            parents.append(parent)
            depths.append(depth)
        return DraftProposal(np.array(tokens, np.int64), np.array(parents, np.int32))


@register("oracle")
def _oracle(argument: str, context: DraftContext) -> OracleDrafter:
    return OracleDrafter(context.target.vocab_size, int(argument or 0))


class FixedDrafter(SimpleDrafter):
    """Proposes the same chain at every step, cut to what is allowed unless it is stubborn."""

    def __init__(self, name: str, tokens: list[int]) -> None:
        self.name = name
        self._tokens = tokens

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftProposal]:
        return [
            DraftProposal.chain(self._tokens[: None if self.name == "stubborn" else request.depth])
            for request in requests
        ]


for _name in ("fixed", "stubborn"):

    @register(_name)
    def _fixed(argument: str, context: DraftContext, name: str = _name) -> FixedDrafter:
        return FixedDrafter(name, [int(token) for token in argument.split(",")])


def plain_output(prompt: list[int], params: SamplingParams) -> list[int]:
    """The undrafted output, made known to the oracle drafter."""
    output = tiny_llm().generate([prompt], params)[0].token_ids
    TRUTH[tuple(prompt)] = prompt + output
    return output


def oracle(nodes: int = 12, depth: int = 8, **options: object) -> LLM:
    return tiny_llm("llama", "oracle:5", nodes=nodes, depth=depth, **options)
