"""verify(): paths, tokens, batches of mixed requests, and the equality that `match` promises."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from ridgeline.core import groups
from ridgeline.core.sampling import Rows, SamplingParams, TokenLogprobs
from ridgeline.core.tree import DraftProposal, TokenTree, graft
from ridgeline.core.verify import RULES, Verification, verify
from ridgeline.errors import ConfigError

V = 24
PARAMS = {
    "greedy": SamplingParams(),
    "greedy, penalties": SamplingParams(repetition_penalty=1.3, presence_penalty=0.5),
    "sampled": SamplingParams(temperature=1.0),
    "truncated": SamplingParams(temperature=0.8, top_k=12, top_p=0.9, min_p=0.02),
    "all": SamplingParams(
        temperature=0.9,
        top_p=0.95,
        repetition_penalty=1.2,
        frequency_penalty=0.4,
        logit_bias={3: 1.0},
        bad_words=((4, 5), (6,)),
        min_tokens=8,
    ),
}


MODEL = torch.randn(V, V, V, generator=torch.Generator().manual_seed(0)) * 2
"""Logits by the last two tokens."""


def logits_after(tokens: Sequence[int]) -> Tensor:
    """f32[V]"""
    return MODEL[tokens[-2], tokens[-1]]


def rows_and_logits(
    tokens: list[int], tree: TokenTree, params: SamplingParams, seed: int
) -> tuple[Rows, Tensor]:
    nodes = np.arange(tree.root, tree.size)
    rows = Rows(params, seed, tokens, 3, frozenset([0]), tree, nodes)
    paths = [[int(tree.tokens[n]) for n in tree.path(int(node))] for node in nodes]
    return rows, torch.stack([logits_after([*tokens, *path]) for path in paths])


def random_proposal(rng: np.random.Generator, size: int) -> DraftProposal:
    """A random tree, siblings distinct, of the tokens that a drafter might find likely."""
    tokens: list[int] = []
    parents: list[int] = []
    for node in range(size):
        parent = int(rng.integers(-1, node)) if node else -1
        taken = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        tokens.append(int(rng.choice([t for t in range(V) if t not in taken])))
        parents.append(parent)
    return DraftProposal(np.array(tokens), np.array(parents, np.int32))


def decode(
    params: SamplingParams,
    propose: Callable[[list[int]], DraftProposal],
    rule: str = "match",
    seed: int = 5,
    length: int = 40,
    trunk: int = 1,
) -> tuple[list[int], int]:
    """Generates `length` tokens; returns them and the number of accepted drafts."""
    tokens, accepted = [1, 2, 3], 0
    while len(tokens) < 3 + length:
        proposal = propose(tokens)
        tree = graft(tokens[-trunk:], proposal, V)
        rows, logits = rows_and_logits(tokens, tree, params, seed)
        [check] = verify(rule, logits, [rows], [proposal.q])
        assert_consistent(tree, check)
        accepted += check.accepted
        tokens += check.tokens
    return tokens[3 : 3 + length], accepted


def assert_consistent(tree: TokenTree, check: Verification) -> None:
    path = check.path.tolist()
    assert path[0] == tree.root
    assert all(tree.parents[child] == node for node, child in itertools.pairwise(path))
    assert tree.tokens[path[1:]].tolist() == check.tokens[:-1]
    assert len(check.tokens) == len(path) == check.accepted + 1
    # the last token is not one that the tree could have gone on with
    assert check.tokens[-1] not in [tree.tokens[c] for c in tree.children(path[-1])]


def none(tokens: list[int]) -> DraftProposal:
    return DraftProposal.empty()


def oracle(params: SamplingParams, seed: int, wrong_from: int) -> Callable[..., DraftProposal]:
    """Drafts what undrafted decoding says, and something else from some depth on."""
    truth, _ = decode(params, none, seed=seed, length=60)

    def propose(tokens: list[int]) -> DraftProposal:
        ahead = truth[len(tokens) - 3 :][:5]
        ahead[wrong_from:] = [(t + 1) % V for t in ahead[wrong_from:]]
        return DraftProposal.chain(ahead)

    return propose


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("trunk", [1, 3])
def test_match_says_what_undrafted_decoding_says(kind: str, trunk: int) -> None:
    params = PARAMS[kind]
    expected, _ = decode(params, none)
    rng = np.random.default_rng(0)
    proposals = {
        "random trees": lambda tokens: random_proposal(rng, int(rng.integers(0, 20))),
        "always the same": lambda tokens: DraftProposal.chain([7, 7, 7]),
        "wide": lambda tokens: DraftProposal(np.arange(V), np.full(V, -1, np.int32)),
    }
    for propose in proposals.values():
        assert decode(params, propose, trunk=trunk)[0] == expected
    for wrong_from in (0, 1, 3, 5):
        tokens, accepted = decode(params, oracle(params, 5, wrong_from), trunk=trunk)
        assert tokens == expected
        assert (accepted > 0) == (wrong_from > 0)


def test_the_wide_tree_always_has_the_token() -> None:
    _, accepted = decode(
        PARAMS["sampled"], lambda tokens: DraftProposal(np.arange(V), np.full(V, -1, np.int32))
    )
    assert accepted == 20  # one of two tokens a step


def test_match_differs_by_seed() -> None:
    assert decode(PARAMS["sampled"], none, seed=5) != decode(PARAMS["sampled"], none, seed=6)


def test_fault_position_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's position counts its depth, not its index in the tree."""
    params = PARAMS["sampled"]
    expected, _ = decode(params, none)
    propose = oracle(params, 5, 4)
    rng = np.random.default_rng(0)
    assert decode(params, propose)[0] == expected
    monkeypatch.setattr(
        Rows, "ahead", property(lambda rows: np.minimum(rows.nodes - rows.tree.root, 1) * 2)
    )
    assert decode(params, propose)[0] != expected
    monkeypatch.setattr(Rows, "ahead", property(lambda rows: rows.nodes - rows.tree.root))
    assert decode(params, lambda tokens: random_proposal(rng, 20))[0] != expected


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["greedy", "greedy, penalties"])
def test_greedy_compares_argmaxes_under_every_rule(rule: str, kind: str) -> None:
    """q is not looked at, and the first drafted token is verified like every other."""
    params = PARAMS[kind]
    expected, _ = decode(params, none)
    rng = np.random.default_rng(1)

    def with_q(proposal: DraftProposal) -> DraftProposal:
        q = torch.rand(len(proposal) + 1, V, generator=torch.Generator().manual_seed(0))
        return replace(proposal, q=q / q.sum(1, keepdim=True))

    for wrong_from in (0, 2, 5):
        right = oracle(params, 5, wrong_from)
        assert decode(params, lambda tokens, p=right: with_q(p(tokens)), rule)[0] == expected
    assert decode(params, lambda _: with_q(random_proposal(rng, 12)), rule)[0] == expected


