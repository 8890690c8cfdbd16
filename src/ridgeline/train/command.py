"""What `ridgeline train` does, from data to a saved head."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ridgeline.errors import ConfigError
from ridgeline.llm import LLM
from ridgeline.model.load import LoadedModel
from ridgeline.train import METHODS
from ridgeline.train.heads import frequent_ids, head_features, new_task, save_head
from ridgeline.train.prompts import default_prompts
from ridgeline.train.recorder import Recorder
from ridgeline.train.run import TrainOptions, train
from ridgeline.train.store import FeatureStore, Text
from ridgeline.train.texts import distil, invented_prompts, read_prompts, read_texts

SHORTEST = 8
"""Texts with no more written tokens than this are left out."""
DEFAULT = "default"
"""As --distill: the prompts that ship."""
OWN = "own:"
"""As --distill, with a number behind it: prompts that the model writes itself."""


@dataclass(frozen=True)
class Job:
    """One call of the command."""

    method: str
    out: Path
    work: Path | None = None
    """texts and hidden states; None: a folder in `out`"""
    data: tuple[Path, ...] = ()
    distill: tuple[str, ...] = ()
    answers: int = 3
    answer_tokens: int = 256
    steps: int = 5
    draft_vocab: int = 8192
    intermediate: int | None = None
    cache_gb: float = 20.0
    compact: bool = False
    bits: int = 16
    """of a weight of the saved head, 16 or 8"""


def run_training(target: LoadedModel, job: Job, options: TrainOptions) -> Path:
    """Trains and saves a head; what an earlier run has finished is not done again.

    Raises:
        ConfigError: an option is wrong, or there is no data.
    """
    if job.method not in METHODS:
        raise ConfigError(f"there is no method {job.method!r}; they are {', '.join(METHODS)}")
    if job.bits not in (8, 16):
        raise ConfigError(f"weights of {job.bits} bits cannot be saved; --bits is 8 or 16")
    job.out.mkdir(parents=True, exist_ok=True)  # fails now rather than after the first hour
    console, work = Console(), job.work or job.out / "work"
    layers = len(target.model.layers)
    wanted = {*head_features(job.method, layers), layers}
    given = read_texts(job.data, target, options.length)
    store = FeatureStore(work / "states", target, sorted(wanted), int(job.cache_gb * 1e9))
    texts = _distilled(target, job, work, store, options.seed) if job.distill else []
    texts += [text for text in given if text.written > SHORTEST]
    if len(texts) < 2:
        raise ConfigError("there is no training data; give --data FILE or --distill PROMPTS")
    store.fill(texts)
    ids = frequent_ids(store.tokens, store.weights, job.draft_vocab, target.vocab_size)
    task = new_task(job.method, target, ids, job.steps, job.intermediate, options.seed)
    count = sum(p.numel() for p in task.network.parameters())
    console.print(
        f"{len(texts)} texts, {len(store.tokens)} tokens; {count / 1e6:.1f} M parameters, "
        f"{len(ids)} draft ids, target of {layers} layers"
    )
    figures = train(task, store, target, job.out, options)
    provenance: dict[str, Any] = {
        "target": target.name,
        "method": job.method,
        "job": asdict(job)
        | {"out": job.out.name, "work": None, "data": [f.name for f in job.data]},
        "options": asdict(options),
        "figures": figures,
        "versions": {"ridgeline": version("ridgeline"), "torch": torch.__version__},
    }
    save_head(job.out, job.method, task.network, ids, target, provenance, job.compact, job.bits)
    console.print(f"saved to {job.out}; use it with --drafter {job.method}:{job.out}")
    return job.out


def _distilled(
    target: LoadedModel, job: Job, work: Path, store: FeatureStore, seed: int
) -> list[Text]:
    """The target's answers, with their hidden states in the store."""
    llm = LLM(target)
    prompts = [p for source in job.distill for p in _prompts(llm, source, work, seed)]
    del llm  # and its cache
    recorder, texts = Recorder(store.layers), list[Text]()
    llm = LLM(target, drafter=recorder, depth=1, policy="fixed", prefix_sharing=False)
    file = work / "texts.jsonl"
    for group in distil(llm, prompts, file, job.answers, job.answer_tokens, seed):
        states, long = recorder.take(), [text.written > SHORTEST for text in group]
        if states:
            store.fill(texts)  # what an earlier run wrote, where its states were lost
            store.append([*compress(group, long)], [*compress(states, long)])
        texts += compress(group, long)
    return texts


def _prompts(llm: LLM, source: str, work: Path, seed: int) -> list[str]:
    if source == DEFAULT:
        return default_prompts()
    if not source.startswith(OWN):
        return read_prompts(Path(source))
    number = source.removeprefix(OWN)
    if not number.isdecimal() or not int(number):
        raise ConfigError(f"--distill {source} does not say how many prompts; write {OWN}2000")
    return invented_prompts(llm, int(number), work / "prompts.jsonl", seed)
