"""Drafters beside plain decoding, on the same loaded target, in turns.

Every round has engines of its own, warmed up, so that a drafter that learns from what it has seen
knows no answer of an earlier round. Within a round the prompts go through in groups of the batch's
size; each group is written plainly and with drafts at the same time, a few steps of the one and a
few of the other, so that both are always at about the same place of the text. Whatever the machine
does meanwhile, it does to all.

Only steps that decode are counted: those that read prompts as well are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from ridgeline.bench.clock import Clock, clocked
from ridgeline.bench.prompts import Prompt
from ridgeline.config import EngineConfig
from ridgeline.core.params import SamplingParams
from ridgeline.core.sequence import Sequence, Speculation
from ridgeline.engine import BLOCK_SIZE
from ridgeline.kv.store import bytes_per_token
from ridgeline.llm import LLM, Request
from ridgeline.model.load import LoadedModel

PLAIN = "none"
"""The drafter of plain decoding."""
WARM_UP = range(8, 24)
"""Token ids of a prompt that warms an engine up: any will do, but not those that are measured."""
WARM_UP_TOKENS = 12
TURN = 8
"""Steps of one engine before the next one's turn."""


@dataclass(frozen=True)
class Contender:
    """A drafter and its options."""

    drafter: str
    depth: int = EngineConfig.depth
    nodes: int = EngineConfig.depth
    confidence: float = EngineConfig.confidence
    policy: str = EngineConfig().chosen_policy
    draft_dtype: str = "auto"
    draft_quantize: str = "auto"
    sha256: str = ""
    """of the files that the drafter's argument names, shortened"""


@dataclass(frozen=True)
class Load:
    """What is asked for at once, and how it is sampled."""

    temperature: float
    batch: int


@dataclass
class Text:
    """One answer, and what it took."""

    kind: str
    speculation: Speculation
    tokens: list[int] = field(default_factory=list)
    emitted: int = 0
    """tokens of decode steps"""
    seconds: float = 0.0
    """duration of the decode steps that it took part in"""


@dataclass
class Side:
    """All answers of one engine in one round; sums over its decode steps."""

    texts: list[Text] = field(default_factory=list)
    emitted: int = 0
    seconds: float = 0.0
    steps: int = 0
    target_seconds: float = 0.0
    drafter_seconds: float = 0.0
    levels: int = 0
    """depths of the deepest tree of each step"""


@dataclass(frozen=True)
class Round:
    """Every prompt once, plainly and with drafts; the texts of both in the same order."""

    plain: Side
    drafted: Side


@dataclass(frozen=True)
class Memory:
    """What a drafter takes."""

    weights: int
    """bytes"""
    kv_per_token: int
    """bytes of each token of each sequence"""