@pytest.mark.parametrize("rule", RULES)
def test_without_q_every_rule_is_match(rule: str) -> None:
    rng = np.random.default_rng(2)
    drafts = itertools.cycle([random_proposal(rng, 9) for _ in range(10)])
    for params in PARAMS.values():
        assert decode(params, none)[0] == decode(params, lambda _: next(drafts), rule)[0]


def mixed_batch() -> tuple[list[Rows], list[Tensor], list[Tensor | None]]:
    """Greedy, sampled, with q and without, empty, a chain and a tree, side by side."""
    rng = np.random.default_rng(3)
    sequences = []
    for i, params in enumerate([*PARAMS.values()] * 4):
        proposal = [
            random_proposal(rng, 5),
            DraftProposal.chain(rng.integers(0, V, 4)),
            DraftProposal.chain(rng.integers(0, V, 2)),
            DraftProposal.empty(),
        ][i % 4]
        tree = graft([3], proposal, V)
        rows, logits = rows_and_logits([1, 2, 3], tree, params, seed=i)
        q = torch.rand(len(proposal), V, generator=torch.Generator().manual_seed(i)) + 0.01
        sampled = i % 4 in (1, 2) and i % 3
        sequences.append((rows, logits, q / q.sum(1, keepdim=True) if sampled else None))
    rows, logits, q = zip(*sequences, strict=True)
    return list(rows), list(logits), list(q)


@pytest.mark.parametrize("rule", RULES)
def test_each_sequence_as_if_alone(rule: str) -> None:
    rows, logits, q = mixed_batch()
    together = verify(rule, torch.cat(logits), rows, q)
    for one, rows_1, logits_1, q_1 in zip(together, rows, logits, q, strict=True):
        [alone] = verify(rule, logits_1, [rows_1], [q_1])
        assert_consistent(rows_1.tree, one)
        assert alone.tokens == one.tokens
        assert alone.path.tolist() == one.path.tolist()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("accelerator", [False, True])
