"""The native matrix products by the number of rows: dense ones beside torch's, quantised ones.

For each kind and shape there are so many matrices that no cache holds them; calls go round them,
and native and torch take turns, so that a busy moment of the machine hits both. The best call of
each counts, Python included. Bandwidth counts the weights' bytes alone and is compared with how
fast the same threads read memory.
"""

import argparse
import json
import time
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ridgeline import _native
from ridgeline.model.gguf_file import read_gguf
from ridgeline.model.linear import TYPES, PackedLinear, matrix_path, pack
from ridgeline.provenance import provenance

BYTES = 192 << 20  # of weights for each shape
STREAM_BYTES, STREAM_PASSES = 512 << 20, 10
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
QUANTISED = ("int4", "int8")
KINDS = (*DTYPES, *QUANTISED)


def best_call(layers: Sequence[nn.Module], x: Tensor, seconds: float) -> float:
    """The shortest of the calls that fit in so many seconds, of three at least; in seconds."""
    best, calls = float("inf"), 0
    end = time.perf_counter() + seconds
    while calls < 3 or time.perf_counter() < end:
        layer = layers[calls % len(layers)]
        start = time.perf_counter()
        layer(x)
        best = min(best, time.perf_counter() - start)
        calls += 1
    return best


class Product(nn.Module):
    """A native matrix as a layer, from fp32 rows to fp32 rows."""

    def __init__(self, matrix: Any) -> None:
        super().__init__()
        self.matrix = matrix

    def forward(self, x: Tensor) -> Tensor:
        """f32[N,outputs] for f32[N,inputs]."""
        y = x.new_empty(len(x), self.matrix.outputs)
        self.matrix.multiply(TYPES[x.dtype], x.data_ptr(), x.numel(), y.data_ptr(), y.numel())
        return y


def made(kind: str, shape: str) -> tuple[list[nn.Module], dict[str, list[nn.Module]]]:
    """Matrices of one kind and shape, more than a cache holds: native ones, and torch's if any."""
    outputs, inputs = map(int, shape.split("x"))
    dtype = DTYPES.get(kind, torch.float32)
    width = int(kind[3:]) / 8 if kind in QUANTISED else dtype.itemsize
    count = max(2, int(BYTES / (outputs * inputs * width)))
    layers = [nn.Linear(inputs, outputs, bias=False, dtype=dtype) for _ in range(count)]
    if kind in QUANTISED:
        return [Product(pack(layer, int(kind[3:]))) for layer in layers], {}
    return [PackedLinear(layer) for layer in layers], {"torch": layers}


def stored(path: Path) -> dict[tuple[str, str], list[nn.Module]]:
    """The quantised matrices of a GGUF file by type and shape."""
    header = read_gguf(path)
    found: dict[tuple[str, str], list[nn.Module]] = {}
    for tensor in header.tensors.values():
        if len(tensor.shape) == 2 and _native.packs_gguf(int(tensor.kind)):
            outputs, inputs = tensor.shape
            matrix = _native.from_gguf(
                type=int(tensor.kind),
                blocks=header.rows(tensor).reshape(-1),
                rows=np.arange(outputs, dtype=np.int32),
                bias=np.empty(0, np.float32),
                inputs=inputs,
            )
            key = (tensor.kind.name, f"{outputs}x{inputs}")
            found.setdefault(key, []).append(Product(matrix))
    return found


def measure(
    kind: str, shape: str, native: list[nn.Module], others: dict[str, list[nn.Module]], args: Any
) -> list[dict[str, Any]]:
    """The shortest call, in seconds, of each path for each number of rows."""
    outputs, inputs = map(int, shape.split("x"))
    paths = {"native": native, **others}
    results = [
        {"kind": kind, "outputs": outputs, "inputs": inputs, "rows": rows}
        | {"bytes": native[0].matrix.nbytes}
        | dict.fromkeys(paths, float("inf"))
        for rows in args.rows
    ]
    for _ in range(args.rounds):
        for result in results:
            x = torch.randn(result["rows"], inputs, dtype=DTYPES.get(kind, torch.float32))
            for path, modules in paths.items():
                result[path] = min(result[path], best_call(modules, x, args.seconds))
    return results


