"""The network of recurrent draft heads: one decoder layer over (token embedding, hidden state).

From the hidden state that predicted a token, and that token's embedding, it computes the hidden
state that predicts the next one. EAGLE (arXiv 2401.15077), EAGLE-3 (2503.01840) and the MTP modules
of DeepSeek-V3 (2412.19437) are this network with different norms and projections around the layer:

    e = embedding_norm(embedding)        h = feature_norm(hidden)
    projected:  x = project([e; h]), attention reads attention_norm(x)
    otherwise:  x = hidden (or h),   attention reads [e; h]
    y = x + attention(...);  carried = y + mlp(mlp_norm(y));  logits = head(norm(carried))

A norm that a checkpoint does not have is left out. The same module is trained and run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From queries [T,heads,D], keys and values [T,kv_heads,D], rotated, to what attention gives
[T,heads,D]; whatever it looks at, itself included, is the caller's to say."""

NORMS = ("embedding_norm", "feature_norm", "attention_norm", "norm", "query_norm", "key_norm")
"""Norms that only some heads have."""


@dataclass(frozen=True)
class HeadShape:
    """What a recurrent head is made of."""

    layer: LlamaConfig
    """hidden and intermediate size, heads, rotary positions, eps and biases of the layer"""
    features: tuple[int, ...]
    """target layers whose input hidden states it reads (num_layers: the final, normed)"""
    target_hidden: int
    """width of one of them, and of an embedding"""
    vocab_size: int
    """ids that it can draft"""
    projected: bool
    """whether embedding and hidden state become one vector; if not, attention reads both"""
    norms: frozenset[str] = frozenset()
    """which of NORMS it has"""
    fused: bool = False
    """whether a matrix makes one hidden state of several features"""
    own_head: bool = True
    """whether it has an LM head of its own, over its own ids"""
    project_bias: bool = False
    residual_normed: bool = False
    """without a projection: whether the residual starts from the normed hidden state"""
    carries_normed: bool = False
    """whether the next step reads the normed hidden state"""


class RecurrentHead(nn.Module):
    """See the module's docstring. Weights are [out, in], as torch has them."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        c = shape.layer
        hidden, dim = c.hidden_size, c.head_dim
        wide = hidden if shape.projected else shape.target_hidden + hidden

        def norm(name: str, width: int) -> nn.RMSNorm | None:
            return nn.RMSNorm(width, eps=c.rms_norm_eps) if name in shape.norms else None

        self.fuse = (
            nn.Linear(len(shape.features) * shape.target_hidden, hidden, bias=False)
            if shape.fused
            else None
        )
        self.embedding_norm = norm("embedding_norm", shape.target_hidden)
        self.feature_norm = norm("feature_norm", hidden)
        self.project = (
            nn.Linear(shape.target_hidden + hidden, hidden, bias=shape.project_bias)
            if shape.projected
            else None
        )
        self.attention_norm = norm("attention_norm", hidden)
        self.query = nn.Linear(wide, c.num_attention_heads * dim, bias=c.attention_bias)
        self.key = nn.Linear(wide, c.num_key_value_heads * dim, bias=c.attention_bias)
        self.value = nn.Linear(wide, c.num_key_value_heads * dim, bias=c.attention_bias)
        self.query_norm = norm("query_norm", dim)
        self.key_norm = norm("key_norm", dim)
        self.output = nn.Linear(c.num_attention_heads * dim, hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden, eps=c.rms_norm_eps)
        self.gate = nn.Linear(hidden, c.intermediate_size, bias=False)
        self.up = nn.Linear(hidden, c.intermediate_size, bias=False)
        self.down = nn.Linear(c.intermediate_size, hidden, bias=False)
        self.norm = norm("norm", hidden)
        self.head = nn.Linear(hidden, shape.vocab_size, bias=False) if shape.own_head else None
        self.rotary = LlamaRotaryEmbedding(c)

    def hidden_from(self, features: Tensor) -> Tensor:
        """[T,H]: the hidden states that true features [T, layers x target_hidden] stand for."""
        if self.fuse is None:
            return features
        fused: Tensor = self.fuse(features)
        return fused

    def inputs(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the layer's residual starts from [T,H], and what its attention reads [T,wide]."""
        e, h = _normed(self.embedding_norm, embedding), _normed(self.feature_norm, hidden)
        both = torch.cat([e, h], -1)
        if self.project is None:
            return h if self.shape.residual_normed else hidden, both
        x = self.project(both)
        return x, _normed(self.attention_norm, x)

    def forward(
        self, embedding: Tensor, hidden: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """The carried hidden states [T,H].

        Args:
            embedding: [T,target_hidden], of the tokens.
            hidden: [T,H], which predicted them.
            positions: i64[T].
            attend: attention over whatever each of them may see.
        """
        c = self.shape.layer
        x, read = self.inputs(embedding, hidden)
        count, dim = len(x), c.head_dim
        cos, sin = self.rotary(x, positions[None])
        query = _normed(self.query_norm, self.query(read).view(count, -1, dim))
        key = _normed(self.key_norm, self.key(read).view(count, -1, dim))
        value = self.value(read).view(count, -1, dim)
        query, key = _rotate(query, cos[0], sin[0]), _rotate(key, cos[0], sin[0])
        y = x + self.output(attend(query, key, value).flatten(1))
        z = _normed(self.mlp_norm, y)
        carried: Tensor = y + self.down(F.silu(self.gate(z)) * self.up(z))
        return carried

    def normed(self, carried: Tensor) -> Tensor:
        """[T,H]: what the LM head reads, the target's or its own."""
        return _normed(self.norm, carried)

    def next_hidden(self, carried: Tensor) -> Tensor:
        """[T,H]: what the next step takes for its hidden state."""
        return self.normed(carried) if self.shape.carries_normed else carried


def _normed(norm: nn.RMSNorm | None, x: Tensor) -> Tensor:
    if norm is None:
        return x
    result: Tensor = norm(x.to(norm.weight.dtype))  # bf16 where training autocasts
    return result


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (arXiv 2104.09864) of [T,heads,D]; a pair is an element of each half."""
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]
