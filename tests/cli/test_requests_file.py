"""Prompt files: which lines run, and how a broken one is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline import SamplingParams
from ridgeline.requests_file import read_jobs


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "not a JSON object"),
        ("{}", "either `prompt` or `messages`"),
        ('{"prompt": "a", "messages": []}', "either `prompt` or `messages`"),
        ('{"prompt": 3}', "prompt is 3; it must be a string"),
        ('{"prompt": "a", "temprature": 1}', "unknown key 'temprature'; the keys are prompt"),
        ('{"prompt": "a", "temperature": "hot"}', "temperature is 'hot'; it must be a number"),
        ('{"prompt": "a", "temperature": NaN}', "temperature is nan"),
        ('{"prompt": "a", "max_tokens": 2.5}', "max_tokens is 2.5; it must be an integer"),
        ('{"prompt": "a", "top_p": 0}', "top_p is 0"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "'x'"),
        ('{"prompt": "a", "logit_bias": [1]}', "logit_bias is"),
        ('{"prompt": "a", "bad_words": "no"}', "a list of strings"),
        ('{"prompt": "a", "stop": ""}', "stop is ''"),
        ('{"messages": []}', "messages must be a list"),
        ('{"messages": [{"role": "user"}]}', "messages must be a list"),
        ("[" * 100_000, "not valid JSON"),
        ('{"prompt": "\udcff"}', "not UTF-8"),
    ],
)
def test_broken_lines(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    good = b'\xef\xbb\xbf{"prompt": "fine"}\n\n'
    path.write_bytes(good + line.encode(errors="surrogateescape") + b'\n{"prompt": "fine too"}')
    jobs, broken = read_jobs(path, SamplingParams())
    assert [(job.prompt, job.line) for job in jobs] == [("fine", 1), ("fine too", 4)]
    (only,) = broken
    assert only.startswith(f"{path}, line 3: ")
    assert message in only
