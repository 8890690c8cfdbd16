"""Training of draft heads: losses, the order of what a step sees, resuming, saved heads."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.errors import ConfigError
from ridgeline.train import METHODS, run
from ridgeline.train.command import Job, run_training
from ridgeline.train.heads import frequent_ids, new_task
from ridgeline.train.prompts import default_prompts
from ridgeline.train.run import Task, TrainOptions, _Batches, _split, evaluate, train
from ridgeline.train.store import FeatureStore, Text
from ridgeline.train.texts import invented_prompts
from ridgeline.train.unroll import Batch, Losses, _attention, _shifted, unrolled
from tests.engines import tiny_loaded
from tests.tiny import VOCAB_SIZE

OPTIONS = TrainOptions(
    epochs=6, learning_rate=3e-3, batch_tokens=256, length=48, held_out=0.2, seed=1
)


@pytest.fixture
def store(tmp_path: Path) -> FeatureStore:
    target = tiny_loaded()
    rng = np.random.default_rng(0)
    texts = [Text([0, *rng.integers(4, 30, 40).tolist()], 30) for _ in range(20)]
    layers = range(len(target.model.layers) + 1)
    return filled(tmp_path / "states", texts, list(layers))


def filled(folder: Path, texts: list[Text], layers: list[int]) -> FeatureStore:
    store = FeatureStore(folder, tiny_loaded(), layers, 1 << 30)
    store.fill(texts)
    return store


def task_of(method: str, store: FeatureStore) -> Task:
    ids = frequent_ids(store.tokens, store.weights, 26, VOCAB_SIZE)
    return new_task(method, tiny_loaded(), ids, 3, 64, 0)


def test_hidden_states_are_the_targets(store: FeatureStore) -> None:
    from tests.test_heads import hidden_states

    lo, hi = int(store.starts[3]), int(store.starts[4])
    states = hidden_states(tiny_loaded(), store.tokens[lo:hi].tolist())
    found = store.hidden((0, 3), lo, hi)
    assert (found - torch.cat([states[0], states[3]], -1)).abs().max() < 0.02  # kept as fp16


@pytest.mark.parametrize("method", METHODS)
def test_training_learns_and_a_resumed_run_ends_alike(
    method: str, store: FeatureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_loaded()
    whole = task_of(method, store)
    batches = _Batches(whole, store, target, OPTIONS)
    before = evaluate(whole, batches, range(len(store)))
    (tmp_path / "a").mkdir()
    figures = train(whole, store, target, tmp_path / "a", OPTIONS, {})
    after = evaluate(whole, batches, range(len(store)))
    assert after["loss"] < before["loss"]
    assert figures["held_out"]["tokens_per_step"] >= 1
    (tmp_path / "b").mkdir()
    hasty, steps = replace(OPTIONS, checkpoint_minutes=0.0), []

    def interrupted(task: Task, batch: Batch) -> Losses:
        steps.append(len(steps))
        if len(steps) % 4 == 0:  # also in the middle of an evaluation
            raise KeyboardInterrupt
        return forward(task, batch)

    forward, done = run._forward, None
    monkeypatch.setattr(run, "_forward", interrupted)
    while done is None:
        part = task_of(method, store)
        with suppress(KeyboardInterrupt):
            done = train(part, store, target, tmp_path / "b", hasty, {})
    assert len(steps) > 8
    assert done["steps"] == figures["steps"]
    for name, tensor in whole.network.state_dict().items():
        assert torch.equal(tensor, part.network.state_dict()[name]), name


def test_every_epoch_is_whole_however_its_texts_are_grouped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "PATIENCE", 99)
    rng = np.random.default_rng(0)
    lengths = rng.integers(10, 31, 60).tolist()
    store = filled(
        tmp_path / "states",
        [Text([4 + i % 30, 4 + i // 30, *range(4, 2 + n)], n - 2) for i, n in enumerate(lengths)],
        [0, 3],
    )
    task, options = task_of("medusa", store), TrainOptions(epochs=5, batch_tokens=100)
    batches = _Batches(task, store, tiny_loaded(), options)
    _, used = _split(store, options)
    counts = [len(batches.order(used, epoch)) for epoch in range(5)]
    assert len(set(counts)) > 1
    assert train(task, store, tiny_loaded(), tmp_path, options, {})["steps"] == sum(counts)


def test_answers_to_a_held_out_prompt_are_not_learned_from(tmp_path: Path) -> None:
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8], [], []]
    texts = [Text([*prompts[i % 5], *range(9, 19 + i)], 10 + i) for i in range(20)]
    store = filled(tmp_path, texts, [3])
    held_out, used = _split(store, TrainOptions(held_out=0.5))
    assert sorted(held_out + used) == list(range(20))
    sides = [{i % 5 for i in side if prompts[i % 5]} for side in (held_out, used)]
    assert sides[0]
    assert sides[1]
    assert not sides[0] & sides[1]


def test_a_model_invents_prompts_where_a_users_turn_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_loaded()
    llm, file = LLM(target, kv_tokens=4096), tmp_path / "prompts.jsonl"

    def invented(template: str | None) -> list[str]:
        monkeypatch.setattr(target.tokenizer, "chat_template", template)
        return invented_prompts(llm, 3, file, 0)

    prompts = invented("{% for m in messages %}one {{ m.content }} two{% endfor %}")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 3
    assert len(set(prompts)) == len(prompts)
    assert lines[0]["tokens"][: -lines[0]["written"]] == target.encode_text("one ")
    with pytest.raises(ConfigError, match="changes what a user says"):
        invented("{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    with pytest.raises(ConfigError, match="no chat template"):
        invented(None)


def test_a_step_sees_what_drafting_would(store: FeatureStore) -> None:
    """Step by step over the whole text against one draft at a time."""
    task = task_of("eagle3", store)
    batch = _Batches(task, store, tiny_loaded(), OPTIONS).make([0, 1])
    network = task.network
    seen = []
    original = network.next_hidden
    network.next_hidden = lambda carried: seen.append(carried) or original(carried)  # type: ignore
    head = tiny_loaded().model.head_rows(torch.arange(26))
    unrolled(network, head, batch, 3, 0.0)
    network.next_hidden = original
    from tests.test_heads import alone

    tokens, hidden = batch.tokens[0, 1:].tolist(), network.hidden_from(batch.features[0, :-1])
    for begin in (1, 7, 20):  # the draft's first entry
        fed, states = tokens[: begin + 1], hidden[: begin + 1]
        for step in range(3):
            _, after = alone(network, tiny_loaded(), fed, states)
            steps = seen[step].view(2, -1, seen[step].shape[-1])[0]
            assert torch.allclose(after[-1], steps[begin + step], atol=1e-4)
            fed = [*fed, tokens[begin + step + 1]]
            states = torch.cat([states, after[-1:]])


def test_attention_of_later_steps_by_hand() -> None:
    torch.manual_seed(0)
    query = torch.randn(1, 2, 6, 4)
    keys = [torch.randn(1, 1, 6, 4) for _ in range(3)]
    values = [torch.randn(1, 1, 6, 4) for _ in range(3)]
    found = _attention(query, keys, values)
    for head in range(2):
        for i in range(2, 6):
            k = torch.cat(
                [keys[0][0, 0, : i - 1], keys[1][0, 0, i - 1 : i], keys[2][0, 0, i : i + 1]]
            )
            v = torch.cat(
                [values[0][0, 0, : i - 1], values[1][0, 0, i - 1 : i], values[2][0, 0, i : i + 1]]
            )
            weights = (k @ query[0, head, i] / 2).softmax(0)
            assert torch.allclose(found[0, head, i], weights @ v, atol=1e-5)
    assert torch.equal(_shifted(query, 0), query)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("compact", "bits"), [(False, 16), (True, 8)])
def test_the_command_saves_a_head_that_drafts(
    method: str, compact: bool, bits: int, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one two\nthe rest\nin there\n")
    target = tiny_loaded()
    job = Job(
        method,
        tmp_path / "head",
        distill=(str(prompts),),
        answers=2,
        answer_tokens=24,
        steps=3,
        draft_vocab=100,
        compact=compact,
        bits=bits,
    )
    options = TrainOptions(epochs=2, batch_tokens=256)
    run_training(target, job, options)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    spec = f"{method}:{job.out}"
    plain = LLM(target, kv_tokens=4096).generate("the rest", params)
    drafted = LLM(target, drafter=spec, kv_tokens=4096, confidence=0.0, policy="fixed").generate(
        "the rest", params
    )
    assert plain[0].token_ids == drafted[0].token_ids
    assert drafted[0].completions[0].speculation.drafted > 0


def test_the_prompts_are_many_and_distinct() -> None:
    prompts = default_prompts()
    assert len(prompts) > 900
    assert len(set(prompts)) == len(prompts)