def test_at_most_two_transfers(
    rule: str, accelerator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rule asks the device for single numbers; where waiting is dear, not even for flags."""
    transfers = []

    def refuse(tensor: Tensor) -> None:
        raise AssertionError("a single number was read")

    def count(tensor: Tensor) -> list[object]:
        transfers.append(tensor)
        return tolist(tensor)

    tolist = Tensor.tolist
    if accelerator:
        monkeypatch.setattr(groups, "first_look", lambda groups, at_least=0: groups.shape[1])
        monkeypatch.setattr("ridgeline.core.truncation.first_look", groups.first_look)
        for name in ("__bool__", "__int__", "__float__", "nonzero"):
            monkeypatch.setattr(Tensor, name, refuse)
    monkeypatch.setattr(Tensor, "item", refuse)
    monkeypatch.setattr(Tensor, "tolist", count)
    rows, logits, q = mixed_batch()
    verify(rule, torch.cat(logits), rows, q)
    assert 1 <= len(transfers) <= 2


def test_block_refuses_sampled_siblings() -> None:
    proposal = DraftProposal(np.array([4, 5]), np.array([-1, -1], np.int32))
    rows, logits = rows_and_logits([1, 2, 3], graft([3], proposal, V), PARAMS["sampled"], 0)
    q = torch.full((1, V), 1 / V)
    with pytest.raises(ConfigError, match="'block'"):
        verify("block", logits, [rows], [q])
    verify("rejection", logits, [rows], [q])


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_drafts_that_q_could_not_have_drawn_are_not_accepted(rule: str) -> None:
    tree = graft([3], DraftProposal.chain([4, 5]), V)
    q = torch.zeros(2, V)
    q[:, 6] = 1.0
    for seed in range(50):
        rows, logits = rows_and_logits([1, 2, 3], tree, PARAMS["sampled"], seed)
        [check] = verify(rule, logits, [rows], [q])
        assert check.accepted == 0


@pytest.mark.parametrize("rule", RULES)
def test_an_all_rejected_step_emits_one_token(rule: str) -> None:
    params = replace(PARAMS["sampled"], logit_bias={7: -1000.0})
    tree = graft([3], DraftProposal.chain([7, 7]), V)
    rows, logits = rows_and_logits([1, 2, 3], tree, params, 0)
    [check] = verify(rule, logits, [rows], [torch.full((2, V), 1 / V)])
    assert (check.accepted, len(check.tokens), check.path.tolist()) == (0, 1, [0])


def test_end_token_drafted_too_early_is_not_accepted() -> None:
    """min_tokens 8: the end token, drafted at depth 3 of the first step, cannot pass."""
    params = SamplingParams(min_tokens=8, logit_bias={0: 50.0})
    tree = graft([3], DraftProposal.chain([0, 0, 0]), V)
    rows, logits = rows_and_logits([1, 2, 3], tree, params, 0)
    [check] = verify("match", logits, [rows], [None])
    assert check.accepted == 0
    rows = replace(rows, tokens=[1, 2, 3, *range(10, 18)])
    assert verify("match", logits, [rows], [None])[0].accepted == 3


@pytest.mark.parametrize("kind", ["greedy", "all"])
def test_logprobs_equal_undrafted_ones(kind: str) -> None:
    """One entry per emitted token, of the distribution before processing."""
    params = replace(PARAMS[kind], logprobs=3)

    def entries(propose: Callable[[list[int]], DraftProposal]) -> list[TokenLogprobs]:
        tokens, result = [1, 2, 3], []
        while len(tokens) < 30:
            tree = graft(tokens[-1:], propose(tokens), V)
            rows, logits = rows_and_logits(tokens, tree, params, 5)
            plain = replace(rows, params=replace(params, logprobs=None), seed=6)
            check, other = verify("match", logits.repeat(2, 1), [rows, plain], [None, None])
            assert other.logprobs is None
            assert check.logprobs is not None
            assert [entry.token for entry in check.logprobs] == check.tokens
            tokens += check.tokens
            result += check.logprobs
        return result[:20]

    expected = entries(none)
    for entry, other in zip(entries(oracle(PARAMS[kind], 5, 3)), expected, strict=True):
        assert entry.token == other.token
        assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [i for i, _ in entry.top] == [i for i, _ in other.top]
    raw = logits_after([1, 2, 3]).log_softmax(0)
    assert expected[0].logprob == pytest.approx(float(raw[expected[0].token]), abs=1e-5)
    assert [i for i, _ in expected[0].top] == raw.topk(3).indices.tolist()
