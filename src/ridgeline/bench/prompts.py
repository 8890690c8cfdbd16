"""What a benchmark writes answers to: ten prompts of several kinds, or a file of the user's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ridgeline.core.params import SamplingParams
from ridgeline.errors import ConfigError, RequestError
from ridgeline.llm import LLM, Request
from ridgeline.requests_file import Job, read_jobs

SHIPPED = Path(__file__).with_name("prompts.jsonl")
"""The ten prompts. No head was trained on them: `ridgeline.train.prompts` holds none of them."""
UNNAMED = "all"
"""The kind of a prompt whose file names none."""


@dataclass(frozen=True)
class Prompt:
    """One prompt, encoded."""

    kind: str
    request: Request
    """its temperature, seed and length are each run's own"""


def read_prompts(path: Path) -> list[Job]:
    """The prompts of a file, in the format of `generate`.

    Raises:
        ConfigError: the file cannot be read, has no prompt, or has a broken line.
    """
    jobs, broken = read_jobs(path, SamplingParams())
    if broken:
        raise ConfigError(broken[0])
    if not jobs:
        raise ConfigError(f"there is no prompt in {path}; give a file with a prompt a line")
    return jobs


def encode(llm: LLM, jobs: Sequence[Job], file: Path, tokens: int) -> list[Prompt]:
    """Each text as a user's message where the model has a chat template, else as it stands.

    Raises:
        ConfigError: a prompt cannot run with answers of `tokens` tokens.
    """
    prompts = []
    for job in jobs:
        text = job.prompt
        if llm.loaded.chats and text and isinstance(text, str):
            text = [{"role": "user", "content": text}]
        try:
            words = llm.bad_words(job.bad_words)
            params = replace(
                job.params, max_tokens=tokens, n=1, logprobs=None, seed=None, bad_words=words
            )
            request = llm.request(text, params)
        except RequestError as error:
            raise ConfigError(f"{file}, line {job.line}: {error}") from None
        prompts.append(Prompt(job.kind or UNNAMED, request))
    return prompts
