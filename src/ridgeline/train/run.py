"""The training loop: batches in a reproducible order, checkpoints, early stop on acceptance."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from ridgeline.errors import ConfigError
from ridgeline.model.load import LoadedModel
from ridgeline.train.checkpoint import CHECKPOINT, DATA, RunState
from ridgeline.train.store import FeatureStore
from ridgeline.train.unroll import Batch, Losses

WARMUP = 0.03
"""Share of the steps over which the learning rate rises."""
PATIENCE = 4
"""Evaluations without a better one after which training ends."""


ROWS = 512
"""Rows of logits over the whole vocabulary that are held at once."""

Figures = dict[str, Any]
"""Loss, acceptance at each position given those before, tokens a step if greedy."""


@dataclass(frozen=True)
class TrainOptions:
    """How to train."""

    epochs: int = 8
    learning_rate: float = 1e-3
    batch_tokens: int = 1024
    length: int = 384
    """tokens of a text that are used at once"""
    held_out: float = 0.03
    """share of the texts that are kept for evaluation"""
    evaluations: int = 1
    """per epoch"""
    minutes: float | None = None
    """stop after so long; the learning rate falls with the epochs all the same"""
    checkpoint_minutes: float = 3
    seed: int = 0

    def __post_init__(self) -> None:
        check_least(1, epochs=self.epochs)
        if not 0 <= self.seed < 2**63:  # every answer adds to it
            raise ConfigError(f"--seed is {self.seed}; it must be from 0 to 2**63 - 1")
        check_positive(learning_rate=self.learning_rate, minutes=self.minutes)

    def about(self) -> dict[str, Any]:
        """What the result of a whole run depends on."""
        later = ("minutes", "checkpoint_minutes")  # when it pauses, not what it does
        return {
            f"--{name.replace('_', '-')}": value
            for name, value in asdict(self).items()
            if name not in later
        }


def check_least(least: int, **values: int | None) -> None:
    """Raises ConfigError for a number below `least`, naming its option."""
    for name, value in values.items():
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")


def check_positive(**values: float | None) -> None:
    """Raises ConfigError for a number that is not above 0 and finite, naming its option."""
    for name, value in values.items():
        if value is not None and not 0 < value < math.inf:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} is {value}; it must be a finite number above 0")


@dataclass(frozen=True)
class Task:
    """What is trained: a network and its loss."""

    network: nn.Module
    ids: Tensor
    """i64[Vd], sorted: the tokens that it can draft"""
    features: tuple[int, ...]
    """hidden states of the target that the network reads"""
    final: int
    """the hidden state that the target's distributions follow from"""
    losses: Callable[[Batch], Losses]


