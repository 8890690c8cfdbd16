"""The native matrix product beside torch's, by the number of rows.

For each shape there are so many matrices that no cache holds them; calls go round them, and native
and torch take turns, so that a busy moment of the machine hits both. The best call of each counts,
Python included. Bandwidth counts the weights' bytes alone and is compared with how fast the same
threads read memory.
"""

import argparse
import json
import time
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from provenance import provenance
from ridgeline import _native
from ridgeline.model.linear import PackedLinear, matrix_path

BYTES = 192 << 20  # of weights for each shape
STREAM_BYTES, STREAM_PASSES = 512 << 20, 10
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


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


def measure(shape: str, dtype: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The shortest call, in seconds, of each path for each number of rows."""
    outputs, inputs = map(int, shape.split("x"))
    count = max(2, BYTES // (outputs * inputs * DTYPES[dtype].itemsize))
    layers = [nn.Linear(inputs, outputs, bias=False, dtype=DTYPES[dtype]) for _ in range(count)]
    paths = {"native": [PackedLinear(layer) for layer in layers], "torch": layers}
    results = [
        {"dtype": dtype, "outputs": outputs, "inputs": inputs, "rows": rows}
        | dict.fromkeys(paths, float("inf"))
        for rows in args.rows
    ]
    for _ in range(args.rounds):
        for result in results:
            x = torch.randn(result["rows"], inputs, dtype=DTYPES[dtype])
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
    for (dtype, outputs, inputs), group in groupby(
        report["results"], key=itemgetter("dtype", "outputs", "inputs")
    ):
        weights = outputs * inputs
        size = weights * DTYPES[dtype].itemsize
        results = list(group)
        lines += [
            "",
            f"## {dtype}, {outputs} x {inputs}",
            "",
            "| rows | native, ms | relative | G weights/s | GB/s | of the stream | GFLOP/s "
            "| torch, ms | relative | G weights/s | torch / native |",
            "|---:" * 11 + "|",
        ]
        for result in results:
            rows, native, other = result["rows"], result["native"], result["torch"]
            lines.append(
                f"| {rows} | {native * 1e3:.3f} | {native / results[0]['native']:.2f} "
                f"| {weights / native / 1e9:.2f} | {size / native / 1e9:.1f} "
                f"| {size / native / stream:.2f} | {2 * rows * weights / native / 1e9:.0f} "
                f"| {other * 1e3:.3f} | {other / results[0]['torch']:.2f} "
                f"| {weights / other / 1e9:.2f} | {other / native:.1f} |"
            )
    lines += ["", "```json", json.dumps(report["provenance"], indent=2), "```", ""]
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--shapes",
        type=checked_shape,
        nargs="+",
        default=["8960x1536", "1536x8960", "1536x1536", "576x576"],
        help="outputs, then inputs; by default those of a model of 1.5 B, and of one of 135 M",
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8, 12, 16, 32, 128, 512]
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.05, help="for each figure in each round")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/linear.json")
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
    report = {
        "provenance": provenance(args),
        "path": matrix_path(),
        "stream_bytes_per_s": _native.stream_read(STREAM_BYTES, STREAM_PASSES),
        "results": [
            result
            for dtype in args.dtypes
            for shape in args.shapes
            for result in measure(shape, dtype, args)
        ],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=2) + "\n")
    args.out.with_suffix(".md").write_text(markdown(report))
    print(args.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
