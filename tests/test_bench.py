"""`ridgeline bench`: figures against hand counts, with a clock that the test itself moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from ridgeline import LLM, SamplingParams
from ridgeline.bench import clock, measure
from ridgeline.bench.figures import figures_of
from ridgeline.bench.measure import Contender, Load, Round, Side, Text, memory
from ridgeline.bench.prompts import SHIPPED, Prompt, encode, read_prompts
from ridgeline.bench.published import SOURCES, published
from ridgeline.core.batch import Batch
from ridgeline.core.sequence import Speculation
from ridgeline.core.tree import DraftProposal
from ridgeline.draft import DraftContext, DraftRequest, drafter_names, register
from ridgeline.errors import ConfigError, DraftError
from ridgeline.llm import Request
from ridgeline.model.torch_target import TorchTarget
from ridgeline.train.prompts import default_prompts
from tests.engines import TRUTH, SimpleDrafter, plain_output, random_prompts, tiny_llm, tiny_loaded
from tests.heads import METHODS, write_head
from tests.tiny import VOCAB_SIZE, save_tiny

PARAMS = SamplingParams(max_tokens=25, ignore_eos=True)
DEPTH = 3
RIGHT = (2, 0, 3, 1)
"""Drafted tokens that the known drafter gets right in its first, second, ... step, in a cycle."""
PASS, ROW, LEVEL, PREFILL = 0.010, 0.001, 0.004, 0.5
"""Seconds of a pass of one row, of each further row, of a drafted level, of reading prompts."""


class Time:
    """Seconds that pass only where the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


TIME = Time()


class KnownDrafter(SimpleDrafter):
    """Drafts chains whose first `RIGHT` tokens are those of the true text, and then a wrong one."""

    name = "known"

    def __init__(self) -> None:
        self._steps: Counter[int] = Counter()

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftProposal]:
        chains = [self._chain(request) for request in requests]
        TIME.now += LEVEL * max(map(len, chains))
        return [DraftProposal.chain(chain) for chain in chains]

    def _chain(self, request: DraftRequest) -> list[int]:
        sequence = request.sequence
        truth = TRUTH.get(tuple(sequence.tokens[: sequence.prompt_len]), [])
        ahead = truth[len(sequence.tokens) :][: request.depth]
        ahead += [0] * (request.depth - len(ahead))
        right = RIGHT[self._steps[sequence.id] % len(RIGHT)]
        self._steps[sequence.id] += 1
        return [t if i < right else (t + 1) % VOCAB_SIZE for i, t in enumerate(ahead)]


@register("known")
def _known(argument: str, context: DraftContext) -> KnownDrafter:
    return KnownDrafter()


