"""Text as it streams: unfinished characters and stop strings, with drafts and without."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.core.batch import Batch
from ridgeline.core.text import REPLACEMENT, TextStream
from ridgeline.core.tree import DraftProposal
from ridgeline.draft.base import DraftContext, DraftRequest, register
from ridgeline.model.target import TargetOutput
from ridgeline.model.torch_target import TorchTarget
from tests.engines import FixedDrafter, tiny_llm
from tests.tiny import EOS, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
PROMPT = TOKENIZER.encode("Say:")
WIDE = (
    "naïve 🙂 自然語言, 👩‍👩‍👧 é.\n終"  # characters of one to four bytes, nearly every byte a token
)
FALSE_STARTS = "a xx b xxx c xxxy d xxxyz e"
SCRIPT: list[int] = []
"""What model and drafter write; see `say`."""


class ScriptDrafter(FixedDrafter):
    """Drafts what the model is about to write, as far as it may."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftProposal]:
        starts = [len(request.sequence.tokens) - len(PROMPT) for request in requests]
        return [
            DraftProposal.chain(SCRIPT[start : start + request.depth])
            for start, request in zip(starts, requests, strict=True)
        ]


@register("script")
def _script(argument: str, context: DraftContext) -> ScriptDrafter:
    return ScriptDrafter("script", [])


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[int]]:
    """Makes the tiny model write a text after `PROMPT`, and end; returns the text's tokens."""
    forward = TorchTarget.forward

    def scripted(target: TorchTarget, batch: Batch, features: Sequence[int] = ()) -> TargetOutput:
        output = forward(target, batch, features)
        following = batch.positions[batch.keep] + 1 - len(PROMPT)
        logits = torch.zeros_like(output.logits)
        logits[torch.arange(len(following)), torch.tensor(SCRIPT)[following]] = 50.0
        return TargetOutput(logits, output.features)

    def say(text: str) -> list[int]:
        tokens: list[int] = TOKENIZER.encode(text)
        SCRIPT[:] = [*tokens, *[EOS] * 16]
        monkeypatch.setattr(TorchTarget, "forward", scripted)
        return tokens

    return say


def blocks(depth: int) -> LLM:
    """An engine that writes depth + 1 tokens a step, the first step's one apart."""
    return tiny_llm("llama", "script", depth=depth)


@pytest.mark.parametrize("depth", [0, 1, 2, 10])
def test_unfinished_characters_are_held_back(depth: int, say: Callable[[str], list[int]]) -> None:
    tokens = say(WIDE)
    assert len(tokens) > 1.5 * len(WIDE)
    shown, seen = "", 0
    for event in blocks(depth).stream([PROMPT], SamplingParams(max_tokens=100)):
        for piece in event.pieces:
            seen += 1
            shown += piece.text
            written = TOKENIZER.decode(tokens[:seen])
            assert shown == written.rstrip(REPLACEMENT)  # all that is finished, and no more
    assert shown == WIDE


def test_what_is_never_finished_is_shown_at_the_end(say: Callable[[str], list[int]]) -> None:
    tokens = say("ab🙂")
    for depth in (0, 2, 10):
        params = SamplingParams(max_tokens=len(tokens) - 1)
        events = list(blocks(depth).stream([PROMPT], params))
        assert "".join(event.text for event in events) == "ab" + REPLACEMENT
        assert events[-1].completion is not None
        assert events[-1].completion.text == "ab" + REPLACEMENT


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 10])
@pytest.mark.parametrize(
    ("text", "stop"),
    [
        (WIDE, "自然"),
        (WIDE, "🙂"),
        (WIDE, " 👩"),
        (FALSE_STARTS, "xxxyz"),
        (FALSE_STARTS, "xxxy d"),
    ],
)
def test_a_stop_string_over_tokens_and_steps(
    text: str, stop: str, depth: int, say: Callable[[str], list[int]]
) -> None:
    tokens = say(text)
    end = next(n for n in range(len(tokens)) if stop in TOKENIZER.decode(tokens[:n]))
    start = next(
        n for n in range(len(tokens)) if text.index(stop) < len(TOKENIZER.decode(tokens[:n]))
    )
    params = SamplingParams(max_tokens=100, stop=(stop, "never"))
    llm = blocks(depth)
    shown, steps, written = "", set(), 0
    for step, event in enumerate(llm.stream([PROMPT], params)):
        for piece in event.pieces:
            written += 1
            steps |= {step} if start <= written <= end else set()
            shown += piece.text
            assert text.startswith(shown)
            assert len(shown) <= text.index(stop)
    assert shown == text[: text.index(stop)]
    completion = event.completion
    assert completion is not None
    assert (completion.text, completion.finish_reason) == (shown, "stop")
    assert completion.token_ids == tokens[:end]
    assert completion.speculation.accepted <= end
    assert end - start + 1 >= 3
    assert len(steps) > 1 or depth > 1
    assert llm.engine.pool.used == 0


def test_a_tail_that_may_become_a_stop_string_waits() -> None:
    stream = TextStream(TOKENIZER.decode, PROMPT, stop=("xyz", "yy"))
    shown = [stream.put(token) for token in TOKENIZER.encode("axy axyy")]
    assert shown == ["a", "", "", "xy ", "a", "", "", "x"]
    assert stream.stopped
    assert stream.text == "axy ax"
