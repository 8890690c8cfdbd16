"""How far quantised arithmetic moves the next-token distributions: ours and llama.cpp's.

Both run the same GGUF file; the truth is an fp32 run of its dequantised weights. The text is this
project's own documents, which no model was trained on. llama.cpp runs in the environment that
`benchmarks/peers/setup.sh` makes; without it only our figures appear.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.batch import Entry, pack
from ridgeline.core.tree import TokenTree
from ridgeline.kv.store import KVStore
from ridgeline.model.load import LoadedModel, load_model
from ridgeline.provenance import ROOT, provenance

HERE = Path(__file__).parent
LLAMACPP = ROOT / ".venv-peers" / "llamacpp" / "bin" / "python"
TEXTS = ("docs/verification.md", "docs/add_a_drafter.md", "docs/structure.md", "README.md")
SEGMENT = 256  # tokens of one context
BLOCK = 32  # tokens whose mean counts as one observation


def our_logits(loaded: LoadedModel, segments: np.ndarray) -> Tensor:
    """f32[S,SEGMENT,V]"""
    store = KVStore(loaded.model.layers, SEGMENT // 16, 16, "cpu")
    target, slots = loaded.model.bind(store), np.arange(SEGMENT)
    return torch.stack(
        [
            target.forward(pack([Entry(TokenTree.plain(tokens), 0, slots, slots)])).logits
            for tokens in segments
        ]
    )


def their_logits(model: Path, segments: np.ndarray) -> Tensor:
    """The same by llama.cpp."""
    with tempfile.TemporaryDirectory() as folder:
        job, result = Path(folder) / "job.json", Path(folder) / "logits.npy"
        job.write_text(json.dumps({"model": str(model), "segments": segments.tolist()}))
        subprocess.run([LLAMACPP, HERE / "peers" / "logits_llamacpp.py", job, result], check=True)
        return torch.from_numpy(np.load(result))


def divergence(truth: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """f32[T] and bool[T]: KL(truth, other) in nats, and whether the same token leads."""
    divergences, same = [], []
    for p, q in zip(truth, other[..., : truth.shape[-1]], strict=True):
        p, q = p.log_softmax(-1), q.float().log_softmax(-1)
        divergences.append((p.exp() * (p - q)).sum(-1))
        same.append(p.argmax(-1) == q.argmax(-1))
    return torch.cat(divergences), torch.cat(same).float()


def summary(kl: Tensor, same: Tensor) -> dict[str, float]:
    """The mean, its 99th percentile, and how often the same token leads."""
    return {
        "mean_kl": float(kl.mean()),
        "kl_99": float(kl.quantile(0.99)),
        "same_first": float(same.mean()),
    }


def difference(ours: Tensor, theirs: Tensor) -> dict[str, float]:
    """Mean of ours - theirs over the same tokens, and half its 95 % interval.

    Neighbouring tokens are not independent: the spread is that of means over BLOCK of them.
    """
    blocks = (ours - theirs).view(-1, BLOCK).mean(1)
    return {
        "mean": float(blocks.mean()),
        "plus_minus": float(1.96 * blocks.std() / len(blocks) ** 0.5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="GGUF file")
    parser.add_argument("--tokens", type=int, default=2048, help="length of the text compared")
    parser.add_argument("--out", type=Path, help="results/accuracy-MODEL.json")
    args = parser.parse_args()
    path = args.model.resolve()
    dense = load_model(str(path), "float32")
    text = "\n".join((ROOT / name).read_text() for name in TEXTS)
    tokens = np.array(dense.encode_text(text)[: args.tokens // SEGMENT * SEGMENT])
    segments = tokens.reshape(-1, SEGMENT)
    truth = our_logits(dense, segments)
    del dense
    ours = divergence(truth, our_logits(load_model(str(path)), segments))
    results: dict[str, Any] = {"ridgeline": summary(*ours)}
    if LLAMACPP.exists():
        theirs = divergence(truth, their_logits(path, segments))
        results["llama.cpp"] = summary(*theirs)
        results["difference in KL"] = difference(ours[0], theirs[0])
        results["difference in same_first"] = difference(ours[1], theirs[1])
    report = {"provenance": provenance(vars(args)), "tokens": len(tokens), "results": results}
    out = args.out or HERE / "results" / f"accuracy-{path.stem}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n")
    for name, row in results.items():
        print(f"{name}: " + ", ".join(f"{key} {value:.5f}" for key, value in row.items()))


if __name__ == "__main__":
    main()
