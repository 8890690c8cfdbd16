"""Texts as token ids with the target's hidden states, in memory-mapped files.

A folder holds `tokens.npy` i32[N], `starts.npy` i64[S+1] (where each text begins), `weights.npy`
u8[N] (1 where the target wrote the token), and for each hidden state asked for `hidden-I.npy`
f16[N,H]. The target runs once; training reads its states as often as it likes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import Progress

from ridgeline.core.batch import Entry, pack
from ridgeline.core.tree import TokenTree
from ridgeline.errors import ConfigError
from ridgeline.kv.store import KVStore
from ridgeline.model.load import LoadedModel

PASS = 1024
"""Tokens of one forward pass of the target."""


@dataclass(frozen=True)
class Text:
    """One training text."""

    tokens: list[int]
    written: int
    """how many of the last tokens the target wrote, or is to be imitated on"""


class FeatureStore:
    """Texts and hidden states in a folder, read through memory maps."""

    def __init__(self, folder: Path) -> None:
        self.tokens: NDArray[np.int32] = np.load(folder / "tokens.npy", mmap_mode="r")
        self.starts: NDArray[np.int64] = np.load(folder / "starts.npy")
        self.weights: NDArray[np.uint8] = np.load(folder / "weights.npy", mmap_mode="r")
        self._hidden = {
            int(file.stem.split("-")[1]): np.load(file, mmap_mode="r")
            for file in folder.glob("hidden-*.npy")
        }

    def __len__(self) -> int:
        return len(self.starts) - 1

    def hidden(self, layers: Sequence[int], lo: int, hi: int) -> torch.Tensor:
        """f32[hi-lo, layers x H]: hidden states of tokens lo..hi-1."""
        parts = [torch.from_numpy(np.array(self._hidden[i][lo:hi])).float() for i in layers]
        return torch.cat(parts, -1)


def write_store(
    folder: Path, texts: Sequence[Text], target: LoadedModel, layers: Sequence[int], limit: int
) -> FeatureStore:
    """Runs the target over the texts; what is there already is not computed again.

    Args:
        folder: where the files go.
        texts: what to run; longer ones than the model's context are cut.
        target: the model.
        layers: hidden states to keep, as `Target.forward` numbers them.
        limit: bytes that the files may take.

    Raises:
        ConfigError: they would take more.
    """
    done, stated = folder / "done.json", {"target": target.name, "texts": len(texts)}
    if done.is_file():
        kept = json.loads(done.read_text())
        if set(layers) <= set(kept.pop("layers")) and kept == stated:
            return FeatureStore(folder)
    folder.mkdir(parents=True, exist_ok=True)
    longest = target.context_len
    texts = [Text(t.tokens[:longest], t.written - max(len(t.tokens) - longest, 0)) for t in texts]
    starts = np.cumsum([0, *(len(t.tokens) for t in texts)])
    count, width = int(starts[-1]), target.model.embed(torch.zeros(1, dtype=torch.int64)).shape[-1]
    size = count * width * 2 * len(set(layers))
    if size > limit:
        raise ConfigError(
            f"the hidden states of {count} tokens take {size / 1e9:.1f} GB where "
            f"{limit / 1e9:.1f} GB are allowed; give less data or raise --cache-gb"
        )
    weights = np.zeros(count, np.uint8)
    for text, end in zip(texts, starts[1:], strict=True):
        weights[end - max(text.written, 0) : end] = 1
    np.save(folder / "starts.npy", starts)
    np.save(folder / "weights.npy", weights)
    np.save(folder / "tokens.npy", np.concatenate([t.tokens for t in texts]).astype(np.int32))
    maps = {
        i: np.lib.format.open_memmap(
            folder / f"hidden-{i}.npy", mode="w+", dtype=np.float16, shape=(count, width)
        )
        for i in set(layers)
    }
    with Progress() as progress:
        task = progress.add_task("hidden states of the target", total=count)
        for chosen in _batches([len(t.tokens) for t in texts]):
            states = _run(target, [texts[i].tokens for i in chosen], list(maps))
            at = 0
            for i in chosen:
                lo, hi = starts[i], starts[i + 1]
                for layer, state in zip(maps, states, strict=True):
                    maps[layer][lo:hi] = state[at : at + hi - lo].half().cpu().numpy()
                at += hi - lo
            progress.advance(task, at)
    done.write_text(json.dumps({"layers": sorted(set(layers))} | stated))
    return FeatureStore(folder)


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices of texts, about PASS tokens at a time."""
    batch: list[int] = []
    for i, length in enumerate(lengths):
        if batch and sum(lengths[j] for j in batch) + length > PASS:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _run(
    target: LoadedModel, texts: Sequence[list[int]], layers: Sequence[int]
) -> tuple[torch.Tensor, ...]:
    blocks = [-(-len(tokens) // 16) for tokens in texts]
    store = KVStore(target.model.layers, sum(blocks), 16, target.model.device)
    entries, first = [], 0
    for tokens, count in zip(texts, blocks, strict=True):
        slots = np.arange(first * 16, first * 16 + len(tokens), dtype=np.int64)
        entries.append(Entry(TokenTree.plain(tokens), 0, slots, np.empty(0, np.int64)))
        first += count
    batch = pack(entries, target.model.device)
    return target.model.bind(store).forward(batch, layers).features
