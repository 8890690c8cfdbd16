"""Training texts with hidden states: computed, recorded as they are written, and continued."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.errors import ConfigError
from ridgeline.model.load import LoadedModel
from ridgeline.train import answers as train_answers
from ridgeline.train import store as train_store
from ridgeline.train.command import Job, _distilled
from ridgeline.train.recorder import Recorder
from ridgeline.train.store import FeatureStore, Text
from tests.engines import random_prompts, tiny_loaded

LAYERS = (0, 2, 3)


def opened(folder: Path, layers: tuple[int, ...] = LAYERS, limit: int = 1 << 30) -> FeatureStore:
    return FeatureStore(folder, tiny_loaded(), layers, limit)


def some_texts(count: int, seed: int = 0) -> list[Text]:
    rng = np.random.default_rng(seed)
    return [Text([0, *rng.integers(4, 200, 20 + 3 * i).tolist()], 10 + i) for i in range(count)]


def assert_alike(store: FeatureStore, other: FeatureStore) -> None:
    assert store.starts.tolist() == other.starts.tolist()
    assert store.tokens.tolist() == other.tokens.tolist()
    assert store.weights.tolist() == other.weights.tolist()
    end = int(store.starts[-1])
    difference = store.hidden(LAYERS, 0, end) - other.hidden(LAYERS, 0, end)
    assert difference.abs().max() < 0.02  # kept as fp16
    assert store.hidden(LAYERS, 0, end).abs().max() > 0.5


def test_texts_that_are_there_are_not_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, other = some_texts(9), some_texts(9, seed=1)
    opened(tmp_path / "a").fill(texts[:4])
    store = opened(tmp_path / "a")
    assert len(store) == 4
    computed: list[list[int]] = []
    count_computed(monkeypatch, computed)
    store.fill(texts)
    assert computed == [text.tokens for text in texts[4:]]
    monkeypatch.undo()
    whole = opened(tmp_path / "b")
    whole.fill(texts)
    assert_alike(store, whole)
    store.fill([*texts[:2], *other])
    whole.fill([*texts[:2], *other])
    assert_alike(opened(tmp_path / "a"), whole)
    store.fill(texts[:1])
    assert len(opened(tmp_path / "a")) == 1


def count_computed(monkeypatch: pytest.MonkeyPatch, computed: list[list[int]]) -> None:
    run = train_store._run

    def counted(target: LoadedModel, texts: list[list[int]], layers: tuple[int, ...]) -> list:
        computed.extend(texts)
        return run(target, texts, layers)

    monkeypatch.setattr(train_store, "_run", counted)


def test_what_an_interruption_left_is_given_up(tmp_path: Path) -> None:
    texts = some_texts(6)
    store = opened(tmp_path / "a")
    store.fill(texts[:3])
    for name in ("tokens.i32", "weights.u8", "hidden-2.f16"):
        with (tmp_path / "a" / name).open("ab") as file:
            file.write(b"half a text")
    store = opened(tmp_path / "a")
    store.fill(texts)
    whole = opened(tmp_path / "b")
    whole.fill(texts)
    assert_alike(store, whole)


def test_fewer_states_serve_and_more_start_anew(tmp_path: Path) -> None:
    opened(tmp_path).fill(some_texts(3))
    assert len(opened(tmp_path, (3,))) == 3
    assert opened(tmp_path, (3,)).layers == LAYERS
    assert len(opened(tmp_path, (1, 3))) == 0
    assert not (tmp_path / "hidden-0.f16").exists()


def test_a_full_store_says_so(tmp_path: Path) -> None:
    store = opened(tmp_path, limit=50_000)
    with pytest.raises(ConfigError, match="raise --cache-gb"):
        store.fill(some_texts(20))
    assert len(store) == 0


def test_recorded_states_are_the_computed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cache so small that texts are put back and begin again."""
    recorder = Recorder(LAYERS)
    options = {"depth": 1, "policy": "fixed", "prefix_sharing": False}
    llm = LLM(tiny_loaded(), drafter=recorder, kv_tokens=144, max_batch=4, **options)
    prompts = random_prompts(6, seed=3)
    params, put_back = SamplingParams(max_tokens=40, ignore_eos=True), []
    scheduler = llm.engine.scheduler
    preempt = scheduler._preempt
    monkeypatch.setattr(scheduler, "_preempt", lambda s: [put_back.append(s), preempt(s)])
    outputs = llm.generate(prompts, params)
    assert put_back
    texts = [
        Text((prompt + output.token_ids)[:-1], len(output.token_ids) - 1)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    recorded, computed = opened(tmp_path / "a"), opened(tmp_path / "b")
    recorded.append(texts, recorder.take())
    assert recorder.take() == []
    computed.fill(texts)
    assert_alike(recorded, computed)


def test_answers_go_on_where_they_were_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_answers, "GROUP", 2)
    file = tmp_path / "prompts.txt"
    file.write_text("one two\nthe rest\nin there\nthree four\nfive\n")
    job = Job("eagle3", tmp_path, distill=(str(file),), answers=1, answer_tokens=16)
    target = tiny_loaded()
    whole = opened(tmp_path / "a")
    texts = _distilled(target, job, tmp_path / "a", whole, 0)
    assert len(texts) == len(whole) > 2
    part = opened(tmp_path / "b")
    _distilled(target, job, tmp_path / "b", part, 0)
    lines = (tmp_path / "b" / "texts.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "b" / "texts.jsonl").write_text("".join(lines[:3]))  # in the second group
    part.fill(texts[:1])  # and the states of the first are not whole either
    again = opened(tmp_path / "b")
    assert _distilled(target, job, tmp_path / "b", again, 0) == texts
    assert_alike(again, whole)
    again.fill([*texts, *some_texts(1)])  # --data beside it
    assert _distilled(target, job, tmp_path / "b", again, 0) == texts
    assert len(again) == len(texts) + 1, "not to be computed once more"
