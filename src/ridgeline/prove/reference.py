"""The target's own distributions, from plain forward passes: no engine, no drafts, no tree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.batch import Entry, pack
from ridgeline.core.noise import GROUP, Stream, gumbel
from ridgeline.core.sampling import Rows, SamplingParams, noise_keys, process
from ridgeline.core.tree import TokenTree
from ridgeline.kv.store import KVStore
from ridgeline.model.load import LoadedModel

BLOCK_SIZE = 16
TEXTS = 64
"""Texts of one forward pass."""
CHUNK = 512
"""Prompt tokens of one forward pass."""


class Reference:
    """A target over a cache of its own, which holds one prompt and many continuations of it."""

    def __init__(self, loaded: LoadedModel, prompt: int, ahead: int) -> None:
        """Makes room for prompts of `prompt` tokens and continuations of `ahead` tokens."""
        self.loaded = loaded
        self._room = prompt
        self._width = ahead + 1
        model, tokens = loaded.model, prompt + TEXTS * self._width
        self._store = KVStore(model.layers, -(-tokens // BLOCK_SIZE), BLOCK_SIZE, model.device)
        self._target = model.bind(self._store)
        self._held: list[int] = []

    def logits(self, prompt: Sequence[int], continuations: Sequence[Sequence[int]]) -> Tensor:
        """f32[N,V]: raw logits of what follows the prompt and each of N continuations."""
        self._hold(prompt)
        start, rows = len(prompt) - 1, []
        for first in range(0, len(continuations), TEXTS):
            entries = []
            for i, continuation in enumerate(continuations[first : first + TEXTS]):
                tree = TokenTree.plain([prompt[-1], *continuation])
                own = self._room + i * self._width + np.arange(tree.size)
                slots = np.concatenate([np.arange(start), own])
                entries.append(Entry(tree, start, slots, np.array([tree.root])))
            rows.append(self._target.forward(pack(entries, self._store.device)).logits)
        return torch.cat(rows)

    def processed(
        self,
        prompt: Sequence[int],
        continuations: Sequence[Sequence[int]],
        params: SamplingParams,
    ) -> Tensor:
        """f32[N,V]: as `logits`, after the processing that plain decoding applies."""
        rows = [_rows(prompt, continuation, params) for continuation in continuations]
        return process(self.logits(prompt, continuations), rows)

    def margin(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        chosen: int,
        other: int,
        params: SamplingParams,
    ) -> float:
        """By how much, after prompt and output, `chosen` lies before `other` in what decides.

        That is the processed logit, for sampled requests divided by the temperature and with the
        noise of the request's seed and this position.
        """
        (scores,) = self.processed(prompt, [output], params)
        values = [float(scores[token]) for token in (chosen, other)]
        if not params.greedy:
            (key,) = noise_keys([_rows(prompt, output, params)], Stream.TARGET).tolist()
            for i, token in enumerate((chosen, other)):
                noise = gumbel(torch.tensor(key), torch.tensor(token // GROUP))
                values[i] += float(noise[token % GROUP])
        return values[0] - values[1]

    def rounding(self, prompt: Sequence[int]) -> float:
        """How far logits depend on the rows computed beside them: 0 if they are equal to the bit.

        The last tokens of the prompt, computed at once and one by one, alone and beside others.
        """
        count = min(8, len(prompt) - 1)
        if not count:
            return 0.0
        start, last = list(prompt[:-count]), list(prompt[-count:])
        chunk = self.logits(start, [last])
        beside = self.logits(start, [last] * 5)
        single = self.logits(prompt, [[]])
        return max(float((chunk - other).abs().max()) for other in (beside[-1:], single))

    def _hold(self, prompt: Sequence[int]) -> None:
        """Computes the keys and values of all but the prompt's last token."""
        if self._held == list(prompt):
            return
        end = len(prompt) - 1
        for start in range(0, end, CHUNK):
            tree = TokenTree.plain(prompt[start : min(start + CHUNK, end)])
            slots = np.arange(start + tree.size)
            entry = Entry(tree, start, slots, np.empty(0, np.int64))
            self._target.forward(pack([entry], self._store.device))
        self._held = list(prompt)


def _rows(prompt: Sequence[int], output: Sequence[int], params: SamplingParams) -> Rows:
    tokens = [*prompt, *output]
    return Rows(
        params,
        params.seed or 0,
        tokens,
        len(prompt),
        frozenset(),
        TokenTree.plain(tokens[-1:]),
        np.array([0]),
    )
