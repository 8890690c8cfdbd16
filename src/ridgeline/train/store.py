"""Texts as token ids with the target's hidden states, in files that grow text by text.

A folder holds `tokens.i32` [N], `weights.u8` [N] (1 where the target wrote the token), for each
hidden state asked for `hidden-I.f16` [N,H], and the lengths, `lengths.i64` [S], written last:
what lies beyond them is of an interrupted run. The target computes each state once; training reads
them, memory-mapped, as often as it likes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import Progress

from ridgeline.core.batch import Entry, pack
from ridgeline.core.tree import TokenTree
from ridgeline.draft.checkpoint import hidden_size
from ridgeline.errors import ConfigError
from ridgeline.kv.store import KVStore
from ridgeline.model.load import LoadedModel
from ridgeline.train.files import read_json, write_json

PASS = 1024
"""Tokens of one forward pass of the target."""

States = NDArray[np.float16]
"""[layers,T,H]: hidden states of a text, in the order of `FeatureStore.layers`."""


@dataclass(frozen=True)
class Text:
    """One training text."""

    tokens: list[int]
    written: int
    """how many of the last tokens the target wrote, or is to be imitated on"""


class FeatureStore:
    """Texts and hidden states in a folder."""

    def __init__(
        self, folder: Path, target: LoadedModel, layers: Sequence[int], limit: int
    ) -> None:
        """Opens the folder; if it lacks some of the states, it starts anew.

        Args:
            folder: where the files are.
            target: the model.
            layers: hidden states that it must have, as `Target.forward` numbers them.
            limit: bytes that the states may take.

        Raises:
            ConfigError: it holds another model's states, or is damaged.
        """
        self._folder, self._target, self._limit = folder, target, limit
        self._width = hidden_size(target)
        folder.mkdir(parents=True, exist_ok=True)
        about, stated = folder / "store.json", {"target": target.name, "width": self._width}
        kept = _stated(about)
        if kept and kept["target"] != target.name:
            raise ConfigError(
                f"{folder} holds hidden states of {kept['target']}; for {target.name} use another "
                "--work folder"
            )
        self.layers: tuple[int, ...] = tuple(kept["layers"]) if kept else ()
        """hidden states that it has, ascending"""
        fits = kept == {"layers": [*self.layers]} | stated and set(layers) <= set(self.layers)
        if not fits:
            self.layers = tuple(sorted(set(layers)))
        self._cut(self._whole() if fits else [])
        write_json(about, {"layers": self.layers} | stated)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def tokens(self) -> NDArray[np.int32]:
        """i32[N]"""
        return self._mapped("tokens.i32", np.int32)

    @property
    def weights(self) -> NDArray[np.uint8]:
        """u8[N]: 1 where the target wrote the token."""
        return self._mapped("weights.u8", np.uint8)

    def fingerprint(self) -> str:
        """The same for the same texts."""
        parts = (self.starts, self.tokens, self.weights)
        return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()

    def hidden(self, layers: Sequence[int], lo: int, hi: int) -> torch.Tensor:
        """f32[hi-lo, layers x H]: hidden states of tokens lo..hi-1."""
        maps = [self._mapped(f"hidden-{i}.f16", np.float16, self._width) for i in layers]
        return torch.cat([torch.from_numpy(np.array(m[lo:hi])).float() for m in maps], -1)

    def append(self, texts: Sequence[Text], states: Sequence[States]) -> None:
        """Adds texts with their hidden states.

        Raises:
            ConfigError: they take more than the limit.
        """
        self._check_room(sum(len(text.tokens) for text in texts))
        for text, state in zip(texts, states, strict=True):
            weights = np.zeros(len(text.tokens), np.uint8)
            weights[len(weights) - text.written :] = 1
            self._write("tokens.i32", np.array(text.tokens, np.int32))
            self._write("weights.u8", weights)
            for layer, rows in zip(self.layers, state, strict=True):
                self._write(f"hidden-{layer}.f16", rows)
        lengths = np.array([len(text.tokens) for text in texts], np.int64)
        self._write("lengths.i64", lengths)
        self._reread(np.concatenate([np.diff(self.starts), lengths]))

    def fill(self, texts: Sequence[Text]) -> None:
        """Makes these the texts: the first ones that are there already stay, the rest is computed.

        Longer ones than the model's context are cut.

        Raises:
            ConfigError: they take more than the limit.
        """
        longest = self._target.context_len
        texts = [
            Text(t.tokens[:longest], max(t.written - max(len(t.tokens) - longest, 0), 0))
            for t in texts
        ]
        same = 0
        while same < min(len(self), len(texts)) and self._holds(same, texts[same]):
            same += 1
        if same < len(self):
            self._cut(np.diff(self.starts)[:same].tolist())
        left = texts[same:]
        if not left:
            return
        count = sum(len(text.tokens) for text in left)
        self._check_room(count)
        with Progress() as progress:
            task = progress.add_task("hidden states of the target", total=count)
            for chosen in _batches([len(text.tokens) for text in left]):
                batch = [left[i] for i in chosen]
                self.append(batch, _run(self._target, [t.tokens for t in batch], self.layers))
                progress.advance(task, sum(len(text.tokens) for text in batch))

    def _holds(self, index: int, text: Text) -> bool:
        lo, hi = int(self.starts[index]), int(self.starts[index + 1])
        written = int(self.weights[lo:hi].sum())
        return written == text.written and self.tokens[lo:hi].tolist() == text.tokens

    def _check_room(self, more: int) -> None:
        count = int(self.starts[-1]) + more
        size = count * self._width * 2 * len(self.layers)
        if size > self._limit:
            raise ConfigError(
                f"the hidden states of {count} tokens take {size / 1e9:.1f} GB where "
                f"{self._limit / 1e9:.1f} GB are allowed; give less data or raise --cache-gb"
            )

    def _whole(self) -> list[int]:
        """Lengths of the first texts that every file holds whole."""
        lengths = self._folder / "lengths.i64"
        held = np.fromfile(lengths, np.int64).tolist() if lengths.is_file() else []
        files = {self._folder / name: size for name, size in self._row_bytes().items()}
        rows = min(f.stat().st_size // size if f.is_file() else 0 for f, size in files.items())
        count = end = 0
        while count < len(held) and held[count] > 0 and end + held[count] <= rows:
            end += held[count]
            count += 1
        return held[:count]

    def _row_bytes(self) -> dict[str, int]:
        """What a token takes in each file."""
        states = {f"hidden-{layer}.f16": 2 * self._width for layer in self.layers}
        return {"tokens.i32": 4, "weights.u8": 1} | states

    def _cut(self, lengths: Sequence[int]) -> None:
        """Gives up all but the first texts."""
        sizes = {name: size * sum(lengths) for name, size in self._row_bytes().items()}
        sizes["lengths.i64"] = 8 * len(lengths)
        for other in self._folder.glob("hidden-*.f16"):
            if other.name not in sizes:
                other.unlink()
        for name, size in sizes.items():
            with (self._folder / name).open("ab") as file:
                file.truncate(size)
        self._reread(np.array(lengths, np.int64))

    def _reread(self, lengths: NDArray[np.int64]) -> None:
        self.starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        """i64[S+1]: where each text begins"""
        self._maps: dict[str, NDArray[Any]] = {}

    def _write(self, name: str, values: NDArray[Any]) -> None:
        with (self._folder / name).open("ab") as file:
            file.write(values.tobytes())

    def _mapped(self, name: str, dtype: type[np.generic], *width: int) -> NDArray[Any]:
        if name not in self._maps:
            shape = (int(self.starts[-1]), *width)
            self._maps[name] = (
                np.memmap(self._folder / name, dtype, "r", shape=shape)
                if shape[0]
                else np.empty(shape, dtype)
            )
        return self._maps[name]


def _stated(file: Path) -> dict[str, Any] | None:
    """What a store says of itself; None where there is none yet."""
    remedy = f"delete {file.parent} to have the hidden states computed anew"
    kept = read_json(file, remedy)
    layers = [] if kept is None else kept.get("layers")
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise ConfigError(f"{file} is damaged; {remedy}")
    if kept is not None and not isinstance(kept.get("target"), str):
        raise ConfigError(f"{file} is damaged; {remedy}")
    return kept


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


def _run(target: LoadedModel, texts: Sequence[list[int]], layers: Sequence[int]) -> list[States]:
    blocks = [-(-len(tokens) // 16) for tokens in texts]
    store = KVStore(target.model.layers, sum(blocks), 16, target.model.device)
    entries, first = [], 0
    for tokens, count in zip(texts, blocks, strict=True):
        slots = np.arange(first * 16, first * 16 + len(tokens), dtype=np.int64)
        entries.append(Entry(TokenTree.plain(tokens), 0, slots, np.empty(0, np.int64)))
        first += count
    batch = pack(entries, target.model.device)
    states = torch.stack(target.model.bind(store).forward(batch, layers).features)
    parts = torch.split(states.half(), [len(tokens) for tokens in texts], 1)
    return [part.numpy(force=True) for part in parts]
