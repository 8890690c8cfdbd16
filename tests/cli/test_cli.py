"""The command line: what it prints where, its exit codes, and one clear line for every mistake."""

from __future__ import annotations

import dataclasses
import inspect
import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ridgeline import LLM, EngineConfig, SamplingParams, cli
from ridgeline.engine import Engine, Progress
from ridgeline.output import InOrder
from tests.cli.conftest import Run
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer

KEYS = {
    "text",
    "token_ids",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "steps",
    "drafted_steps",
    "drafted",
    "accepted",
    "seconds_to_first_token",
    "decode_seconds",
    "tokens_per_s",
}


# What comes out


def test_json_lines_agree_with_the_api(run: Run, folder: Path) -> None:
    prompts = ["the other then", "in an onion, in an onion, in an"]
    options = ["--drafter", "ngram", "--policy", "fixed", "--max-tokens", "12", "--logprobs", "2"]
    result = run(*(part for p in prompts for part in ("--prompt", p)), *options, "--json")
    assert (result.code, result.stderr) == (0, "")
    llm = LLM(folder, dtype="float32", drafter="ngram", kv_tokens=4096, policy="fixed")
    outputs = llm.generate(prompts, SamplingParams(max_tokens=12, logprobs=2))
    for fields, output in zip(result.records, outputs, strict=True):
        (expected,) = output.completions
        assert set(fields) == KEYS | {"logprobs"}
        assert fields["text"] == expected.text
        assert fields["token_ids"] == expected.token_ids
        assert fields["finish_reason"] == expected.finish_reason
        assert fields["prompt_tokens"] == output.prompt_tokens
        assert fields["completion_tokens"] == len(expected.token_ids)
        assert fields["steps"] == expected.speculation.steps
        assert fields["drafted_steps"] == expected.speculation.drafted_steps
        assert fields["drafted"] == expected.speculation.drafted
        assert fields["accepted"] == expected.speculation.accepted
        tokens_per_s = (fields["completion_tokens"] - 1) / fields["decode_seconds"]
        assert fields["tokens_per_s"] == pytest.approx(tokens_per_s)
        assert [entry["token"] for entry in fields["logprobs"]] == expected.token_ids
        assert all(len(entry["top"]) == 2 for entry in fields["logprobs"])


def test_text_streams_to_stdout_and_a_summary_to_stderr(run: Run) -> None:
    options = ["--prompt", "then the", "--max-tokens", "9", "--ignore-eos"]
    text = run(*options, "--json").records[0]["text"]
    code, stdout, stderr = run(*options)
    assert (code, stdout) == (0, text + "\n")
    summary = r"9 tokens in [\d.]+ s; [\d.]+ tokens/s after the first; finish: length"
    assert re.fullmatch(summary + r".*; drafter ngram\n", stderr)  # no head is known for this one
    code, again, stderr = run(*options, "--drafter", "none")
    assert again == stdout
    assert re.fullmatch(summary + r"\n", stderr)


def test_texts_come_in_the_order_of_the_prompts(run: Run) -> None:
    options = ["--prompt", "on and", "--prompt", "at", "--max-tokens", "20", "--ignore-eos"]
    first, second = (fields["text"] for fields in run(*options, "--json").records)
    code, stdout, stderr = run(*options)
    assert code == 0
    assert stdout == f"[1/2] on and\n{first}\n[2/2] at\n{second}\n"
    assert "over 2 texts" in stderr


def test_samples_are_numbered_and_reproducible(run: Run) -> None:
    options = ["--prompt", "the", "--n", "3", "--temperature", "1", "--seed", "5", "--json"]
    options += ["--max-tokens", "8"]
    samples, again = run(*options).records, run(*options).records
    assert [fields["sample"] for fields in samples] == [0, 1, 2]
    texts = [fields["token_ids"] for fields in samples]
    assert texts == [fields["token_ids"] for fields in again]
    assert len({tuple(text) for text in texts}) == 3


def test_chat_goes_through_the_template(run: Run) -> None:
    options = ["--prompt", "hi", "--json", "--max-tokens", "4"]
    (chat,), (plain,) = run(*options, "--chat").records, run(*options).records
    assert "assistant" in CHAT_TEMPLATE
    assert chat["prompt_tokens"] > plain["prompt_tokens"]


def test_sampling_options_reach_the_engine(run: Run, folder: Path) -> None:
    banned = "th"
    result = run(
        *("--prompt", "the other", "--json", "--logit-bias", "70=100", "--max-tokens", "6"),
        *("--stop-token-ids", "71", "--bad-words", banned, "--repetition-penalty", "1.5"),
        *("--frequency-penalty", "2", "--presence-penalty", "1", "--min-tokens", "2"),
        *("--top-k", "3", "--top-p", "0.9", "--min-p", "0.01", "--temperature", "0.5"),
        *("--seed", "3", "--stop", "qq", "--verify", "rejection", "--nodes", "4", "--depth", "2"),
    )
    llm = LLM(folder, dtype="float32", kv_tokens=4096)
    params = SamplingParams(
        logit_bias={70: 100.0},
        max_tokens=6,
        stop_token_ids=(71,),
        bad_words=llm.bad_words([banned]),
        repetition_penalty=1.5,
        frequency_penalty=2,
        presence_penalty=1,
        min_tokens=2,
        top_k=3,
        top_p=0.9,
        min_p=0.01,
        temperature=0.5,
        seed=3,
        stop=("qq",),
    )
    (output,) = llm.generate("the other", params)
    assert result.records[0]["token_ids"] == output.token_ids
    assert output.token_ids[0] == 70