def train(
    task: Task,
    store: FeatureStore,
    target: LoadedModel,
    out: Path,
    o: TrainOptions,
    about: Mapping[str, Any],
) -> Figures:
    """Trains the network in place to its best evaluation; returns figures for the provenance.

    `out/checkpoint.pt` holds everything that a continued run needs to give the same result as one
    that was never interrupted; `about` is what else the result depends on but options and data.

    Raises:
        ConfigError: the checkpoint is damaged or of another run, there are too few different
            prompts, or the loss is no longer a number.
    """
    held_out, used = _split(store, o)
    batches = _Batches(task, store, target, o)
    parameters = [p for p in task.network.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, o.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    # Epochs differ in how many batches their texts fall into.
    plan = [(epoch, texts) for epoch in range(o.epochs) for texts in batches.order(used, epoch)]
    total = len(plan)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate(step / total))
    about = {**about, **o.about(), DATA: store.fingerprint()}
    state = RunState(task.network, optimiser, schedule, out / CHECKPOINT, about)
    state.load()
    console = Console()
    began, saved = time.monotonic(), time.monotonic()
    spent = state.seconds
    every = max(1, total // o.epochs // o.evaluations)

    def due() -> bool:
        return state.step % every == 0 or state.step == total

    with Progress(console=console) as progress:
        bar = progress.add_task("training", total=total, completed=state.step)
        for epoch, chosen in plan[state.step :]:
            # Before the step, so that a run that has ended stays as it is.
            late = o.minutes is not None and state.seconds > o.minutes * 60
            if late or state.since_best >= PATIENCE:
                break
            losses = _forward(task, batches.make(chosen))
            if not losses.total.isfinite():
                raise ConfigError(
                    f"the loss is {losses.total:.3g} after {state.step} steps; use a lower "
                    f"--learning-rate than {o.learning_rate}, in another --out folder"
                )
            optimiser.zero_grad(set_to_none=True)
            losses.total.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
            schedule.step()
            state.step += 1
            state.seconds = spent + time.monotonic() - began
            progress.update(bar, completed=state.step, description=f"loss {losses.total:.3f}")
            if due():
                figures = evaluate(task, batches, held_out)
                state.record(figures)
                console.print(_line(epoch, figures))
            if time.monotonic() - saved > o.checkpoint_minutes * 60:
                state.save()
                saved = time.monotonic()
    state.save()
    if state.best is None or not due():  # not saved: a continued run would not have it
        state.record(evaluate(task, batches, held_out))
    assert state.best is not None
    task.network.load_state_dict(state.best)
    return {
        "steps": state.step,
        "seconds": round(state.seconds),
        "texts": len(used),
        "tokens": int(sum(store.starts[i + 1] - store.starts[i] for i in used)),
        "held_out": state.figures,
    }


def _split(store: FeatureStore, o: TrainOptions) -> tuple[list[int], list[int]]:
    """Texts to evaluate on, and texts to learn from; answers to one prompt are on one side."""
    prompts: dict[bytes | int, list[int]] = {}
    for i in range(len(store)):
        lo, hi = int(store.starts[i]), int(store.starts[i + 1])
        begun = lo + int(np.argmax(store.weights[lo:hi]))
        prompts.setdefault(store.tokens[lo:begun].tobytes() or i, []).append(i)
    groups = list(prompts.values())
    if len(groups) < 2:
        raise ConfigError(
            "all texts answer one prompt; at least two different prompts are needed, as some are "
            "held out for evaluation"
        )
    order = np.random.default_rng(o.seed).permutation(len(groups))
    count = min(max(1, round(len(groups) * o.held_out)), len(groups) - 1)
    sides = order[:count], order[count:]
    held_out, used = ([i for group in side for i in groups[group]] for side in sides)
    return held_out, used


@torch.no_grad()
def evaluate(task: Task, batches: _Batches, texts: Sequence[int]) -> Figures:
    """Loss and acceptance per position on texts that training does not see."""
    loss, passed, reached = 0.0, np.zeros(0), np.zeros(0)
    groups = batches.group(texts)
    for chosen in groups:
        found = _forward(task, batches.judged(batches.make(chosen)))
        loss += float(found.total) / len(groups)
        passed = np.array(found.passed) + (passed if len(passed) else 0)
        reached = np.array(found.reached) + (reached if len(reached) else 0)
    acceptance = passed / np.maximum(reached, 1)
    return {
        "loss": round(loss, 4),
        "acceptance": [round(float(a), 4) for a in acceptance],
        "tokens_per_step": round(1 + float(np.cumprod(acceptance).sum()), 4),
    }


def _forward(task: Task, batch: Batch) -> Losses:
    kind = batch.tokens.device.type
    if kind == "cpu":
        fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    else:
        fast = kind == "cuda" and torch.cuda.is_bf16_supported()
    with torch.autocast(kind, torch.bfloat16) if fast else nullcontext():
        return task.losses(batch)


class _Batches:
    """Padded batches, the same for the same seed and epoch."""

    def __init__(
        self, task: Task, store: FeatureStore, target: LoadedModel, o: TrainOptions
    ) -> None:
        self._task, self._store, self._target, self._o = task, store, target, o

    def order(self, texts: Sequence[int], epoch: int) -> list[list[int]]:
        """The epoch's batches of texts."""
        rng = np.random.default_rng((self._o.seed, epoch))
        groups = self.group(rng.permutation(texts).tolist())
        return [groups[i] for i in rng.permutation(len(groups))]

    def group(self, texts: Sequence[int]) -> list[list[int]]:
        """Texts of like length together, about `batch_tokens` at a time."""
        lengths = np.minimum(np.diff(self._store.starts), self._o.length)
        ordered = sorted(
            texts, key=lambda i: lengths[i] // 32
        )  # stable: the order within is the given
        groups: list[list[int]] = []
        for i in ordered:
            full = groups and lengths[i] * (len(groups[-1]) + 1) > self._o.batch_tokens
            if not groups or full:
                groups.append([])
            groups[-1].append(int(i))
        return groups

    def make(self, texts: Sequence[int]) -> Batch:
        """The tensors of some texts."""
        store, task = self._store, self._task
        spans = []
        for i in texts:
            lo, hi = int(store.starts[i]), int(store.starts[i + 1])
            spans.append((max(lo, hi - self._o.length), hi))  # the target's words are at the end
        longest = max(hi - lo for lo, hi in spans)

        def stack(parts: Iterator[Tensor]) -> Tensor:
            return torch.stack(
                [torch.cat([p, p.new_zeros(longest - len(p), *p.shape[1:])]) for p in parts]
            )

        tokens = stack(torch.from_numpy(store.tokens[lo:hi].astype(np.int64)) for lo, hi in spans)
        weight = stack(
            torch.from_numpy(store.weights[lo:hi].astype(np.float32)) for lo, hi in spans
        )
        # What follows a token is learned where the target wrote what follows.
        weight = torch.cat([weight[:, 1:], torch.zeros_like(weight[:, :1])], 1)
        model = self._target.model
        tokens = tokens.to(model.device)
        features = stack(store.hidden(task.features, lo, hi) for lo, hi in spans)
        final = stack(store.hidden((task.final,), lo, hi) for lo, hi in spans)
        return Batch(
            tokens=tokens,
            embedding=model.embed(tokens.flatten()).float().view(*tokens.shape, -1),
            features=features.to(model.device),
            final=final.to(model.device),
            weight=weight.to(model.device),
        )

    def judged(self, batch: Batch) -> Batch:
        """The batch with what the target would say after each token, of its whole vocabulary."""
        rows = batch.final.flatten(0, 1)
        said = torch.cat(
            [
                self._target.model.unembed(rows[i : i + ROWS]).argmax(-1)
                for i in range(0, len(rows), ROWS)
            ]
        )
        ids = self._task.ids.to(said.device)
        place = torch.searchsorted(ids, said).clamp(max=len(ids) - 1)
        place[ids[place] != said] = -1
        return replace(batch, likeliest=place.view_as(batch.tokens))


def _rate(share: float) -> float:
    """The learning rate after a share of the steps: a short rise, then a cosine to a tenth."""
    if share < WARMUP:
        return max(share / WARMUP, 0.01)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min((share - WARMUP) / (1 - WARMUP), 1)))


def _line(epoch: int, figures: Figures) -> str:
    positions = " ".join(f"{a:.2f}" for a in figures["acceptance"])
    return (
        f"epoch {epoch + 1}: loss {figures['loss']:.3f}, accepted at each position {positions}, "
        f"{figures['tokens_per_step']:.2f} tokens a step if greedy"
    )
