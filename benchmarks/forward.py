"""What one forward pass costs: by the rows that it checks, the context before them, the batch.

Every figure is the median of passes taken in turns (all sizes once, then again), so that a busy
moment of the machine hits all of them.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from provenance import provenance
from ridgeline.core.batch import Batch, Entry, pack
from ridgeline.core.tree import TokenTree
from ridgeline.kv.store import KVStore
from ridgeline.model.load import load_model
from ridgeline.model.target import Target
from ridgeline.model.threads import set_threads

HERE = Path(__file__).parent
CONTEXT = 128  # tokens before the rows, where it is not the context that varies


def spans(rng: np.random.Generator, slots: np.ndarray, count: int, rows: int, kv_len: int) -> Batch:
    """`count` sequences of `rows` new tokens after `kv_len`, which all share their slots."""
    entries = []
    for i in range(count):
        own = slots[kv_len + i * rows : kv_len + (i + 1) * rows]
        tree = TokenTree.plain(rng.integers(0, 1000, rows))
        keep = np.arange(tree.size) if rows <= 32 else np.array([tree.root])
        entries.append(Entry(tree, kv_len, np.concatenate([slots[:kv_len], own]), keep))
    return pack(entries)


def prefill(target: Target, slots: np.ndarray, length: int) -> None:
    """Fills the cache up to `length` tokens."""
    rng = np.random.default_rng(0)
    for start in range(0, length, 256):
        tree = TokenTree.plain(rng.integers(0, 1000, min(256, length - start)))
        entry = Entry(tree, start, slots[: start + tree.size], np.empty(0, np.int64))
        target.forward(pack([entry]))


def take_turns(passes: dict[Any, Callable[[], object]], rounds: int) -> dict[Any, float]:
    """Median seconds of each pass."""
    seconds: dict[Any, list[float]] = {key: [] for key in passes}
    for number in range(rounds + 1):
        for key, run in passes.items():
            start = time.perf_counter()
            run()
            if number:  # the first round allocates
                seconds[key].append(time.perf_counter() - start)
    return {key: median(values) for key, values in seconds.items()}


def table(title: str, unit: str, seconds: dict[int, float], tokens: Callable[[int], int]) -> str:
    first = next(iter(seconds.values()))
    lines = [
        "",
        f"## {title}",
        "",
        f"| {unit} | ms | relative | tokens/s |",
        "|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {key} | {value * 1e3:.1f} | {value / first:.2f} | {tokens(key) / value:.0f} |"
        for key, value in seconds.items()
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantize")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8, 12, 16])
    parser.add_argument("--prefill", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024, 4096, 8192])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, help="results/forward-MODEL.json")
    args = parser.parse_args()
    set_threads(args.threads)
    loaded = load_model(args.model, args.dtype, quantize=args.quantize)
    most = max(args.contexts) + max(*args.rows, *args.prefill, *args.batches)
    store = KVStore(loaded.model.layers, -(-most // 16), 16, loaded.model.device)
    target = loaded.model.bind(store)
    slots = np.random.default_rng(1).permutation(-(-most // 16))[:, None] * 16 + np.arange(16)
    slots = slots.ravel()
    prefill(target, slots, max(args.contexts))
    rng = np.random.default_rng(2)

    def passes(batches: dict[int, Batch]) -> dict[Any, Callable[[], object]]:
        return {key: lambda batch=batch: target.forward(batch) for key, batch in batches.items()}

    rows = take_turns(passes({n: spans(rng, slots, 1, n, CONTEXT) for n in args.rows}), args.rounds)
    long = take_turns(passes({n: spans(rng, slots, 1, n, 0) for n in args.prefill}), 2)
    batch = take_turns(
        passes({n: spans(rng, slots, n, 1, CONTEXT) for n in args.batches}), args.rounds
    )
    results = {"rows": rows, "prefill": long, "batch": batch}
    for n in (1, 8):
        contexts = {length: spans(rng, slots, 1, n, length) for length in args.contexts}
        results[f"context, {n} rows"] = take_turns(passes(contexts), args.rounds)
    title = f"# A forward pass of {loaded.name}"
    text = [title, "", f"{loaded.model.computes}. `python benchmarks/forward.py`; medians."]
    text.append(table(f"Rows of one sequence after {CONTEXT} tokens", "rows", rows, lambda n: n))
    text.append(table("Prefill", "tokens", long, lambda n: n))
    text.append(
        table(f"Sequences, a row each, after {CONTEXT} tokens", "batch", batch, lambda n: n)
    )
    for n in (1, 8):
        measured = results[f"context, {n} rows"]
        text.append(table(f"Context before {n} rows", "context", measured, lambda _, n=n: n))
    source = provenance(args)
    text += ["", "```json", json.dumps(source, indent=2), "```", ""]
    out = args.out or HERE / "results" / f"forward-{loaded.name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    report = {"provenance": source, "computes": loaded.model.computes, "seconds": results}
    out.write_text(json.dumps(report, indent=2) + "\n")
    out.with_suffix(".md").write_text("\n".join(text))
    print("\n".join(text))


if __name__ == "__main__":
    main()
