"""Training texts: files, or answers that the target writes itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
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
LONGEST_PROMPT = 160
"""Tokens after which a prompt of the target's own is given up."""
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


def invented_prompts(llm: LLM, count: int, file: Path, seed: int) -> list[str]:
    """Prompts of the target's own: what it writes where a user's turn begins.

    Far more varied than prompts made by hand, and of the kind that it was tuned on. Source: Magpie
    (Xu et al., arXiv 2406.08464).

    Args:
        llm: the target, without a drafter.
        count: prompts to write; unfinished, empty and repeated ones are left out of the result.
        file: JSON Lines, one each; continued where it ends.
        seed: of the sampling.

    Raises:
        ConfigError: the model has no chat template, or its template changes what a user says.
    """
    mark, loaded = "@prompt@", llm.loaded
    if loaded.tokenizer is None or not loaded.chats:
        raise ConfigError(f"{loaded.name} has no chat template, so no user's turn to begin")
    chat = loaded.tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    before, found, _ = str(chat).partition(mark)
    if not found:
        raise ConfigError(f"the chat template of {loaded.name} changes what a user says")
    start = loaded.encode_text(before)

    def requests(first: int, last: int) -> list[tuple[list[int], SamplingParams]]:
        params = (
            SamplingParams(temperature=0.9, seed=seed + i, max_tokens=LONGEST_PROMPT)
            for i in range(first, last)
        )
        return [(start, p) for p in params]

    groups = _answered(llm, count, requests, file, "prompts of the target")
    lines = [line for group in groups for line in group]
    texts = [line["text"].strip() for line in lines if line["written"] < LONGEST_PROMPT]
    return list(dict.fromkeys(text for text in texts if text))


def distil(
    llm: LLM, prompts: Sequence[str], file: Path, answers: int, max_tokens: int, seed: int
) -> Iterator[list[Text]]:
    """The target answers every prompt `answers` times; continued where `file` ends.

    Yields the texts in groups: first all that the file holds already, then those just written. Each
    lacks its last token, which the target never read.

    Args:
        llm: the target, without drafts.
        prompts: chat prompts where the model has a chat template, else plain ones.
        file: JSON Lines, a text each.
        answers: answers to each prompt, at the temperatures in turn.
        max_tokens: length of an answer.
        seed: of the sampled answers.
    """
    jobs = [(prompt, n + i) for n in range(answers) for i, prompt in enumerate(prompts)]
    loaded = llm.loaded

    def requests(first: int, last: int) -> list[tuple[list[int], SamplingParams]]:
        return [
            (
                loaded.encode_chat([{"role": "user", "content": prompt}])
                if loaded.chats
                else loaded.encode_prompt(prompt),
                SamplingParams(
                    temperature=TEMPERATURES[turn % len(TEMPERATURES)],
                    seed=seed + first + i,
                    max_tokens=max_tokens,
                ),
            )
            for i, (prompt, turn) in enumerate(jobs[first:last])
        ]

    for lines in _answered(llm, len(jobs), requests, file, "answers of the target"):
        yield [Text(line["tokens"][:-1], line["written"] - 1) for line in lines]


def _answered(
    llm: LLM,
    count: int,
    requests: Callable[[int, int], list[tuple[list[int], SamplingParams]]],
    file: Path,
    title: str,
) -> Iterator[list[dict[str, Any]]]:
    """What `llm` answers to `count` requests: what `file` holds of it, then a group at a time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = file.read_text("utf-8").splitlines() if file.is_file() else []
    done = len(kept) if len(kept) == count else len(kept) // GROUP * GROUP
    file.write_text("".join(line + "\n" for line in kept[:done]), "utf-8")
    yield [json.loads(line) for line in kept[:done]]
    with Progress() as progress, file.open("a", encoding="utf-8") as sink:
        bar = progress.add_task(title, total=count, completed=done)
        for first in range(done, count, GROUP):
            prompts, params = zip(*requests(first, min(first + GROUP, count)), strict=True)
            lines = []
            for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
                ids = output.token_ids
                lines.append({"tokens": [*prompt, *ids], "written": len(ids), "text": output.text})
            sink.writelines(json.dumps(line) + "\n" for line in lines)
            sink.flush()
            progress.update(bar, completed=min(first + GROUP, count))
            yield lines
