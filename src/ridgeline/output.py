"""What the command line prints: texts or JSON Lines in the order of the prompts, and figures."""

from __future__ import annotations

import json
import sys
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from ridgeline.llm import Completion

TITLE_WIDTH = 72


class InOrder:
    """Several texts, written to one stream one after another though they grow at the same time.

    The first unfinished one appears as it grows, the others when their turn comes.
    """

    def __init__(self, keys: Iterable[Hashable], stream: TextIO) -> None:
        self._held = dict.fromkeys(keys, "")
        self._ended: set[Hashable] = set()
        self._stream = stream

    def put(self, key: Hashable, text: str, end: bool) -> None:
        """Adds to the text of `key`; `end` says that nothing more will follow."""
        self._held[key] += text
        if end:
            self._ended.add(key)
        while self._held:
            first = next(iter(self._held))
            self._stream.write(self._held[first])
            self._held[first] = ""
            if first not in self._ended:
                break
            del self._held[first]
        self._stream.flush()


def report(message: object) -> None:
    """Prints one error as one line on standard error."""
    print("error:", " ".join(str(message).split()), file=sys.stderr, flush=True)


def title(number: int, count: int, prompt: str) -> str:
    """The line above a text where there are several."""
    line = f"[{number}/{count}] {' '.join(prompt.split())}"
    return (line if len(line) <= TITLE_WIDTH else line[: TITLE_WIDTH - 1] + "…") + "\n"


def record(completion: Completion) -> dict[str, Any]:
    """One completion as the object of its JSON line."""
    speculation = completion.speculation
    fields: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": len(completion.token_ids),
        "steps": speculation.steps,
        "drafted_steps": speculation.drafted_steps,
        "drafted": speculation.drafted,
        "accepted": speculation.accepted,
        "seconds_to_first_token": completion.seconds_to_first_token,
        "decode_seconds": completion.decode_seconds,
        "tokens_per_s": completion.tokens_per_s,
    }
    if completion.logprobs is not None:
        fields["logprobs"] = [asdict(entry) for entry in completion.logprobs]
    return fields


def json_line(fields: dict[str, Any]) -> str:
    """One line of JSON, in ASCII, so that no terminal or locale can spoil it."""
    return json.dumps(fields) + "\n"


def tokens_per_step(completions: Sequence[Completion]) -> float | None:
    """Mean tokens that a decode step emitted; the first token belongs to the prompt's own pass."""
    steps = sum(completion.speculation.steps for completion in completions)
    emitted = sum(max(len(completion.token_ids) - 1, 0) for completion in completions)
    return emitted / steps if steps else None


def summary(completions: Sequence[Completion], seconds: float) -> str:
    """One line about a run that took `seconds` in all."""
    tokens = sum(len(completion.token_ids) for completion in completions)
    parts = [f"{tokens} tokens in {seconds:.1f} s"]
    if len(completions) == 1:
        only = completions[0]
        if only.tokens_per_s is not None:
            parts.append(f"{only.tokens_per_s:.1f} tokens/s after the first")
        parts.append(f"finish: {only.finish_reason}")
    else:
        parts.append(f"{tokens / seconds:.1f} tokens/s over {len(completions)} texts")
    per_step = tokens_per_step(completions)
    drafted = sum(completion.speculation.drafted for completion in completions)
    if per_step and drafted:
        accepted = sum(completion.speculation.accepted for completion in completions)
        parts.append(f"{per_step:.2f} tokens per step, {accepted} of {drafted} drafts accepted")
        counts = [completion.speculation for completion in completions]
        steps = sum(count.drafted_steps for count in counts), sum(count.steps for count in counts)
        parts.append("drafts in {} of {} steps".format(*steps))
    return "; ".join(parts)
