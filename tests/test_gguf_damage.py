"""Damaged and hostile GGUF files: refused in one line, whatever is wrong with them."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest
import torch

from ridgeline.errors import ModelLoadError
from ridgeline.model import gguf_convert
from ridgeline.model.gguf_file import _BadHeaderError, _Parser, read_gguf
from tests.loading import refusal
from tests.tiny import tiny_model
from tests.tiny_gguf import WIDE, write_gguf

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return write_gguf(tiny_model("llama", **WIDE), path).read_bytes()


def test_a_truncated_gguf_is_named_wherever_it_ends(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    for length in (0, 3, 4, 10, 23, 30, 100, 1000, 5000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert str(path) in refusal(path)
    assert "the file is cut short or damaged; download it again" in refusal(path)


def patched(whole: bytes, at: int, format: str, *values: int) -> bytes:
    raw = struct.pack(format, *values)
    return whole[:at] + raw + whole[at + len(raw) :]


def after(whole: bytes, text: bytes, shift: int = 0) -> int:
    return whole.index(text) + len(text) + shift


HOSTILE: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("magic", lambda w: patched(w, 0, "<I", 0), "does not begin with the letters GGUF"),
    ("version", lambda w: patched(w, 4, "<I", 9), "version 9"),
    ("tensors", lambda w: patched(w, 8, "<Q", 1 << 60), "more than"),
    ("entries", lambda w: patched(w, 16, "<Q", 1 << 60), "more than"),
    ("key length", lambda w: patched(w, 24, "<Q", 1 << 62), "inside its header"),
    ("value type", lambda w: patched(w, after(w, b"llama.vocab_size"), "<I", 77), "type 77"),
    (
        "array length",
        lambda w: patched(w, after(w, b"tokenizer.ggml.tokens", 8), "<Q", 1 << 40),
        "does not fit",
    ),
    (
        "array of arrays",
        lambda w: patched(w, after(w, b"tokenizer.ggml.tokens", 4), "<I", 9),
        "an array holds values of type 9",
    ),
    (
        "layers",
        lambda w: patched(w, after(w, b"llama.block_count", 4), "<I", 1 << 31),
        "block_count exceeds",
    ),
    (
        "heads",
        lambda w: patched(w, after(w, b"llama.attention.head_count", 4), "<I", 0),
        "describes no usable model",
    ),
    (
        "width",
        lambda w: patched(w, after(w, b"llama.feed_forward_length", 4), "<I", 1 << 31),
        "incomplete or damaged",
    ),
    (
        "dimensions",
        lambda w: patched(w, after(w, b"blk.0.ffn_up.weight"), "<I", 1 << 30),
        "has 1073741824 dimensions",
    ),
    (
        "shape",
        lambda w: patched(w, after(w, b"blk.0.ffn_up.weight", 4), "<QQ", 1 << 62, 1 << 62),
        "the file is cut short",
    ),
    (
        "kind",
        lambda w: patched(w, after(w, b"blk.0.ffn_up.weight", 20), "<I", 999),
        "unknown type 999",
    ),
    (
        "integers",
        lambda w: patched(w, after(w, b"blk.0.ffn_up.weight", 20), "<I", 26),
        "as I32, which the installed gguf package cannot unpack",
    ),
    (
        "offset",
        lambda w: patched(w, after(w, b"blk.0.ffn_up.weight", 24), "<Q", 1 << 50),
        "the file is cut short",
    ),
    (
        "overlap",
        lambda w: patched(w, after(w, b"blk.0.ffn_up.weight", 24), "<Q", 0),
        "lie over each other",
    ),
    (
        "name",
        lambda w: w.replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_xx.weight"),
        "has no place for",
    ),
    (
        "duplicate",
        lambda w: w.replace(b"blk.0.ffn_up.weight", b"blk.1.ffn_up.weight"),
        "occurs twice",
    ),
    ("family", lambda w: w.replace(b"llama", b"lorem"), "cannot read from GGUF"),
    ("embedding", lambda w: w.replace(b"token_embd", b"token_xxxx"), "holds no tensor token_embd"),
    (
        "token",
        lambda w: patched(w, after(w, b"tokenizer.ggml.eos_token_id", 4), "<I", 1 << 31),
        "describes no usable tokenizer",
    ),
]


@pytest.mark.parametrize(
    ("change", "message"), [h[1:] for h in HOSTILE], ids=[h[0] for h in HOSTILE]
)
def test_a_hostile_gguf_is_refused(
    change: Callable[[bytes], bytes], message: str, whole: bytes, tmp_path: Path, cache: Path
) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(change(whole))
    answer = refusal(path)
    assert message in answer
    assert str(path) in answer
    assert not list(cache.rglob("*.safetensors"))


def test_random_damage_to_the_header_never_gets_past_our_errors(
    whole: bytes, tmp_path: Path
) -> None:
    header = after(whole, b"output_norm.weight") + 24
    path = tmp_path / "damaged.gguf"
    refused = 0
    for seed in range(60):
        rng = random.Random(seed)
        damaged = bytearray(whole)
        for _ in range(rng.choice([1, 4])):
            damaged[rng.randrange(header)] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            header_read = read_gguf(path)
            config = gguf_convert.gguf_config(header_read)
            gguf_convert.WeightPlan(header_read, config, torch.float32)
        except ModelLoadError:
            refused += 1
    assert refused > 10


EXTREMES = (0, 1, 7, 255, 2**16, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)


def test_ten_thousand_damaged_headers_are_refused_or_harmless(whole: bytes) -> None:
    header = after(whole, b"output_norm.weight") + 24
    harmless = 0
    for seed in range(10_000):
        rng = random.Random(seed)
        damaged = bytearray(whole)
        for _ in range(rng.choice([1, 1, 3])):
            at = rng.randrange(header)
            width = rng.choice([1, 4, 8])
            value = rng.choice(EXTREMES) if rng.random() < 0.7 else rng.getrandbits(64)
            damaged[at : at + width] = value.to_bytes(8, "little")[:width]
        if rng.random() < 0.1:
            del damaged[rng.randrange(len(damaged)) :]
        try:
            _, tensors = _Parser(bytes(damaged)).parse()
        except _BadHeaderError:
            continue
        harmless += 1
        for tensor in tensors.values():  # what a reader will touch lies in the file
            assert 0 <= tensor.offset <= tensor.offset + tensor.nbytes <= len(damaged)
            assert prod(tensor.shape) < 8 * len(damaged)
    assert 500 < harmless < 9_500
