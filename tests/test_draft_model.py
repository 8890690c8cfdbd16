"""The draft model: every proposal is what the draft model alone would have written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Regex, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from ridgeline import ConfigError, DraftError, EngineConfig, ModelLoadError, SamplingParams
from ridgeline.core.batch import Entry
from ridgeline.core.sampling import draw_drafts
from ridgeline.core.sequence import Sequence as TokenSequence
from ridgeline.core.tree import DraftProposal, graft
from ridgeline.draft import model as model_module
from ridgeline.draft.base import DraftContext, DraftRequest, Observation, create_drafter
from ridgeline.draft.model import ModelDrafter
from ridgeline.engine import Engine
from ridgeline.model.load import LoadedModel
from ridgeline.model.torch_target import TorchModel
from tests.engines import random_prompts, tiny_loaded, torch_module
from tests.simulation import assert_counts
from tests.tiny import EOS, tiny_model, tiny_tokenizer

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

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftProposal]:
        proposals = super().propose(requests)
        self.sizes.append({r.sequence.id: len(p) for r, p in zip(requests, proposals, strict=True)})
        for request, proposal in zip(requests, proposals, strict=True):
            if len(proposal):
                self._check(request, proposal)
        return proposals

    def _check(self, request: DraftRequest, proposal: DraftProposal) -> None:
        sequence = request.sequence
        chained = proposal.parents == np.arange(-1, len(proposal) - 1)
        chain = proposal.tokens[: np.flatnonzero(~chained)[0] if not chained.all() else None]
        room = self._draft.context_len - len(sequence.tokens) + 1
        wanted = min(request.depth, request.nodes, room)
        ended = chain[-1] in sequence.end_tokens or self._context.confidence > 0
        assert len(chain) == wanted or (ended and len(chain) < wanted)
        needs_q = not (self._context.coupled or sequence.params.greedy)
        assert (proposal.q is not None) == needs_q
        text = torch.tensor([[*sequence.tokens, *chain[:-1].tolist()]])
        text = text.clamp(max=self._draft.vocab_size - 1)
        logits = self.alone(input_ids=text).logits[0, -len(chain) :]
        tree = graft(sequence.tokens[-1:], DraftProposal.chain(chain), int(chain.max()) + 1)
        rows = [sequence.rows(tree, np.arange(len(chain)))]
        expected, q = draw_drafts(logits, rows, self._context.target.vocab_size, not needs_q)
        assert chain.tolist() == expected.tolist(), f"sequence {sequence.id}"
        if proposal.q is not None and q is not None:
            torch.testing.assert_close(proposal.q, q, atol=1e-4, rtol=1e-3)

    def observe(self, observations: Sequence[Observation]) -> None:
        super().observe(observations)
        for seen in observations:
            assert 0 <= seen.sequence.draft_len <= seen.sequence.kv_len
            if seen.check is not None and seen.tree.drafted:
                self.accepted.append(seen.check.accepted)

    def _forward(self, entries: Sequence[Entry]) -> torch.Tensor:
        self.fed.append([e.kv_len + int(d) for e in entries for d in e.tree.depth])
        return super()._forward(entries)


def _shape(loaded: LoadedModel) -> dict[str, int]:
    config = torch_module(loaded).config
    return {name: getattr(config, name) for name in ("vocab_size", "max_position_embeddings")}


def start(
    draft: LoadedModel | None = None, target: LoadedModel | None = None, **options: Any
) -> tuple[Engine, CheckedDrafter]:
    config = EngineConfig(**{"kv_tokens": 2048, "depth": 4, **options})
    context = DraftContext(
        target=target or tiny_loaded(),
        coupled=config.verify == "match",
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


@pytest.mark.parametrize(
    ("rule", "params"),
    [
        ("match", GREEDY),
        ("match", PENALTIES),
        ("rejection", GREEDY),
        ("rejection", PENALTIES),
        ("block", SAMPLED),
    ],
    ids=["match", "match-sampled", "rejection", "rejection-sampled", "block-sampled"],
)
def test_proposals_are_those_of_the_model_alone(rule: str, params: SamplingParams) -> None:
    engine, drafter = start(verify=rule, max_batch=3)
    run(engine, random_prompts(5, seed=1), params)
    assert {0, 4} < set(drafter.accepted)  # rejected, accepted in part, accepted as a whole
    assert not drafter._fed


@pytest.mark.parametrize(
    ("options", "params"),
    [
        ({"kv_tokens": 112, "max_batch": 4}, GREEDY),  # preempts
        ({"max_batch_tokens": 5, "max_batch": 2}, SAMPLED),  # prompts in small pieces
        ({"nodes": 9}, GREEDY),  # siblings
        ({"nodes": 9, "depth": 2, "kv_tokens": 112}, SAMPLED),
        ({"nodes": 2}, GREEDY),
    ],
    ids=["preempted", "pieces", "siblings", "all", "short"],
)
def test_whatever_the_engine_does(options: dict[str, int], params: SamplingParams) -> None:
    engine, drafter = start(**options)
    prompts = random_prompts(3, seed=2)
    texts = [s.tokens for s in run(engine, [*prompts, prompts[1]], replace(params, n=2))]
    assert sum(drafter.accepted) > 10
    plain = Engine(tiny_loaded(), None, EngineConfig(kv_tokens=2048))
    assert texts == [s.tokens for s in run(plain, [*prompts, prompts[1]], replace(params, n=2))]


def test_a_wrong_length_of_the_drafts_cache_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    observe = ModelDrafter.observe

    def wrong(self: ModelDrafter, observations: Sequence[Observation]) -> None:
        observe(self, observations)
        for seen in observations:  # counts the chain's last node, which was never fed
            seen.sequence.draft_len = seen.sequence.kv_len

    monkeypatch.setattr(ModelDrafter, "observe", wrong)
    engine, _ = start(verify="rejection")
    with pytest.raises(DraftError, match="not close"):
        run(engine, random_prompts(5, seed=1), SAMPLED)


def test_a_long_prompt_stalls_nobody() -> None:
    engine, drafter = start(max_batch_tokens=16, max_batch=2, depth=3)
    short, long = ([0, *range(20, 20 + n)] for n in (4, 120))
    [first] = engine.add(short, replace(GREEDY, max_tokens=40))
    [second] = engine.add(long, GREEDY)
    finish(engine)
    assert max(map(len, drafter.fed)) <= 16
    together = [sizes for sizes in drafter.sizes if {first.id, second.id} <= sizes.keys()]
    assert together
    assert all(sizes[first.id] > 0 and sizes[second.id] > 0 for sizes in together)


def test_a_shared_prefix_is_not_computed_again() -> None:
    engine, drafter = start()
    prompt = random_prompts(1, seed=4, longest=40)[0] * 3
    run(engine, [[*prompt, 50]], GREEDY)
    first = sum(map(len, drafter.fed))
    drafter.fed.clear()
    run(engine, [[*prompt, 60]], GREEDY)
    assert sum(map(len, drafter.fed)) < first - len(prompt) // 16 * 16 + 32
    assert min(map(min, drafter.fed)) >= len(prompt) // 16 * 16


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_past_the_drafts_context_generation_goes_on(params: SamplingParams) -> None:
    draft = relative(max_position_embeddings=40)
    assert draft.context_len == 40
    engine, drafter = start(draft)
    prompts = [[0, *range(20, 49)], [0, *range(20, 79)]]
    long = replace(params, max_tokens=40)
    texts = [s.tokens for s in run(engine, prompts, long)]
    assert [len(text) for text in texts] == [70, 100]
    assert 38 <= max(map(max, drafter.fed)) < 40
    assert not any(sizes.get(1) for sizes in drafter.sizes)  # the second is too long from the start
    plain = Engine(tiny_loaded(), None, EngineConfig(kv_tokens=2048))
    assert texts == [s.tokens for s in run(plain, prompts, long)]


@pytest.mark.parametrize("rule", ["match", "rejection"])
@pytest.mark.parametrize("wider", ["target", "draft"])
def test_vocabularies_may_differ_by_padding(wider: str, rule: str) -> None:
    target, draft = tiny_loaded(), relative()
    if wider == "target":
        target = padded(target, 320)
    else:
        draft = padded(draft, 320)
    engine, drafter = start(draft, target, verify=rule, nodes=6)
    prompts = random_prompts(2, seed=6)
    run(engine, prompts, GREEDY)
    hot = replace(SAMPLED, top_k=0, temperature=1.5)
    texts = [s.output for s in run(engine, prompts, hot)]
    assert sum(drafter.accepted) > 10
    if wider == "target":
        assert max(map(max, texts)) >= 272  # an id that the draft model does not have was fed


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_vocabularies_of_151936_and_152064(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of Qwen's small and large models, which have the same tokenizer."""
    target = padded(tiny_loaded(), 151_936)
    draft = padded(target, 152_064)  # gives weight to ids that the target does not have
    monkeypatch.setattr(model_module, "load_model", lambda *_, **__: draft)
    engine, drafter = start(draft, target, verify=rule, nodes=6, max_batch=2)
    assert create_drafter("model:other", drafter._context) is not None
    prompts = random_prompts(2, seed=6)
    plain = Engine(target, None, EngineConfig(kv_tokens=2048))
    expected = [s.output for s in run(plain, prompts, GREEDY)]
    assert [s.output for s in run(engine, prompts, GREEDY)] == expected
    assert sum(drafter.accepted) > 10
    texts = [s.output for s in run(engine, prompts, SAMPLED)]
    if rule == "match":
        assert texts == [s.output for s in run(plain, prompts, SAMPLED)]


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_engine_verifies_by_the_q_that_drafts_were_drawn_from(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first drafted token is distributed as the target's; with another q it is not."""
    prompt = [0, 20, 21, 22]
    params = replace(SAMPLED, top_k=50, temperature=2.0, max_tokens=3)
    target = tiny_model("llama")

    def p(*output: int) -> Tensor:
        logits = target(input_ids=torch.tensor([[*prompt, *output]])).logits[0, -1].double()
        least = logits.topk(params.top_k).values[-1]
        return (logits / params.temperature).masked_fill(logits < least, -torch.inf).softmax(0)

    expected = p() @ torch.stack([p(token) for token in range(tiny_loaded().vocab_size)])

    def second_tokens() -> NDArray[np.int64]:
        like, checked = start(
            verify=rule, max_batch=256, max_batch_tokens=1024, kv_tokens=8192, depth=1
        )
        drafter = ModelDrafter(relative(0.6), checked._context)
        engine = Engine(like.loaded, drafter, like.config)
        queued = [s for i in range(3000) for s in engine.add(prompt, replace(params, seed=i))]
        while engine.has_work:
            engine.step()
        return np.array([sequence.output[1] for sequence in queued])

    def draw_with_raw_q(logits: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return draw_drafts(logits, *args, **options)[0], logits.softmax(1)

    assert_counts(second_tokens(), expected.numpy())
    monkeypatch.setattr(model_module, "draw_drafts", draw_with_raw_q)
    with pytest.raises(AssertionError):
        assert_counts(second_tokens(), expected.numpy())


def test_the_end_of_the_text_ends_the_chain() -> None:
    params = SamplingParams(max_tokens=24, logit_bias={EOS: 9.0})
    engine, drafter = start()
    proposals: list[DraftProposal] = []
    propose = drafter.propose
    drafter.propose = lambda requests: proposals.extend(made := propose(requests)) or made  # type: ignore[method-assign,func-returns-value]
    run(engine, random_prompts(8, seed=7), params)
    parents = {int(p.tokens[i]) for p in proposals for i in p.parents if i >= 0}
    assert any(EOS in p.tokens for p in proposals)
    assert len(parents) > 3
    assert EOS not in parents


def test_a_draft_that_will_hardly_be_accepted_ends() -> None:
    def chains(confidence: float) -> list[list[float]]:
        """The draft model's own probability of every chain, node by node."""
        engine, drafter = start(depth=4, confidence=confidence)
        found: list[list[float]] = []
        propose = drafter.propose

        def noted(requests: Sequence[DraftRequest]) -> list[DraftProposal]:
            proposals = propose(requests)
            for request, proposal in zip(requests, proposals, strict=True):
                chain, text, paths = -1, [*request.sequence.tokens], [1.0]
                while len(below := np.flatnonzero(proposal.parents == chain)):
                    logits = drafter.alone(input_ids=torch.tensor([text])).logits[0, -1]
                    chain = int(below[0])
                    text.append(int(proposal.tokens[chain]))
                    paths.append(paths[-1] * float(logits.softmax(0)[text[-1]]))
                found.append(paths[1:])
            return proposals

        drafter.propose = noted  # type: ignore[method-assign]
        run(engine, random_prompts(6, seed=12), GREEDY)
        return [paths for paths in found if paths]

    assert {len(paths) for paths in chains(0.0)} <= {1, 2, 3, 4}
    ended = chains(0.2)
    # A node is drafted on only below one that is likely enough; the estimate is among the likeliest
    # candidates alone, so it lies above the probability.
    assert all(p >= 0.1 for paths in ended for p in paths[:-1])
    assert any(len(paths) < 4 for paths in ended)
    assert any(p < 0.1 for paths in chains(0.0) for p in paths[:-1])


def test_siblings_are_the_likeliest_alternatives() -> None:
    engine, drafter = start(depth=3, nodes=8)
    [sequence] = engine.add(random_prompts(1, seed=8)[0], GREEDY)
    proposals = []
    propose = drafter.propose
    drafter.propose = lambda requests: proposals.append(propose(requests)) or proposals[-1]  # type: ignore[method-assign]
    engine.step()
    tokens = list(sequence.tokens)
    engine.step()
    [[proposal]] = proposals
    chain = proposal.tokens[:3].tolist()
    likely, total = [], 0.0
    for i, token in enumerate(chain):
        text = torch.tensor([[*tokens, *chain[:i]]])
        logprobs = drafter.alone(input_ids=text).logits[0, -1].log_softmax(0).tolist()
        likely += [(total + p, i - 1, t) for t, p in enumerate(logprobs) if t != token]
        total += logprobs[token]
    expected = [(parent, token) for _, parent, token in sorted(likely, reverse=True)[:5]]
    siblings = zip(proposal.parents[3:].tolist(), proposal.tokens[3:].tolist(), strict=True)
    assert list(siblings) == expected


def test_siblings_raise_acceptance_of_sampled_drafts_too() -> None:
    mean = {}
    for nodes in (3, 12):
        engine, drafter = start(depth=3, nodes=nodes)
        run(engine, random_prompts(6, seed=9), replace(SAMPLED, temperature=1.0, top_k=0))
        mean[nodes] = np.mean(drafter.accepted)
    assert mean[12] > mean[3]


def test_sampled_drafts_for_another_rule_stay_a_chain() -> None:
    engine, drafter = start(depth=3, nodes=9, verify="rejection")
    run(engine, random_prompts(3, seed=1), SAMPLED)
    assert {size for sizes in drafter.sizes for size in sizes.values()} <= {0, 1, 2, 3}


def test_an_aborted_sequence_is_forgotten() -> None:
    engine, drafter = start()
    [sequence] = engine.add([0, 20, 21], GREEDY)
    for _ in range(3):
        engine.step()
    engine.abort(sequence)
    assert not drafter._fed
    assert not engine.has_work


def retokenized(change: str) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    inner = tokenizer.backend_tokenizer
    if change == "padding":
        tokenizer.add_tokens([f"[PAD{i}]" for i in range(5)])
    elif change == "spaces":
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex("."), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    elif change == "order":
        state = inner.to_str().replace('"th": 260', '"th": 261').replace('"in": 261', '"in": 260')
        state = state.replace('"th":260', '"th":261').replace('"in":261', '"in":260')
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=type(inner).from_str(state))
    return tokenizer


@pytest.mark.parametrize("change", ["none", "padding", "spaces", "order"])
def test_another_tokenizer_is_refused(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(relative(), tokenizer=retokenized(change))
    monkeypatch.setattr(model_module, "load_model", lambda *_, **__: other)
    context = start()[1]._context
    if change in ("none", "padding"):
        assert create_drafter("model:other", context) is not None
        return
    reason = {"spaces": "they encode 'Hello", "order": "token 26[01] is '"}[change]
    with pytest.raises(ConfigError, match="tokenizer than the target tiny-llama: " + reason):
        create_drafter("model:other", context)


def test_a_path_is_needed() -> None:
    context = start()[1]._context
    with pytest.raises(ConfigError, match="model:PATH"):
        create_drafter("model", context)
    with pytest.raises(ModelLoadError, match="no-such-model"):
        create_drafter("model:./no-such-model", context)