def engine_of(loaded: LoadedModel, contender: Contender, batch: int, tokens: int) -> LLM:
    """An engine for `batch` sequences of at most `tokens` tokens, drafts aside.

    Raises:
        RidgelineError: see `LLM`.
    """
    blocks = -(-(tokens + contender.nodes) // BLOCK_SIZE) + 1
    return LLM(
        loaded,
        drafter=contender.drafter,
        draft_dtype=contender.draft_dtype,
        draft_quantize=contender.draft_quantize,
        max_batch=batch,
        # Room for every draft that was asked for, also in a large batch.
        max_batch_tokens=max(EngineConfig.max_batch_tokens, batch * (contender.nodes + 1)),
        kv_tokens=batch * blocks * BLOCK_SIZE,
        prefix_sharing=False,  # a second round would find the prompts of the first
        depth=contender.depth,
        nodes=contender.nodes,
        confidence=contender.confidence,
        policy=contender.policy,
    )


def memory(loaded: LoadedModel, contender: Contender, batch: int, tokens: int) -> Memory:
    """Loads the drafter to see what it takes, for `batch` sequences of at most `tokens` tokens.

    What is wrong with it, or too large, comes to light early, too.

    Raises:
        RidgelineError: see `LLM`.
    """
    drafter = engine_of(loaded, contender, batch, tokens).drafter
    if drafter is None:
        return Memory(0, 0)
    return Memory(drafter.needs.weights, bytes_per_token(drafter.needs.kv))


def requests(prompts: Seq[Prompt], load: Load, seed: int) -> list[tuple[str, Request]]:
    """As many as fill every batch: after the last prompt the first comes again, with other seeds.

    Returns:
        Pairs of a kind and a request.
    """
    count = -(-len(prompts) // load.batch) * load.batch
    chosen = [prompts[i % len(prompts)] for i in range(count)]
    return [
        (
            prompt.kind,
            replace(
                prompt.request,
                params=replace(
                    prompt.request.params, temperature=load.temperature, seed=seed + number
                ),
            ),
        )
        for number, prompt in enumerate(chosen)
    ]


def measure(
    loaded: LoadedModel,
    contenders: Seq[Contender],
    load: Load,
    asked: Seq[tuple[str, Request]],
    number: int,
    advance: Callable[[], None],
) -> list[Side]:
    """Round `number`, from 0, of each contender; `advance` is called for each group of each.

    Who begins moves on by one from group to group and from round to round.
    """
    longest = max(len(request.tokens) + request.params.max_tokens for _, request in asked)
    longest = max(longest, len(WARM_UP) + WARM_UP_TOKENS)
    engines = [engine_of(loaded, c, load.batch, longest) for c in contenders]
    for llm in engines:
        _warm_up(llm, load)
    sides = [Side() for _ in engines]
    for turn, start in enumerate(range(0, len(asked), load.batch), start=number):
        order = [(turn + place) % len(engines) for place in range(len(engines))]
        group = asked[start : start + load.batch]
        _write([engines[at] for at in order], group, [sides[at] for at in order])
        for _ in order:
            advance()
    return sides


def _warm_up(llm: LLM, load: Load) -> None:
    """The first passes allocate memory and choose kernels; nothing that is measured pays for it."""
    vocab_size = llm.loaded.vocab_size
    params = SamplingParams(
        temperature=load.temperature, seed=0, max_tokens=WARM_UP_TOKENS, ignore_eos=True
    )
    llm.generate([[token % vocab_size for token in WARM_UP]] * load.batch, params)


class _Writer:
    """One engine at work on a group."""

    def __init__(self, llm: LLM, group: Seq[tuple[str, Request]], side: Side, clock: Clock) -> None:
        self._engine, self._side, self._clock = llm.engine, side, clock
        self.written = 0
        self._texts: dict[Sequence, Text] = {}
        for kind, request in group:
            (sequence,) = llm.engine.add(request.tokens, request.params)
            self._texts[sequence] = Text(kind, sequence.speculation)

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def step(self) -> None:
        self._clock.reset()
        start = time.perf_counter()
        progress = self._engine.step()
        seconds = time.perf_counter() - start
        emitted = sum(len(part.pieces) for part in progress)
        self.written += emitted
        if self._clock.decodes:
            _count(self._side, self._clock, emitted, seconds)
            for part in progress:
                text = self._texts[part.sequence]
                text.seconds += seconds
                text.emitted += len(part.pieces)

    def finish(self) -> None:
        for sequence, text in self._texts.items():
            text.tokens = sequence.output
        self._side.texts += self._texts.values()


def _write(llms: Seq[LLM], group: Seq[tuple[str, Request]], sides: Seq[Side]) -> None:
    """Each engine writes the group to its end, for its side; whoever is behind has the turn."""
    with ExitStack() as clocks:
        writers = [
            _Writer(llm, group, side, clocks.enter_context(clocked(llm.engine)))
            for llm, side in zip(llms, sides, strict=True)
        ]
        while at_work := [writer for writer in writers if writer.has_work]:
            writer = min(at_work, key=lambda writer: writer.written)
            for _ in range(TURN):
                if writer.has_work:
                    writer.step()
    for writer in writers:
        writer.finish()


def _count(side: Side, clock: Clock, emitted: int, seconds: float) -> None:
    side.steps += 1
    side.emitted += emitted
    side.seconds += seconds
    side.target_seconds += clock.target
    side.drafter_seconds += clock.drafter
    side.levels += clock.levels
