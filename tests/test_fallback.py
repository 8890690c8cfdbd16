"""Two drafters as one: which of them drafts, what each of them sees, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.core.tree import DraftProposal
from ridgeline.draft.base import Needs
from ridgeline.draft.fallback import FallbackDrafter
from ridgeline.errors import ConfigError
from tests.engines import tiny_loaded
from tests.heads import write_head


class Scripted:
    """Drafts its token for the requests whose numbers it is given."""

    def __init__(self, name: str, token: int, chosen: set[int], features: tuple[int, ...]) -> None:
        self.name, self._token, self._chosen = name, token, chosen
        self.needs = Needs(features=features)
        self.asked: list[Any] = []
        self.seen: list[tuple[Any, ...]] = []
        self.forgotten: list[int] = []

    def bind(self, store: object, first_layer: int) -> None:
        pass

    def propose(self, requests: Any) -> list[DraftProposal]:
        self.asked += requests
        one = DraftProposal(np.array([self._token]), np.array([-1], np.int32))
        return [one if r.number in self._chosen else DraftProposal.empty() for r in requests]

    def observe(self, observations: Any) -> None:
        self.seen += [o.features for o in observations]

    def forget(self, sequence_id: int) -> None:
        self.forgotten.append(sequence_id)


class Numbered:
    def __init__(self, number: int) -> None:
        self.number = number


def test_the_second_is_asked_for_what_the_first_leaves() -> None:
    first, second = Scripted("a", 7, {0, 3}, ()), Scripted("b", 8, {1}, ())
    both = FallbackDrafter(first, second)  # type: ignore[arg-type]
    proposals = both.propose([Numbered(i) for i in range(4)])  # type: ignore[misc]
    assert [p.tokens.tolist() for p in proposals] == [[7], [8], [], [7]]
    assert [r.number for r in second.asked] == [1, 2]
    both.forget(5)
    assert (first.forgotten, second.forgotten, both.name) == ([5], [5], "a+b")


def test_each_sees_the_hidden_states_that_it_asked_for(tmp_path: Path) -> None:
    target = tiny_loaded()
    llm = LLM(target, kv_tokens=1024)
    first, second = Scripted("a", 7, set(), (2, 0)), Scripted("b", 8, set(), (3, 2))
    both = FallbackDrafter(first, second)  # type: ignore[arg-type]
    assert both.needs.features == (2, 0, 3)
    from ridgeline.engine import Engine

    engine = Engine(target, both, llm.engine.config)
    first.propose = second.propose = lambda requests: [DraftProposal.empty() for _ in requests]  # type: ignore
    engine.add([1, 2, 3], SamplingParams(max_tokens=1))
    engine.step()
    (a2, a0), (b3, b2) = first.seen[0], second.seen[0]
    assert a2.equal(b2)
    assert not a0.equal(a2)
    assert not b3.equal(b2)


@pytest.mark.parametrize("spec", ["ngram+{}", "medusa+{}", "ngram:min=3+{}"])
def test_the_text_does_not_change(spec: str, tmp_path: Path) -> None:
    target = tiny_loaded()
    head = write_head("eagle3", tmp_path / "a+b", target)  # a path may hold the sign, too
    if spec.startswith("medusa"):
        spec = spec.replace("medusa", write_head("medusa", tmp_path / "m", target))
    params = [
        SamplingParams(max_tokens=40, ignore_eos=True, temperature=t, seed=2) for t in (0.0, 0.9)
    ]
    prompts = ["the rest of the rest of the"] * 2
    plain = LLM(target, kv_tokens=4096).generate(prompts, params)
    llm = LLM(target, drafter=spec.format(head), kv_tokens=4096, confidence=0.0, policy="fixed")
    drafted = llm.generate(prompts, params)
    assert [o.token_ids for o in drafted] == [o.token_ids for o in plain]
    assert drafted[1].completions[0].speculation.drafted > 0


def test_two_with_layers_of_their_own_are_refused(tmp_path: Path) -> None:
    target = tiny_loaded()
    heads = [write_head(method, tmp_path / method, target) for method in ("eagle", "eagle3")]
    with pytest.raises(ConfigError, match="both keep keys and values"):
        LLM(target, drafter="+".join(heads), kv_tokens=1024)


def test_none_beside_another_is_the_other() -> None:
    llm = LLM(tiny_loaded(), drafter="none+ngram", kv_tokens=1024)
    assert llm.drafter is not None
    assert llm.drafter.name == "ngram"