@pytest.fixture
def known_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of the target and levels of the known drafter take what the constants say."""
    forward = TorchTarget.forward

    def slow(target: TorchTarget, batch: Batch, *rest: Any) -> Any:
        decodes = len(batch.keep) == len(batch.tokens)
        TIME.now += PASS + ROW * (len(batch.tokens) - 1) if decodes else PREFILL
        return forward(target, batch, *rest)

    monkeypatch.setattr(TorchTarget, "forward", slow)
    for module in (clock, measure):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=TIME.perf_counter))


def prompts_of(count: int) -> list[Prompt]:
    """Two kinds in turn; their true texts are known to the drafter."""
    prompts = []
    for i, tokens in enumerate(random_prompts(count, seed=5)):
        plain_output(tokens, PARAMS)
        prompts.append(Prompt("even" if i % 2 == 0 else "odd", Request(tokens, PARAMS)))
    return prompts


def counted() -> tuple[list[int], list[int], list[int]]:
    """One text of the known drafter by hand: rows of each step, and reached and passed by depth."""
    left, rows, reached, passed = PARAMS.max_tokens - 1, [], [0] * DEPTH, [0] * DEPTH
    while left:
        depth = min(DEPTH, left - 1)  # a step emits one more than it accepts
        right = min(RIGHT[len(rows) % len(RIGHT)], depth)
        for i in range(min(right + 1, depth)):
            reached[i] += 1
            passed[i] += i < right
        rows.append(1 + depth)
        left -= right + 1
    return rows, reached, passed


def run(
    prompts: Sequence[Prompt], contender: Contender, load: Load, rounds: int = 2
) -> list[Round]:
    asked = measure.requests(prompts, load, seed=0)
    pair = (Contender(measure.PLAIN), contender)
    return [
        Round(*measure.measure(tiny_loaded(), pair, load, asked, number, lambda: None))
        for number in range(rounds)
    ]


KNOWN = Contender("known", depth=DEPTH, nodes=DEPTH, confidence=0.0, policy="fixed")


def test_figures_against_a_hand_count(known_time: None) -> None:
    figures = figures_of(run(prompts_of(4), KNOWN, Load(0.0, 1)))
    rows, reached, passed = counted()
    assert max(rows) > 1 + 1
    assert len(set(rows)) > 1, "the end of a text leaves less room"
    assert figures["reached"] == [4 * n for n in reached]
    assert figures["passed"] == [4 * n for n in passed]
    expected = [p / r for p, r in zip(passed, reached, strict=True)]
    assert figures["acceptance_by_position"] == pytest.approx(expected)
    assert figures["mean_acceptance"] == pytest.approx(sum(passed) / sum(reached))
    emitted = PARAMS.max_tokens - 1
    assert figures["tokens_per_step"] == pytest.approx(emitted / len(rows))
    assert (figures["texts"], figures["identical"]) == (4, 4)

    passes = sum(PASS + ROW * (n - 1) for n in rows)
    levels = sum(n - 1 for n in rows)
    assert figures["plain_tokens_per_s"] == pytest.approx(1 / PASS)
    assert figures["tokens_per_s"] == pytest.approx(emitted / (passes + LEVEL * levels))
    assert figures["speed_up"] == pytest.approx(emitted * PASS / (passes + LEVEL * levels))
    assert figures["draft_target_ratio"] == pytest.approx(LEVEL / PASS)
    assert figures["pass_ratio"] == pytest.approx(passes / len(rows) / PASS)
    assert figures["plain_pass_ms"] == pytest.approx(1000 * PASS)
    assert figures["drafting_ms"] == pytest.approx(1000 * LEVEL * levels / len(rows))
    assert list(figures["kinds"]) == ["even", "odd"]
    for kind in figures["kinds"].values():
        assert kind["texts"] == 2
        assert kind["speed_up"] == pytest.approx(figures["speed_up"])
        assert kind["acceptance_by_position"] == pytest.approx(expected)


def test_a_batch_shares_its_passes(known_time: None) -> None:
    figures = figures_of(run(prompts_of(4), KNOWN, Load(0.0, 4)))
    rows, reached, _ = counted()
    passes = sum(PASS + ROW * (4 * n - 1) for n in rows)
    levels = sum(n - 1 for n in rows)
    together = 4 * (PARAMS.max_tokens - 1)
    assert figures["identical"] == 4
    assert figures["reached"] == [4 * n for n in reached]
    assert figures["plain_tokens_per_s"] == pytest.approx(4 / (PASS + 3 * ROW))
    assert figures["tokens_per_s"] == pytest.approx(together / (passes + LEVEL * levels))
    assert figures["draft_target_ratio"] == pytest.approx(LEVEL / (PASS + 3 * ROW))
    for kind in figures["kinds"].values():  # each text has its share of the passes
        assert kind["tokens_per_s"] == pytest.approx(figures["tokens_per_s"] / 4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_and_sampling_leave_the_texts_as_they_are(temperature: float) -> None:
    contender = Contender("oracle:3", depth=4, nodes=12, policy="fixed")
    (only,) = run(prompts_of(3), contender, Load(temperature, 2), rounds=1)
    figures = figures_of([only])
    assert (figures["texts"], figures["identical"]) == (4, 4)
    assert figures["drafted"] > 0
    if temperature:
        first, *_, again = only.plain.texts  # the fourth is the first prompt with another seed
        assert first.tokens != again.tokens


def test_plain_beside_itself() -> None:
    figures = figures_of(run(prompts_of(2), Contender("none"), Load(0.0, 1), rounds=1))
    assert figures["identical"] == figures["texts"] == 2
    assert figures["acceptance_by_position"] == []
    assert figures["mean_acceptance"] is figures["draft_target_ratio"] is None
    assert figures["tokens_per_step"] == 1


def test_engines_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who begins alternates, and nobody is ever ahead by more than a turn."""
    begun: list[str] = []
    at_work: dict[str, Any] = {}
    init, step = measure._Writer.__init__, measure._Writer.step

    def noted(writer: Any, llm: LLM, *rest: Any) -> None:
        init(writer, llm, *rest)
        at_work["drafted" if llm.drafter else "plain"] = writer

    def watched(writer: Any) -> None:
        if not any(other.written for other in at_work.values()):
            begun.append(next(name for name, other in at_work.items() if other is writer))
        step(writer)
        written = [other.written for other in at_work.values() if other.has_work]
        ahead = max(written, default=0) - min(written, default=0)
        assert ahead <= (1 + DEPTH) * 2, "one step of both texts"

    monkeypatch.setattr(measure, "TURN", 1)
    monkeypatch.setattr(measure._Writer, "__init__", noted)
    monkeypatch.setattr(measure._Writer, "step", watched)
    run(prompts_of(4), KNOWN, Load(0.0, 2), rounds=2)
    assert begun == ["plain", "drafted", "drafted", "plain"]


def test_a_drafter_that_remembers_meets_no_answer_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[KnownDrafter] = []
    init = KnownDrafter.__init__

    def noted(drafter: KnownDrafter) -> None:
        made.append(drafter)
        init(drafter)

    monkeypatch.setattr(KnownDrafter, "__init__", noted)
    run(prompts_of(2), KNOWN, Load(0.0, 1), rounds=3)
    assert len(made) == 3