def markdown(report: dict[str, Any]) -> str:
    stream = report["stream_bytes_per_s"]
    lines = [
        "# Matrix products with few rows",
        "",
        f"Path: {report['path']}. {report['provenance']['threads']} threads, which read memory at "
        f"{stream / 1e9:.1f} GB/s (the stream).",
        "Best calls. Relative: the time against that of the first number of rows.",
    ]
    for (kind, outputs, inputs), group in groupby(
        report["results"], key=itemgetter("kind", "outputs", "inputs")
    ):
        weights = outputs * inputs
        results = list(group)
        columns = ["rows", "native, ms", "relative", "G weights/s", "GB/s", "of the stream"]
        columns += ["GFLOP/s"]
        if "torch" in results[0]:
            columns += ["torch, ms", "relative", "torch / native"]
        lines += ["", f"## {kind}, {outputs} x {inputs}", "", f"| {' | '.join(columns)} |"]
        lines.append("|---:" * len(columns) + "|")
        for result in results:
            rows, native, size = result["rows"], result["native"], result["bytes"]
            cells = [f"{rows}", f"{native * 1e3:.3f}", f"{native / results[0]['native']:.2f}"]
            cells += [f"{weights / native / 1e9:.2f}", f"{size / native / 1e9:.1f}"]
            cells += [f"{size / native / stream:.2f}", f"{2 * rows * weights / native / 1e9:.0f}"]
            if "torch" in result:
                other = result["torch"]
                cells += [f"{other * 1e3:.3f}", f"{other / results[0]['torch']:.2f}"]
                cells.append(f"{other / native:.1f}")
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "```json", json.dumps(report["provenance"], indent=2), "```", ""]
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--shapes",
        type=checked_shape,
        nargs="+",
        default=["8960x1536", "1536x1536", "576x576"],
        help="outputs, then inputs; by default those of a model of 1.5 B, and of one of 135 M",
    )
    parser.add_argument(
        "--kinds", nargs="*", choices=KINDS, default=list(KINDS), help="formats of weights"
    )
    parser.add_argument("--gguf", type=Path, help="measure this file's quantised matrices too")
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[1, 2, 4, 6, 8, 12, 16, 32, 128, 512],
        help="of the input",
    )
    parser.add_argument("--rounds", type=int, default=3, help="the fastest of which counts")
    parser.add_argument("--seconds", type=float, default=0.05, help="for each figure in each round")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parent / "results/linear.json",
        help="where the figures go",
    )
    return parser.parse_args()


def checked_shape(text: str) -> str:
    outputs, inputs = map(int, text.split("x"))
    if min(outputs, inputs) < 1:
        raise ValueError
    return text


@torch.inference_mode()
def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    _native.set_threads(args.threads)
    # Read anew between matrices: the best of all, as with the products.
    stream = _native.stream_read(STREAM_BYTES, STREAM_PASSES)
    results = []
    for kind in args.kinds:
        for shape in args.shapes:
            results += measure(kind, shape, *made(kind, shape), args)
            stream = max(stream, _native.stream_read(STREAM_BYTES, STREAM_PASSES))
    for (kind, shape), matrices in (stored(args.gguf) if args.gguf else {}).items():
        results += measure(kind, shape, matrices, {}, args)
        stream = max(stream, _native.stream_read(STREAM_BYTES, STREAM_PASSES))
    report = {
        "provenance": provenance(vars(args)),
        "path": matrix_path(),
        "stream_bytes_per_s": stream,
        "results": results,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=2) + "\n")
    args.out.with_suffix(".md").write_text(markdown(report))
    print(args.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
