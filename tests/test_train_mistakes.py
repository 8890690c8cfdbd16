"""Training told something wrong, or given damaged files: one line, and nothing is lost."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ridgeline import LLM
from ridgeline.errors import ConfigError
from ridgeline.train import checkpoint
from ridgeline.train.command import Job, run_training
from ridgeline.train.files import check_writable
from ridgeline.train.heads import new_task, save_head
from ridgeline.train.run import TrainOptions, _Batches, _split, train
from ridgeline.train.sources import read_prompts, read_texts
from ridgeline.train.store import FeatureStore, Text
from ridgeline.train.texts import distil, invented_prompts
from ridgeline.train.unroll import Batch
from tests.engines import tiny_loaded

OPTIONS = TrainOptions(epochs=2, batch_tokens=256)
PROMPTS = ["one two", "the rest", "in there"]


def some_texts(count: int = 8) -> list[Text]:
    rng = np.random.default_rng(0)
    return [Text([i, *rng.integers(4, 200, 30).tolist()], 20) for i in range(count)]


def job(folder: Path, **changes: Any) -> Job:
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    given: dict[str, Any] = {
        "distill": (str(folder / "prompts.txt"),),
        "answers": 1,
        "answer_tokens": 16,
        "steps": 2,
        "draft_vocab": 50,
    }
    return Job(**{"method": "medusa", "out": folder / "head", **given, **changes})


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize(
    "name", ["answers", "answer_tokens", "steps", "draft_vocab", "intermediate"]
)
def test_numbers_of_the_job_must_be_positive(name: str, value: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} is {value}; it must be"):
        job(tmp_path, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0),
        ("seed", -1),
        ("seed", 2**64),
        *(("learning_rate", x) for x in (0.0, -1.0, float("nan"), float("inf"))),
        *(("minutes", x) for x in (0.0, -1.0, float("nan"), float("inf"))),
    ],
)
def test_options_are_checked(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} is {value}; it must be"):
        TrainOptions(**{name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache_gb": float("nan")}, "--cache-gb is nan"),
        ({"method": "x"}, "there is no method 'x'"),
        ({"bits": 4}, "--bits is 8 or 16"),
        ({"distill": ("own:0",)}, "write own:2000"),
        ({"distill": ()}, "there is no training data"),
    ],
)
def test_the_rest_of_the_job_is_checked(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        job(tmp_path, **changes)


def answers(
    file: Path, prompts: list[str] = PROMPTS, tokens: int = 12, seed: int = 0, count: int = 1
) -> list[Text]:
    llm = LLM(tiny_loaded(), kv_tokens=4096)
    return [text for group in distil(llm, prompts, file, count, tokens, seed) for text in group]


def test_answers_grow_and_fewer_are_the_first(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    first = answers(file, PROMPTS[:2])
    whole = answers(file)
    assert whole[:2] == first
    assert answers(tmp_path / "at_once.jsonl") == whole
    content = file.read_bytes()
    assert answers(file, PROMPTS[:1]) == whole[:1]
    assert answers(file, count=2)[:3] == whole
    assert file.read_bytes().startswith(content)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": ["one two", "another", "in there"]}, "other prompts from line 2 on"),
        ({"prompts": ["another", *PROMPTS]}, "other prompts from line 1 on"),
        ({"tokens": 14}, "--answer-tokens 12, not 14"),
        ({"seed": 1}, "--seed 0, not 1"),
    ],
)
def test_answers_to_something_else_are_kept_and_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "texts.jsonl"
    answers(file)
    before = file.read_bytes()
    with pytest.raises(ConfigError, match=message):
        answers(file, **changes)
    assert file.read_bytes() == before


def test_answers_that_do_not_say_how_they_were_written_are_adopted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "texts.jsonl"
    before = answers(file)
    file.with_suffix(".json").unlink()
    assert answers(file) == before
    assert "does not say how" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ConfigError, match="--seed 0, not 1"):
        answers(file, seed=1)


def test_fewer_prompts_of_the_models_own_are_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, file = tiny_loaded(), tmp_path / "prompts.jsonl"
    template = "{% for m in messages %}one {{ m.content }} two{% endfor %}"
    monkeypatch.setattr(target.tokenizer, "chat_template", template)
    llm = LLM(target, kv_tokens=8192)
    invented_prompts(llm, 4, file, 0)
    before = file.read_bytes()
    few = invented_prompts(llm, 1, file, 0)
    assert len(few) <= 1
    assert file.read_bytes() == before
    with pytest.raises(ConfigError, match="--seed 0, not 1"):
        invented_prompts(llm, 4, file, 1)


@pytest.mark.parametrize("broken", [b'{"tokens": [1, 2', b"rubbish\n", b"\xff\n", b"[]\n"])
def test_a_broken_last_answer_is_written_anew(broken: bytes, tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    whole = answers(file)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:2]) + broken)
    assert answers(file) == whole
    assert file.read_bytes() == b"".join(lines)
    file.write_bytes(lines[0] + broken.rstrip() + b"\n" + lines[2])
    with pytest.raises(ConfigError, match=r"texts\.jsonl, line 2, is damaged"):
        answers(file)


def test_prompts_that_do_not_fit_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "one two " * 300
    texts = answers(tmp_path / "texts.jsonl", [PROMPTS[0], long, *PROMPTS[1:]])
    assert len(texts) == 3
    assert "1 of 4 prompts cannot be answered" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ConfigError, match="1 of 1 prompts"):
        answers(tmp_path / "none.jsonl", [long])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no json", "line 3: not valid JSON"),
        ("[1]", "line 3: not a JSON object"),
        ("{}", "line 3: it must have either"),
        ('{"text": 5}', "line 3: it must have either"),
        ('{"messages": []}', "line 3: messages must be"),
        ('{"messages": "hello"}', "line 3: messages must be"),
        ('{"messages": [{"role": "user"}]}', "line 3: messages must be"),
    ],
)
def test_a_broken_line_of_data_is_named(line: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"text": "one two"}\n\n' + line + "\n")
    with pytest.raises(ConfigError, match=message):
        read_texts([file], tiny_loaded(), 100)


def test_data_and_prompts_may_have_marks_and_blank_lines(tmp_path: Path) -> None:
    file, text = tmp_path / "x.jsonl", "one two\u2028three four five six"
    lines = [json.dumps({"text": text, "prompt": text}, ensure_ascii=False)] * 2
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n\n".join(lines).encode())
    assert len(read_texts([file], tiny_loaded(), 100)) == 2
    assert read_prompts(file) == [text, text]
    file.write_text('{"prompt": "a"}\n{"text": "a"}\n')
    with pytest.raises(ConfigError, match="line 2: no prompt"):
        read_prompts(file)


def test_binary_files_of_a_folder_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("one two three four five six")
    (tmp_path / "b.bin").write_bytes(b"\xff\xfe\x00")
    assert len(read_texts([tmp_path], tiny_loaded(), 100)) == 1
    assert "1 of 2 files" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        read_texts([tmp_path / "b.bin"], tiny_loaded(), 100)


def opened(folder: Path, name: str = "tiny-llama") -> FeatureStore:
    return FeatureStore(folder, replace(tiny_loaded(), name=name), (0, 3), 1 << 30)


@pytest.mark.parametrize("name", ["hidden-3.f16", "tokens.i32", "weights.u8"])
def test_short_files_hold_fewer_texts(name: str, tmp_path: Path) -> None:
    texts = some_texts(4)
    store = opened(tmp_path)
    store.fill(texts)
    states = store.hidden((0, 3), 0, 124).clone()
    file = tmp_path / name
    os.truncate(file, file.stat().st_size // 2 + 1)
    store = opened(tmp_path)
    assert len(store) == 2
    store.fill(texts)
    assert torch.allclose(store.hidden((0, 3), 0, 124), states, atol=0.01)
    file.unlink()
    assert len(opened(tmp_path)) == 0


@pytest.mark.parametrize("lengths", [[-5, 40], [1 << 62, 1 << 62], [31, 0, 31]])
def test_impossible_lengths_are_not_believed(lengths: list[int], tmp_path: Path) -> None:
    opened(tmp_path).fill(some_texts(3))
    np.array(lengths, np.int64).tofile(tmp_path / "lengths.i64")
    store = opened(tmp_path)
    assert len(store) <= 1
    store.fill(some_texts(3))
    assert len(store) == 3


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"layers": 3, "target": "x"}'])
def test_a_damaged_store_is_named(content: str, tmp_path: Path) -> None:
    opened(tmp_path)
    (tmp_path / "store.json").write_text(content)
    with pytest.raises(ConfigError, match=r"store\.json is damaged"):
        opened(tmp_path)


def test_another_models_store_is_refused_and_kept(tmp_path: Path) -> None:
    opened(tmp_path).fill(some_texts(3))
    with pytest.raises(ConfigError, match="hidden states of tiny-llama; for other"):
        opened(tmp_path, "other")
    assert len(opened(tmp_path)) == 3


def test_one_prompt_cannot_be_held_out(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.fill([Text([1, 2, *range(9, 29 + i)], 20 + i) for i in range(4)])
    with pytest.raises(ConfigError, match="two different prompts"):
        _split(store, OPTIONS)
    store.fill(some_texts(2))
    assert all(_split(store, replace(OPTIONS, held_out=1.0)))


def test_a_run_that_has_ended_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ridgeline.train.run.PATIENCE", 0)
    given, file = job(tmp_path), tmp_path / "head" / "model.safetensors"
    run_training(tiny_loaded(), given, OPTIONS)
    steps = json.loads((tmp_path / "head" / "provenance.json").read_text())["figures"]["steps"]
    before = file.read_bytes()
    run_training(tiny_loaded(), given, replace(OPTIONS, minutes=9))
    provenance = json.loads((tmp_path / "head" / "provenance.json").read_text())
    assert provenance["figures"]["steps"] == steps
    assert file.read_bytes() == before
    assert file.stat().st_mode == (tmp_path / "head" / "config.json").stat().st_mode


def test_a_run_that_minutes_stopped_goes_on_with_more(tmp_path: Path) -> None:
    options = replace(OPTIONS, epochs=4)

    def trained(name: str, minutes: float | None) -> tuple[int, bytes]:
        given = job(tmp_path, out=tmp_path / name, work=tmp_path / "work")
        run_training(tiny_loaded(), given, replace(options, minutes=minutes))
        figures = json.loads((given.out / "provenance.json").read_text())["figures"]
        return figures["steps"], (given.out / "model.safetensors").read_bytes()

    stopped = trained("a", 1e-9)
    assert stopped[0] == 1
    assert trained("a", 1e-9) == stopped
    assert trained("a", None) == trained("b", None)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"method": "eagle"}, {}, "the method medusa, not eagle"),
        ({"intermediate": 32}, {}, "--intermediate None, not 32"),
        ({"steps": 3}, {}, "--steps 2, not 3"),
        ({}, {"epochs": 3}, "--epochs 2, not 3"),
        ({}, {"seed": 1}, "--seed 0, not 1"),
        ({}, {"learning_rate": 1e-4}, "--learning-rate 0.001, not 0.0001"),
        ({"answers": 2}, {}, "other data"),
    ],
)
def test_another_runs_checkpoint_is_refused(
    changes: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    run_training(tiny_loaded(), job(tmp_path), OPTIONS)
    file = tmp_path / "head" / "checkpoint.pt"
    before = file.read_bytes()
    with pytest.raises(ConfigError, match=message):
        run_training(tiny_loaded(), job(tmp_path, **changes), replace(OPTIONS, **options))
    assert file.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"rubbish", None, {}, {"about": {}}, [1]])
def test_a_damaged_checkpoint_is_named(content: object, tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.fill(some_texts())
    task = new_task("medusa", tiny_loaded(), torch.arange(50), 2, None, 0)
    file = tmp_path / checkpoint.CHECKPOINT
    if content is None:  # cut
        train(task, store, tiny_loaded(), tmp_path, OPTIONS, {})
        os.truncate(file, file.stat().st_size // 2)
    elif isinstance(content, bytes):
        file.write_bytes(content)
    else:
        about = {**OPTIONS.about(), checkpoint.DATA: store.fingerprint()}
        torch.save({"about": about} if content == {"about": {}} else content, file)
    with pytest.raises(ConfigError, match=r"checkpoint\.pt is damaged"):
        train(task, store, tiny_loaded(), tmp_path, OPTIONS, {})


@pytest.mark.parametrize("which", ["out", "work"])
def test_folders_that_cannot_be_written_are_named(which: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place, why in (("file", "it is a file"), ("file/below", "Not a directory")):
        with pytest.raises(ConfigError, match=f"to the folder {tmp_path / place}: {why}"):
            run_training(tiny_loaded(), job(tmp_path, **{which: tmp_path / place}), OPTIONS)


def test_a_folder_that_is_there_may_be_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(**_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refused)  # root may write anywhere
    with pytest.raises(ConfigError, match=f"cannot write to the folder {tmp_path}: Permission"):
        check_writable(tmp_path)


def test_a_loss_that_is_no_number_ends_training(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.fill(some_texts())
    task = new_task("eagle", tiny_loaded(), torch.arange(50), 2, 32, 0)
    with torch.no_grad():
        next(task.network.parameters()).fill_(torch.nan)
    with pytest.raises(ConfigError, match="the loss is nan after 0 steps; use a lower"):
        train(task, store, tiny_loaded(), tmp_path, OPTIONS, {})
    folder = tmp_path / "head"
    with pytest.raises(ConfigError, match="no finite numbers"):
        save_head(folder, "eagle", task.network, task.ids, tiny_loaded(), {}, True, 8)
    assert not folder.exists()


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
@pytest.mark.parametrize(
    "shape",
    [
        {"hidden_size": 80, "head_dim": 16, "num_attention_heads": 8},
        {"head_dim": 64},
    ],
)
def test_heads_fit_the_targets_keys(method: str, shape: dict[str, int], tmp_path: Path) -> None:
    target = tiny_loaded("qwen3", **shape)
    store = FeatureStore(tmp_path, target, range(4), 1 << 30)
    store.fill(some_texts())
    task = new_task(method, target, torch.arange(50), 2, 32, 0)
    assert train(task, store, target, tmp_path, OPTIONS, {})["steps"]
    save_head(tmp_path / "head", method, task.network, task.ids, target, {}, True, 16)
    llm = LLM(target, drafter=f"{method}:{tmp_path / 'head'}", kv_tokens=4096, policy="fixed")
    assert llm.generate("the rest")[0].completions[0].speculation.drafted > 0


@pytest.mark.parametrize("method", ["medusa", "eagle", "eagle3", "mtp"])
def test_tensors_are_made_where_the_batch_is(method: str, tmp_path: Path) -> None:
    """Any other would be made on the meta device, and could not be mixed with the batch."""
    store = FeatureStore(tmp_path, tiny_loaded(), range(4), 1 << 30)
    store.fill(some_texts())
    task = new_task(method, tiny_loaded(), torch.arange(50), 2, 32, 0)
    batches = _Batches(task, store, tiny_loaded(), OPTIONS)

    def judged() -> Batch:
        return batches.judged(batches.make([0, 1]))

    expected = task.losses(judged())
    with torch.device("meta"):
        found = task.losses(judged())
    assert torch.equal(found.total, expected.total)
    assert found.passed == expected.passed


def test_batches_are_made_where_the_target_is(tmp_path: Path) -> None:
    class Elsewhere:
        device = torch.device("meta")

        def embed(self, tokens: torch.Tensor) -> torch.Tensor:
            assert tokens.is_meta
            return torch.empty(len(tokens), 48, device="meta")

    store = opened(tmp_path)
    store.fill(some_texts())
    task = new_task("eagle", tiny_loaded(), torch.arange(50), 2, 32, 0)
    target = replace(tiny_loaded(), model=Elsewhere())  # type: ignore[arg-type]
    batch = _Batches(task, store, target, OPTIONS).make([0, 1])
    tensors = (batch.tokens, batch.embedding, batch.features, batch.final, batch.weight)
    assert all(tensor.is_meta for tensor in tensors)
