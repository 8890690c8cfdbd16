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
from ridgeline.train.checkpoint import CHECKPOINT, check_checkpoint
from ridgeline.train.files import check_writable
from ridgeline.train.heads import frequent_ids, head_features, new_task, save_head
from ridgeline.train.prompts import default_prompts
from ridgeline.train.recorder import Recorder
from ridgeline.train.run import TrainOptions, check_least, check_positive, train
from ridgeline.train.sources import SHORTEST, read_prompts, read_texts
from ridgeline.train.store import FeatureStore, Text
from ridgeline.train.texts import distil, invented_prompts

NO_DATA = "there is no training data; give --data FILE or --distill PROMPTS"
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

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"there is no method {self.method!r}; they are {', '.join(METHODS)}")
        if self.bits not in (8, 16):
            raise ConfigError(f"weights of {self.bits} bits cannot be saved; --bits is 8 or 16")
        check_least(1, answers=self.answers, steps=self.steps, draft_vocab=self.draft_vocab)
        check_least(1, intermediate=self.intermediate)
        # A text's last token is never read, and shorter texts are left out.
        check_least(SHORTEST + 2, answer_tokens=self.answer_tokens)
        check_positive(cache_gb=self.cache_gb)
        for source in self.distill:
            number = source.removeprefix(OWN)
            if source.startswith(OWN) and (not number.isdecimal() or not int(number)):
                raise ConfigError(
                    f"--distill {source} does not say how many prompts; write {OWN}2000"
                )
        if not self.data and not self.distill:
            raise ConfigError(NO_DATA)

    def about(self, target: LoadedModel) -> dict[str, Any]:
        """What the trained network depends on, but for TrainOptions and the data."""
        return {
            "the method": self.method,
            "--model": target.name,
            "--steps": self.steps,
            "--draft-vocab": self.draft_vocab,
            "--intermediate": self.intermediate,
        }


def run_training(target: LoadedModel, job: Job, options: TrainOptions) -> Path:
    """Trains and saves a head; what an earlier run has finished is not done again.

    Raises:
        ConfigError: there is no data, a folder cannot be used, or its files are damaged or of
            another run.
    """
    try:
        return _run(target, job, options)
    except OSError as error:  # a full disk, or files that cannot be read
        raise ConfigError(
            f"cannot read or write {error.filename or job.out}: {error.strerror or error}"
        ) from None


def _run(target: LoadedModel, job: Job, options: TrainOptions) -> Path:
    console, work = Console(), job.work or job.out / "work"
    # What can fail at once does so now rather than after hours.
    check_writable(job.out)
    check_writable(work)
    about = job.about(target)
    check_checkpoint(job.out / CHECKPOINT, about | options.about())
    layers = len(target.model.layers)
    wanted = {*head_features(job.method, layers), layers}
    given = read_texts(job.data, target, options.length)
    store = FeatureStore(work / "states", target, sorted(wanted), int(job.cache_gb * 1e9))
    texts = _distilled(target, job, work, store, options.seed) if job.distill else []
    texts += given
    if len(texts) < 2:
        raise ConfigError(NO_DATA)
    store.fill(texts)
    ids = frequent_ids(store.tokens, store.weights, job.draft_vocab, target.vocab_size)
    task = new_task(job.method, target, ids, job.steps, job.intermediate, options.seed)
    count = sum(p.numel() for p in task.network.parameters())
    console.print(
        f"{len(texts)} texts, {len(store.tokens)} tokens; {count / 1e6:.1f} M parameters, "
        f"{len(ids)} draft ids, target of {layers} layers"
    )
    figures = train(task, store, target, job.out, options, about)
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
    read = {  # before the model writes prompts of its own for hours
        source: default_prompts() if source == DEFAULT else read_prompts(Path(source))
        for source in job.distill
        if not source.startswith(OWN)
    }
    llm, prompts = LLM(target), list[str]()
    for source in job.distill:
        if source.startswith(OWN):
            count = int(source.removeprefix(OWN))
            prompts += invented_prompts(llm, count, work / "prompts.jsonl", seed)
        else:
            prompts += read[source]
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
