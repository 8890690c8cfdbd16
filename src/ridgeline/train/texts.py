"""Training texts: files, or answers that the target writes itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress

from ridgeline.core.sampling import SamplingParams
from ridgeline.errors import ConfigError
from ridgeline.llm import LLM
from ridgeline.model.load import LoadedModel
from ridgeline.train.store import Text

GROUP = 256
"""Requests that are answered before their texts are written down."""
TEMPERATURES = (0.0, 0.7, 1.0)
"""Of the answers, in turn: what a user asks for is not known beforehand."""


def read_prompts(file: Path) -> list[str]:
    """A prompt a line, or `{"prompt": ...}` a line of a .jsonl file.

    Raises:
        ConfigError: the file cannot be read or holds none.
    """
    try:
        lines = [line for line in file.read_text("utf-8").splitlines() if line.strip()]
        prompts = [json.loads(x)["prompt"] for x in lines] if file.suffix == ".jsonl" else lines
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} holds no prompts: {error}") from error
    if not prompts or not all(isinstance(p, str) for p in prompts):
        raise ConfigError(f"{file} holds no prompts; it must have one a line")
    return prompts


def read_texts(files: Sequence[Path], target: LoadedModel, length: int) -> list[Text]:
    """Plain text and code, cut into pieces; conversations ({"messages": [...]}) of .jsonl files.

    Raises:
        ConfigError: a file cannot be read.
    """
    texts = []
    for file in _walk(files):
        try:
            content = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file} cannot be read as text: {error}") from error
        if file.suffix == ".jsonl":
            texts += [_conversation(json.loads(line), target) for line in content.splitlines()]
        else:
            tokens = target.encode_text(content)
            pieces = [tokens[i : i + length] for i in range(0, len(tokens), length)]
            texts += [Text(piece, len(piece)) for piece in pieces if len(piece) > 8]
    return texts


def _walk(files: Sequence[Path]) -> Iterator[Path]:
    for file in files:
        yield from sorted(f for f in file.rglob("*") if f.is_file()) if file.is_dir() else [file]


def _conversation(line: dict[str, Any], target: LoadedModel) -> Text:
    if "messages" not in line:
        tokens = target.encode_text(str(line["text"]))
        return Text(tokens, len(tokens))
    *before, last = line["messages"]
    prompt = target.encode_chat(before)
    answer = target.encode_text(last["content"])
    return Text([*prompt, *answer], len(answer))


def distil(
    llm: LLM, prompts: Sequence[str], file: Path, answers: int, max_tokens: int, seed: int
) -> list[Text]:
    """The target answers every prompt `answers` times; continued where `file` ends.

    Args:
        llm: the target, without a drafter.
        prompts: chat prompts where the model has a chat template, else plain ones.
        file: JSON Lines, a text each.
        answers: answers to each prompt, at the temperatures in turn.
        max_tokens: length of an answer.
        seed: of the sampled answers.
    """
    jobs = [(prompt, number) for number in range(answers) for prompt in prompts]
    loaded = llm.loaded
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = file.read_text("utf-8").splitlines() if file.is_file() else []
    done = len(kept) if len(kept) == len(jobs) else len(kept) // GROUP * GROUP
    file.write_text("".join(line + "\n" for line in kept[:done]), "utf-8")
    with Progress() as progress, file.open("a", encoding="utf-8") as sink:
        bar = progress.add_task("answers of the target", total=len(jobs), completed=done)
        for start in range(done, len(jobs), GROUP):
            group = jobs[start : start + GROUP]
            encoded = [
                loaded.encode_chat([{"role": "user", "content": prompt}])
                if loaded.chats
                else loaded.encode_prompt(prompt)
                for prompt, _ in group
            ]
            params = [
                SamplingParams(
                    temperature=TEMPERATURES[number % len(TEMPERATURES)],
                    seed=seed + start + i,
                    max_tokens=max_tokens,
                )
                for i, (_, number) in enumerate(group)
            ]
            for prompt, output in zip(encoded, llm.generate(encoded, params), strict=True):
                text = {"tokens": [*prompt, *output.token_ids], "written": len(output.token_ids)}
                sink.write(json.dumps(text) + "\n")
            sink.flush()
            progress.update(bar, completed=start + len(group))
    lines = file.read_text("utf-8").splitlines()
    return [Text(**json.loads(line)) for line in lines]
