"""Every mistake of a user: one clear line on standard error, the right exit code, no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run, assert_refused
from tests.tiny import save_tiny


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "", "--chat"], "the prompt is empty"),
        (["--prompt", "x" * 3000], "context of 2048"),
        (["--drafter", "nothing"], "there is no drafter 'nothing'; the drafters are "),
        (["--depth", "-1"], "depth is -1"),
        (["--nodes", "65"], "nodes is 65"),
        (["--batch", "0"], "max_batch is 0"),
        (["--kv-tokens", "0"], "kv_tokens is 0"),
        (["--threads", "0"], "threads is 0"),
        (["--policy", "best"], "policy is 'best'; it must be one of fixed, table, goodput"),
        (["--policy", "fixed:3"], "policy is 'fixed:3'; it must be one of fixed, table, goodput"),
        (["--policy", "table:8"], "policy is 'table:8'; write for example table:8=5,32=2"),
        (["--policy", "table:8=5,4=2"], "the numbers of texts must ascend"),
        (["--verify", "maybe"], "verify is 'maybe'; it must be one of match"),
        (["--dtype", "float8"], "dtype is 'float8'"),
        (["--device", "abacus"], "device is 'abacus'"),
        (["--temperature", "-1"], "temperature is -1.0; it must be a number, 0 or more"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--top-p", "0"], "top_p is 0.0"),
        (["--top-k", "-3"], "top_k is -3"),
        (["--min-p", "1.5"], "min_p is 1.5"),
        (["--repetition-penalty", "0"], "repetition_penalty is 0.0"),
        (["--frequency-penalty", "2.5"], "frequency_penalty is 2.5"),
        (["--presence-penalty", "-3"], "presence_penalty is -3.0"),
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--min-tokens", "9", "--max-tokens", "8"], "min_tokens is 9"),
        (["--n", "0"], "n is 0"),
        (["--seed", "-1"], "seed is -1"),
        (["--stop", ""], "stop is "),
        (["--stop-token-ids", "100000"], "token id 100000 is outside the vocabulary"),
        (["--logit-bias", "100000=1"], "token id 100000 is outside the vocabulary"),
        (["--logit-bias", "7"], "logit_bias is '7'; it must be ID=BIAS"),
        (["--logit-bias", "7=1", "--logit-bias", "7=2"], "logit_bias names token 7 twice"),
        (["--bad-words", ""], "bad_words holds an empty text"),
        (["--confidence", "1"], "confidence is 1.0; it must be at least 0 and below 1"),
        (["--drafter", "ngram:min=2,min=3"], "cannot read 'min=3'"),
        (["--model", ""], "the model's name is empty"),
        (["--max-tokens", "many"], "Invalid value for '--max-tokens'"),
        (["--no-such-option"], "--no-such-option"),
        (["--prompt-file", "missing.txt"], "cannot read the prompt file missing.txt: No such file"),
    ],
)
def test_mistakes_of_one_line(run: Run, arguments: list[str], message: str) -> None:
    prompt = [] if "--prompt" in arguments else ["--prompt", "the"]
    assert_refused(run(*prompt, *arguments), message)


def test_models_that_are_none(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00\x10")
    (tmp_path / "text.gguf").write_text("no model")
    for name, message in (
        ("missing", "missing"),
        ("missing.gguf", "missing.gguf"),
        ("empty", "config.json"),
        ("cut.gguf", "cut.gguf"),
        ("text.gguf", "text.gguf"),
    ):
        assert_refused(run("--prompt", "the", model=tmp_path / name), message)
    no_template = tmp_path / "plain"
    save_tiny("llama", no_template)
    (no_template / "chat_template.jinja").unlink()
    assert_refused(run("--prompt", "hi", "--chat", model=no_template), "no chat template")


def test_nothing_to_do(run: Run, tmp_path: Path) -> None:
    assert_refused(run(), "there is no prompt")
    (tmp_path / "blank.txt").write_text("\n \n")
    assert_refused(run("--prompt-file", tmp_path / "blank.txt"), "there is no prompt")
    (tmp_path / "broken.jsonl").write_text("{\n")
    code, stdout, stderr = run("--prompt-file", tmp_path / "broken.jsonl")
    assert (code, stdout) == (1, "")
    assert "line 1" in stderr
