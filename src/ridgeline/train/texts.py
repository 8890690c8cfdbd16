"""Training texts that the target writes itself: prompts, and answers to prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from ridgeline.core.sampling import SamplingParams
from ridgeline.errors import ConfigError, RequestError
from ridgeline.llm import LLM
from ridgeline.train.answers import answered
from ridgeline.train.store import Text

LONGEST_PROMPT = 160
"""Tokens after which a prompt of the target's own is given up."""
TEMPERATURES = (0.0, 0.7, 1.0)
"""Of the answers, in turn: what a user asks for is not known beforehand."""


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
        ConfigError: the model has no chat template, or its template changes what a user says; or
            the file holds prompts written with other options.
    """
    mark, loaded = "@prompt@", llm.loaded
    if loaded.tokenizer is None or not loaded.chats:
        raise ConfigError(f"{loaded.name} has no chat template, so no user's turn to begin")
    chat = loaded.tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    before, found, _ = str(chat).partition(mark)
    if not found:
        raise ConfigError(f"the chat template of {loaded.name} changes what a user says")
    start = loaded.encode_text(before)

    shared = SamplingParams(temperature=0.9, max_tokens=LONGEST_PROMPT)
    jobs = [(start, replace(shared, seed=seed + i)) for i in range(count)]
    options = {"--model": loaded.name, "--seed": seed}
    groups = answered(llm, jobs, file, options, "prompts of the target")
    lines = [line for group in groups for line in group]
    texts = [line["text"].strip() for line in lines if line["written"] < LONGEST_PROMPT]
    return list(dict.fromkeys(text for text in texts if text))


def distil(
    llm: LLM, prompts: Sequence[str], file: Path, answers: int, max_tokens: int, seed: int
) -> Iterator[list[Text]]:
    """The target answers every prompt `answers` times; continued where `file` ends.

    Yields the texts in groups: first all that the file holds already, then those just written. Each
    lacks its last token, which the target never read. Prompts that do not fit into the context are
    left out, and counted on the terminal.

    Args:
        llm: the target, without drafts.
        prompts: chat prompts where the model has a chat template, else plain ones.
        file: JSON Lines, a text each.
        answers: answers to each prompt, at the temperatures in turn.
        max_tokens: length of an answer.
        seed: of the sampled answers.

    Raises:
        ConfigError: no prompt can be answered, or the file holds answers to others.
    """
    encoded = _encoded(llm, prompts, SamplingParams(max_tokens=max_tokens))
    turns = [(prompt, n + i) for n in range(answers) for i, prompt in enumerate(encoded)]
    jobs = [
        (
            prompt,
            SamplingParams(
                temperature=TEMPERATURES[turn % len(TEMPERATURES)],
                seed=seed + i,
                max_tokens=max_tokens,
            ),
        )
        for i, (prompt, turn) in enumerate(turns)
    ]
    options = {"--model": llm.loaded.name, "--seed": seed, "--answer-tokens": max_tokens}
    for lines in answered(llm, jobs, file, options, "answers of the target"):
        yield [Text(line["tokens"][:-1], line["written"] - 1) for line in lines]


def _encoded(llm: LLM, prompts: Sequence[str], params: SamplingParams) -> list[list[int]]:
    """The prompts that the target can answer."""
    loaded, encoded, refused = llm.loaded, list[list[int]](), list[str]()
    for prompt in prompts:
        try:
            tokens = (
                loaded.encode_chat([{"role": "user", "content": prompt}])
                if loaded.chats
                else loaded.encode_prompt(prompt)
            )
            llm.engine.check_request(tokens, params)
        except RequestError as error:
            refused.append(f"{prompt!r:.40}: {error}")
        else:
            encoded.append(tokens)
    if refused:
        note = f"{len(refused)} of {len(prompts)} prompts cannot be answered, such as {refused[0]}"
        if not encoded:
            raise ConfigError(note)
        Console().print(f"left out: {note}", markup=False)
    return encoded
