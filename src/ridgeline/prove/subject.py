"""What is put to the proof: a target, a drafter and a rule, in engines of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ridgeline.config import EngineConfig
from ridgeline.core.params import SamplingParams
from ridgeline.core.sequence import Sequence as TokenSequence
from ridgeline.draft.base import DraftContext
from ridgeline.draft.model import ModelDrafter
from ridgeline.engine import BLOCK_SIZE, Engine
from ridgeline.llm import LLM, Request
from ridgeline.model.load import LoadedModel
from ridgeline.prove.altered import blurred
from ridgeline.prove.watch import watched

BLUR = 1.5
"""Standard deviation of the noise on the logits of the drafter that stands in: about three of four
drafts survive it."""


@dataclass(frozen=True)
class Options:
    """How engines run; fields as of `LLM` and `EngineConfig`."""

    depth: int = 3
    nodes: int = 6
    confidence: float = EngineConfig.confidence
    draft_dtype: str = "auto"
    draft_quantize: str = "auto"
    batch: int = 32

    def config(self, rule: str, batch: int, kv_tokens: int | None) -> EngineConfig:
        """The engine's options for `batch` texts at once.

        Raises:
            ConfigError: one is out of range.
        """
        return EngineConfig(
            verify=rule,
            policy="fixed",  # drafts that do not pay are put to the proof as well
            depth=self.depth,
            nodes=self.nodes,
            confidence=self.confidence,
            max_batch=batch,
            max_batch_tokens=max(EngineConfig.max_batch_tokens, batch * (self.nodes + 1)),
            kv_tokens=kv_tokens,
        )


@dataclass(frozen=True)
class Subject:
    """A rule with a drafter for a target."""

    loaded: LoadedModel
    rule: str
    drafter: str | None
    """its spec; None is the target itself, blurred: a drafter that draws and states from what"""
    options: Options
    longest: int
    """tokens of the longest text, prompt included"""
    blur: float = BLUR
    draws: bool = True
    """whether drafts are drawn, be it with the target's own noise, or follow from the text"""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.rule} with {self.drafter or 'the blurred target'}"

    def start(self, batch: int | None = None) -> Engine:
        """A new engine, which nothing has run on, for `batch` texts at once.

        Raises:
            RidgelineError: see `LLM`.
        """
        batch = batch or self.options.batch
        config = self.options.config(self.rule, batch, self._pages(batch))
        if self.drafter is not None:
            return LLM(
                self.loaded,
                drafter=self.drafter,
                draft_dtype=self.options.draft_dtype,
                draft_quantize=self.options.draft_quantize,
                **asdict(config),
            ).engine
        context = DraftContext(
            target=self.loaded,
            coupled=config.verify == "match",
            depth=config.depth,
            nodes=config.draft_nodes,
            max_batch_tokens=config.max_batch_tokens,
            dtype="auto",
            confidence=0.0,
            sampled_siblings=config.verify == "rejection",
        )
        drafter = ModelDrafter(blurred(self.loaded, self.blur, seed=0), context)
        return Engine(self.loaded, drafter, config)

    def plain(self, batch: int = 1) -> Engine:
        """A new engine that never drafts, for `batch` texts at once."""
        return LLM(self.loaded, max_batch=batch, kv_tokens=self._pages(batch)).engine

    def _pages(self, batch: int) -> int:
        return batch * (-(-(self.longest + self.options.nodes) // BLOCK_SIZE) + 1) * BLOCK_SIZE


def run(
    engine: Engine, requests: Sequence[Request], length: int | None = None
) -> list[list[TokenSequence]]:
    """Runs requests together, as many as the engine takes at once.

    Args:
        engine: whichever.
        requests: prompts with their parameters.
        length: end each text as soon as it has so many tokens; None: when it ends by itself.

    Returns:
        One list a request: its samples, whole or cut at the end of the step that reached `length`.
    """
    samples = [engine.add(request.tokens, request.params) for request in requests]
    while engine.has_work:
        for progress in engine.step():
            if length is not None and progress.sequence.output_len >= length:
                engine.abort(progress.sequence)
    return samples


def hands_q(subject: Subject, prompt: Sequence[int]) -> bool:
    """Whether the drafter tells what it drew from, without which every rule verifies as `match`."""
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=12)
    engine = subject.start(1)
    with watched(engine) as watch:
        run(engine, [Request(list(prompt), params)])
    return watch.drawn > 0
