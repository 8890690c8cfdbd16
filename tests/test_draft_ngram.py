"""Prompt lookup: what it finds, in which order, how it costs the same in any context."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ridgeline import ConfigError, SamplingParams
from ridgeline.core.tree import DraftProposal, graft
from ridgeline.draft.base import DraftContext, DraftRequest, create_drafter
from ridgeline.draft.ngram import OCCURRENCES, NGramDrafter
from tests.engines import tiny_llm, tiny_loaded


def propose(
    drafter: NGramDrafter, tokens: list[int], nodes: int = 4, depth: int = 4, key: int = 0
) -> DraftProposal:
    sequence: Any = SimpleNamespace(id=key, tokens=tokens)
    [proposal] = drafter.propose([DraftRequest(sequence, nodes, depth)])
    graft([tokens[-1]], proposal, vocab_size=10**6)  # well-formed
    assert len(proposal) <= nodes
    return proposal


def chain(drafter: NGramDrafter, tokens: list[int], **limits: int) -> list[int]:
    proposal = propose(drafter, tokens, **limits)
    assert proposal.parents.tolist() == list(range(-1, len(proposal) - 1))
    return proposal.tokens.tolist()


def paths(proposal: DraftProposal) -> set[tuple[int, ...]]:
    """Every root-to-node path, as tokens."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(proposal.tokens.tolist(), proposal.parents.tolist(), strict=True):
        found.append((*found[parent], token) if parent >= 0 else (token,))
    return set(found)


def test_proposes_what_followed_before() -> None:
    assert chain(NGramDrafter(), [1, 2, 3, 4, 5, 6, 9, 1, 2]) == [3, 4, 5, 6]


@pytest.mark.parametrize("tokens", [[7], [7, 8], [1, 2, 3, 4], [1, 2, 3, 9, 2]])
def test_no_earlier_occurrence_gives_an_empty_proposal(tokens: list[int]) -> None:
    assert len(propose(NGramDrafter(), tokens)) == 0


def test_the_longest_match_beats_later_ones() -> None:
    tokens = [5, 1, 2, 77, 0, 6, 1, 2, 88, 0, 5, 1, 2]
    assert chain(NGramDrafter(), tokens, nodes=1) == [77]
    # where lengths beyond 2 are not told apart, the latest wins
    assert chain(NGramDrafter(2, 2), tokens, nodes=1) == [88]


def test_a_short_match_vouches_for_few_tokens() -> None:
    rest = [*range(10, 30)]
    assert len(chain(NGramDrafter(), [1, 2, *rest, 99, 1, 2], nodes=16, depth=16)) == 4
    assert len(chain(NGramDrafter(), [1, 2, 3, *rest, 99, 1, 2, 3], nodes=16, depth=16)) == 6


def test_a_period_goes_on() -> None:
    assert chain(NGramDrafter(), [0, *[7, 8, 9] * 3], nodes=8, depth=8) == [7, 8, 9, 7, 8, 9, 7, 8]
    assert chain(NGramDrafter(), [5] * 9, nodes=6, depth=6) == [5] * 6


def test_occurrences_merge_into_one_tree() -> None:
    tokens = [1, 2, 3, 4, 0, 1, 2, 3, 5, 0, 1, 2, 6, 7, 0, 1, 2]
    proposal = propose(NGramDrafter(2, 2), tokens, nodes=8, depth=2)
    assert paths(proposal) == {(6,), (6, 7), (3,), (3, 5), (3, 4)}
    # the latest occurrence first, so that a cut keeps it
    assert paths(propose(NGramDrafter(2, 2), tokens, nodes=3, depth=2)) == {(6,), (6, 7), (3,)}


def test_shapes_hold_on_random_text() -> None:
    rng = random.Random(0)
    for alphabet in (2, 5, 40):
        drafter, tokens = NGramDrafter(), [0]
        for _ in range(300):
            tokens.append(rng.randrange(alphabet))
            nodes, depth = rng.randint(1, 20), rng.randint(1, 8)
            proposal = propose(drafter, tokens, nodes, depth)
            assert max(map(len, paths(proposal)), default=0) <= depth
            fresh = propose(NGramDrafter(), tokens, nodes, depth)
            assert np.array_equal(proposal.tokens, fresh.tokens)  # the index grew rightly
            assert np.array_equal(proposal.parents, fresh.parents)


class CountingTokens(list[int]):
    """A list that counts the tokens read from it."""

    reads = 0

    def __getitem__(self, key: Any) -> Any:
        self.reads += len(range(*key.indices(len(self)))) if isinstance(key, slice) else 1
        return super().__getitem__(key)


def test_a_step_costs_the_same_in_a_long_context() -> None:
    rng = random.Random(0)
    tokens = CountingTokens(rng.randrange(4) for _ in range(32_000))
    drafter = NGramDrafter()
    propose(drafter, tokens)
    tokens.append(1)
    tokens.reads = 0
    propose(drafter, tokens)
    assert 0 < tokens.reads < 3 * OCCURRENCES * 16


def test_nothing_leaks_between_sequences() -> None:
    drafter = NGramDrafter()
    assert chain(drafter, [1, 2, 3, 4, 1, 2], key=0)
    assert not chain(drafter, [1, 2], key=1)
    drafter.forget(0)
    assert not chain(drafter, [1, 2], key=0)
    drafter.forget(0)
    drafter.forget(1)
    assert not drafter._indexes


def test_requests_of_one_engine_do_not_leak() -> None:
    llm = tiny_llm("llama", "ngram")
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    prompts = [[0, 10, 11, 12, 13, 10, 11], [0, 20, 10, 11]]
    together = llm.generate(prompts, params)
    alone = [tiny_llm("llama", "ngram").generate([p], params)[0] for p in prompts]
    for a, b in zip(together, alone, strict=True):
        assert a.token_ids == b.token_ids
        assert a.completions[0].speculation == b.completions[0].speculation
    assert not llm.drafter._indexes  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("min=0", "1 <= min <= max"),
        ("min=3,max=2", "min=3 and max=2"),
        ("size=3", "cannot read 'size=3'"),
        ("min=two", "cannot read 'min=two'"),
        ("4", "cannot read '4'"),
    ],
)
def test_wrong_settings_are_refused(argument: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create_drafter(f"ngram:{argument}", context())


def test_settings() -> None:
    drafter = create_drafter("ngram:min=1,max=3", context())
    assert isinstance(drafter, NGramDrafter)
    assert chain(drafter, [1, 5, 6, 1]) == [5, 6]
    assert create_drafter("ngram:min=30", context()) is not None


def test_none_drafts_nothing_and_takes_no_argument() -> None:
    assert create_drafter("none", context()) is None
    with pytest.raises(ConfigError, match="takes no argument"):
        create_drafter("none:x", context())


def context() -> DraftContext:
    return DraftContext(
        target=tiny_loaded(), coupled=True, depth=4, nodes=4, max_batch_tokens=64, dtype="float32"
    )