def test_batches_are_full_and_seeds_differ() -> None:
    prompts = prompts_of(3)
    asked = measure.requests(prompts, Load(0.7, 2), seed=10)
    assert [kind for kind, _ in asked] == ["even", "odd", "even", "even"]
    assert asked[3][1].tokens == asked[0][1].tokens
    assert [request.params.seed for _, request in asked] == [10, 11, 12, 13]
    assert {request.params.temperature for _, request in asked} == {0.7}
    assert len(measure.requests(prompts, Load(0.0, 16), seed=0)) == 16


def _fail_in_a_step(llm: LLM) -> None:
    assert "forward" in vars(llm.engine.target)
    llm.generate([[5, 6, 7]], PARAMS)


def test_the_clock_leaves_no_trace() -> None:
    llm = tiny_llm(drafter="stubborn:1,2,3,4,5,6,7,8,9")
    before = (vars(llm.engine.target).copy(), vars(llm.drafter).copy())
    with pytest.raises(DraftError), clock.clocked(llm.engine):
        _fail_in_a_step(llm)
    assert (vars(llm.engine.target), vars(llm.drafter)) == before


def test_the_depth_of_a_tree() -> None:
    parents = np.array([-1, -1, 0, 2, 1], np.int32)
    tree = DraftProposal(np.arange(5), parents)
    watch = clock.Clock(tiny_loaded().model.device)
    watch.proposals = [tree, DraftProposal.empty()]
    assert watch.levels == 3


def side(*texts: Sequence[int], seconds: float = 1.0) -> Side:
    made = [Text("k", Speculation(), list(t), len(t), seconds) for t in texts]
    return Side(made, sum(map(len, texts)), seconds * len(texts), steps=len(texts))


def test_medians_and_differences() -> None:
    rounds = [
        Round(side([1, 2], [3, 4]), side([1, 2], [3, 4], seconds=0.5)),
        Round(side([1, 2], [3, 4]), side([1, 2], [3, 5], seconds=0.1)),
        Round(side([1, 2], [3, 4], seconds=8), side([1, 2], [3, 4], seconds=2)),
    ]
    figures = figures_of(rounds)
    assert figures["speed_up_by_round"] == pytest.approx([2, 10, 4])
    assert figures["speed_up"] == pytest.approx(4)  # of pairs, not of medians
    assert figures["tokens_per_s"] == pytest.approx(4)
    assert (figures["identical"], figures["texts"]) == (1, 2)


@pytest.mark.parametrize("method", METHODS)
def test_memory_of_heads(method: str, tmp_path: Path) -> None:
    target = tiny_loaded()
    spec = write_head(method, tmp_path, target)
    own = 0
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_tensor(name)
            shared = "embed_tokens" in name or name.startswith("model.layers.0.")
            if tensor.is_floating_point() and not shared:
                own += 4 * tensor.numel()
    taken = memory(target, Contender(spec), 1, 16)
    # Native matrices have whole tiles of outputs, and leave out small vectors.
    assert 0.9 * own <= taken.weights <= 1.5 * own
    assert taken.kv_per_token == (0 if method == "medusa" else 2 * 2 * 12 * 4)


def test_memory_of_a_draft_model(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    taken = memory(
        tiny_loaded(), Contender(f"model:{tmp_path}", draft_dtype="float32"), batch=1, tokens=16
    )
    assert size <= taken.weights <= 1.5 * size
    assert taken.kv_per_token == 3 * 2 * 2 * 12 * 4
    assert memory(tiny_loaded(), Contender("ngram"), 1, 16).weights == 0


def test_the_prompts_that_ship() -> None:
    jobs = read_prompts(SHIPPED)
    assert len(jobs) == 10
    assert len({job.kind for job in jobs}) >= 6
    assert all(job.kind for job in jobs)
    seen = {" ".join(prompt.lower().split()) for prompt in default_prompts()}
    assert len(seen) > 500
    assert not seen & {" ".join(str(job.prompt).lower().split()) for job in jobs}


def test_prompts_are_messages_where_there_is_a_template(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(
        '{"prompt": "one", "kind": "a", "top_p": 0.5, "seed": 3, "n": 2}\n{"prompt": "two"}'
    )
    llm = tiny_llm()
    first, second = encode(llm, read_prompts(file), file, tokens=9)
    assert first.request.tokens == llm.loaded.encode_chat([{"role": "user", "content": "one"}])
    assert (first.kind, second.kind) == ("a", "all")
    params = first.request.params
    assert (params.top_p, params.max_tokens, params.n) == (0.5, 9, 1)

    file.write_text('{"prompt": "' + "x" * 500 + '"}')
    with pytest.raises(ConfigError, match=r"p\.jsonl, line 1: .*context of 256"):
        encode(llm, read_prompts(file), file, tokens=9)


def test_published_figures() -> None:
    rows = published()
    assert {row.source for row in rows} == SOURCES.keys()
    assert {row.drafter for row in rows} <= {*drafter_names()}
    for row in rows:
        low, high = row.speed_up
        assert 1 < low <= high < 4
        for kind in row.kinds.values():
            assert 1 < kind < 4
    theirs = next(row for row in rows if (row.source, row.method) == ("Spec-Bench", "EAGLE2"))
    assert (theirs.tokens_per_step, theirs.speed_up) == (4.34, (2.36, 2.36))