def test_every_parameter_has_an_option_with_its_default() -> None:
    options = inspect.signature(cli.generate).parameters
    for field in dataclasses.fields(SamplingParams):
        default = options[field.name].default
        if default is not None:
            assert default == field.default, field.name
        elif field.default is not None:  # a collection, empty both here and there
            assert not getattr(SamplingParams(), field.name), field.name
    config = EngineConfig()
    hints = inspect.get_annotations(cli.generate, eval_str=True)
    for name, value in (
        ("depth", config.depth),
        ("batch", config.max_batch),
        ("verify", config.verify),
    ):
        assert hints[name].__metadata__[0].show_default == str(value)


# Prompt files


def test_plain_prompt_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("the other\r\n\nénorme \u2028 x\n".encode())
    result = run("--prompt-file", path, "--json", "--max-tokens", "3")
    assert result.code == 0
    assert [fields["line"] for fields in result.records] == [1, 3]
    encode = tiny_tokenizer().encode
    expected = [len(encode("the other")), len(encode("énorme \u2028 x"))]
    assert [fields["prompt_tokens"] for fields in result.records] == expected


def test_json_prompt_file_with_broken_lines(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [
        '{"prompt": "the", "max_tokens": 2, "ignore_eos": true}',
        '{"prompt": "the", "max_tokens": 3',
        '{"messages": [{"role": "user", "content": "hi"}], "stop": "zz"}',
        '{"prompt": ""}',
        '{"prompt": "in", "n": 2, "temperature": 1, "seed": 1, "logit_bias": {"70": 100}}',
        f'{{"prompt": "the", "temperature": {10**400}}}',
    ]
    path.write_text("\n".join(lines))
    result = run("--prompt-file", path, "--json", "--max-tokens", "4")
    done = result.records
    assert result.code == 1
    assert [(fields["line"], fields.get("sample")) for fields in done] == [
        (1, None),
        (3, None),
        (5, 0),
        (5, 1),
    ]
    assert done[0]["completion_tokens"] == 2
    assert {done[2]["token_ids"][0], done[3]["token_ids"][0]} == {70}
    first, third, second = result.stderr.splitlines()  # parameters are read before prompts
    assert third.startswith(f"error: {path}, line 6: temperature is 1000")
    assert first == f"error: {path}, line 2: not valid JSON: Expecting ',' delimiter at column 34"
    assert second.startswith(f"error: {path}, line 4: the prompt is empty")


# Ctrl-C


@pytest.fixture
def interrupt_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Arms a Ctrl-C that arrives in the middle of the engine's n-th step."""

    def arm(steps: int) -> None:
        step, count = Engine.step, 0

        def interrupted(engine: Engine) -> list[Progress]:
            nonlocal count
            count += 1
            if count == steps:
                signal.raise_signal(signal.SIGINT)
            return step(engine)

        monkeypatch.setattr(Engine, "step", interrupted)

    return arm


def test_ctrl_c_keeps_what_there_is(run: Run, interrupt_after: Callable[[int], None]) -> None:
    options = ["--prompt", "the other", "--max-tokens", "30", "--ignore-eos"]
    whole = run(*options, "--json").records[0]
    before = signal.getsignal(signal.SIGINT)  # ignored, where tests run in the background
    interrupt_after(5)
    result = run(*options, "--prompt", "in", "--json")
    kept, other = result.records
    assert (result.code, result.stderr) == (130, "")
    assert (kept["finish_reason"], other["finish_reason"]) == ("abort", "abort")
    assert kept["token_ids"] == whole["token_ids"][:5]
    assert signal.getsignal(signal.SIGINT) is before

    interrupt_after(5)
    code, stdout, stderr = run(*options)
    assert code == 130
    assert whole["text"].startswith(stdout.removesuffix("\n"))
    assert len(stdout) > 1
    assert "finish: abort" in stderr


def test_ctrl_c_in_a_process_of_its_own(folder: Path) -> None:
    command = ["-m", "ridgeline", "generate", "--model", str(folder), "--prompt", "a"]
    with subprocess.Popen(
        [sys.executable, *command, "--ignore-eos", "--max-tokens", "2000", "--threads", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout
        assert process.stderr
        started = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, errors = process.stdout.read(), process.stderr.read()
    assert process.returncode == 130
    assert len(started + rest) < 10_000
    assert b"finish: abort" in errors
    assert errors.count(b"\n") == 1


def test_ctrl_c_elsewhere_ends_quietly(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def twice(_: Sequence[str]) -> int:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
            unwound.append(True)
            raise
        return 0

    unwound: list[bool] = []
    monkeypatch.setattr(cli, "execute", twice)
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as end:
            cli.main()
    finally:
        signal.signal(signal.SIGINT, before)
    assert (end.value.code, unwound) == (130, [True])
    assert capfd.readouterr() == ("", "")


def test_ctrl_c_while_the_program_starts(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "ridgeline"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_text_that_the_terminal_cannot_show_is_replaced(folder: Path) -> None:
    command = ["generate", "--model", str(folder), "--max-tokens", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "ridgeline", *command, "--prompt", "☃ ☃", "--prompt", "☃"],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "1"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0
    assert b"[1/2] ? ?" in done.stdout
    assert b"Traceback" not in done.stderr


def test_in_order() -> None:
    stream = io.StringIO()
    out = InOrder("abc", stream)
    out.put("b", "second ", end=False)
    out.put("a", "first ", end=False)
    assert stream.getvalue() == "first "
    out.put("c", "third", end=True)
    out.put("a", "more ", end=True)
    assert stream.getvalue() == "first more second "
    out.put("b", "", end=True)
    assert stream.getvalue() == "first more second third"
