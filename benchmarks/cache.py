"""What the paged cache costs: operations in microseconds, and memory under a mixed load.

Operations run at several sequence lengths on the layers of SmolLM2-135M in bfloat16; medians are
reported. Memory is counted, not timed: sequences of random lengths come and go, and each step
reserves room for a draft tree and keeps a part of it.
"""

import argparse
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from ridgeline.kv.blocks import BlockPool
from ridgeline.kv.store import KVStore, LayerShape, bytes_per_token
from ridgeline.kv.table import BlockTable
from ridgeline.provenance import provenance

BLOCK_SIZE = 16
LAYERS = (LayerShape((3, 64), (3, 64), torch.bfloat16),) * 30
NODES = 32
PATH = [0, 2, 5, 11, 20]  # the accepted nodes of such a tree
ROUNDS = 5  # over all lengths, so that a machine that slows down slows all of them

# Mean tokens of prompt and output. Chat is ShareGPT and instructions is Alpaca, as measured for
# PagedAttention (arXiv 2309.06180, figure 11); documents are long prompts with a short answer.
KINDS = {"chat": (161, 338), "instructions": (19, 58), "documents": (2000, 200)}
LOADS = {**{kind: (kind,) for kind in KINDS}, "mixed": tuple(KINDS)}
CONTEXT = 4096
SEQUENCES = 32  # at once


def append(table: BlockTable, length: int) -> None:
    for n in range(length, length + BLOCK_SIZE):
        table.grow(n + 1)
        table.writable(n, n + 1)
        table.slot(n)


def commit_tree(store: KVStore, table: BlockTable, length: int) -> None:
    slots = torch.tensor(table.slots(length, length + NODES))
    store.move(slots[PATH], slots[: len(PATH)])
    table.shrink(length + len(PATH))


def time_operations(length: int, pool: BlockPool, store: KVStore, repeats: int) -> dict[str, float]:
    """Median microseconds of each operation on a sequence of `length` tokens."""
    table, neighbour = BlockTable(pool), BlockTable(pool)
    forks: list[BlockTable] = []
    for n in range(0, length + 1, BLOCK_SIZE):  # in turns, so that no two blocks are adjacent
        table.grow(n)
        neighbour.grow(n)

    def microseconds(operation: Callable[[], Any], prepare: Callable[[], Any]) -> float:
        times = []
        for _ in range(repeats):
            prepare()
            start = time.perf_counter_ns()
            operation()
            times.append(time.perf_counter_ns() - start)
        return median(times) / 1000

    def release_forks() -> None:
        while forks:
            forks.pop().release()

    figures = {
        "append 16 tokens one by one": microseconds(
            lambda: append(table, length), lambda: table.shrink(length)
        ),
        "roll 16 tokens back": microseconds(
            lambda: table.shrink(length), lambda: table.grow(length + BLOCK_SIZE)
        ),
        "commit 5 of a tree's 32 nodes": microseconds(
            lambda: commit_tree(store, table, length), lambda: table.grow(length + NODES)
        ),
        "indices to gather all tokens": microseconds(
            lambda: table.slots(0, length), lambda: table.grow(length)
        ),
        "fork": microseconds(lambda: forks.append(table.fork()), release_forks),
    }
    for each in (*forks, table, neighbour):
        each.release()
    return figures


def operations(lengths: list[int], repeats: int) -> dict[str, dict[int, float]]:
    """Microseconds by operation and sequence length."""
    num_blocks = 2 * math.ceil(max(lengths) / BLOCK_SIZE) + math.ceil(NODES / BLOCK_SIZE)
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    store = KVStore(LAYERS, num_blocks, BLOCK_SIZE, "cpu")
    rounds: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(ROUNDS):
        for length in lengths:
            for name, figure in time_operations(length, pool, store, repeats).items():
                rounds[name][length].append(figure)
    pool.check([])
    return {
        name: {length: median(figures) for length, figures in row.items()}
        for name, row in rounds.items()
    }


def memory(kinds: tuple[str, ...], steps: int) -> dict[str, float]:
    """Bytes needed and in use, averaged over the steps of a load of these kinds, and their ratio.

    Prompt and output lengths are log-normal with sigma 1; every kind is as frequent as the others.
    """
    rng = np.random.default_rng(0)
    pool = BlockPool(SEQUENCES * (CONTEXT + NODES) // BLOCK_SIZE, BLOCK_SIZE)
    running: list[tuple[BlockTable, int, int]] = []  # with tokens now and at the end
    tokens: Counter[str] = Counter()
    for _ in range(steps):
        while len(running) < SEQUENCES:
            means = np.array(KINDS[kinds[rng.integers(len(kinds))]])
            prompt, output = np.ceil(rng.lognormal(np.log(means) - 0.5)).astype(int).tolist()
            running.append((BlockTable(pool), min(prompt, CONTEXT - 1), prompt + output))
        for table, length, _ in running:
            table.grow(length + NODES)
        tokens["needed in a step"] += sum(length + NODES for _, length, _ in running)
        tokens["in use in a step"] += pool.used * BLOCK_SIZE
        after = []
        for table, length, end in running:
            length = min(length + int(rng.integers(1, len(PATH) + 1)), end, CONTEXT)
            table.shrink(length)
            after.append((table, length, min(end, CONTEXT)))
        running = after
        tokens["needed"] += sum(length for _, length, _ in running)
        tokens["in use"] += pool.used * BLOCK_SIZE
        for table, length, end in running:
            if length == end:
                table.release()
        running = [entry for entry in running if entry[1] < entry[2]]
    pool.check([table for table, _, _ in running])
    average = {name: total / steps * bytes_per_token(LAYERS) for name, total in tokens.items()}
    return {
        "needed_bytes": average["needed"],
        "used_bytes": average["in use"],
        "ratio": tokens["needed"] / tokens["in use"],
        "ratio_in_a_step": tokens["needed in a step"] / tokens["in use in a step"],
        "ratio_reserving_context": tokens["needed"] / (steps * SEQUENCES * CONTEXT),
    }


def markdown(report: dict[str, Any]) -> str:
    lengths = report["provenance"]["arguments"]["lengths"]
    lines = [
        "# The paged cache",
        "",
        "## Operations",
        "",
        f"Microseconds (median) on one sequence, by its length in tokens. {len(LAYERS)} layers, "
        f"{bytes_per_token(LAYERS)} bytes a token, blocks of {BLOCK_SIZE}.",
        "",
        f"| operation | {' | '.join(map(str, lengths))} | x, longest to shortest |",
        "|---" + "|---:" * (len(lengths) + 1) + "|",
    ]
    for name, row in report["operations"].items():
        cells = [f"{row[length]:.1f}" for length in lengths]
        ratio = row[lengths[-1]] / row[lengths[0]]
        lines.append(f"| {name} | {' | '.join(cells)} | {ratio:.2f} |")
    lines += [
        "",
        "Indices are a view of the table's own array. A fork counts a reference for each block, so",
        "it alone grows with the sequence; it happens once for every further sample of a request.",
        "",
        "## Memory",
        "",
        f"{SEQUENCES} sequences at once, log-normal lengths, average over "
        f"{report['provenance']['arguments']['steps']} steps. Needed: a row for every",
        f"cached token (within a step also for {NODES} tree nodes a sequence). In use: the blocks",
        f"held. Reserved: {CONTEXT} tokens a sequence, as a cache without pages sets aside.",
        "",
        "| load | needed, MB | in use, MB | needed / in use | within a step | needed / reserved |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for load, row in report["memory"].items():
        lines.append(
            f"| {load} | {row['needed_bytes'] / 1e6:.1f} | {row['used_bytes'] / 1e6:.1f} "
            f"| {row['ratio']:.3f} | {row['ratio_in_a_step']:.3f} "
            f"| {row['ratio_reserving_context']:.3f} |"
        )
    lines += ["", "```json", json.dumps(report["provenance"], indent=2), "```", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[256, 1024, 4096, 16384, 32768], help="in tokens"
    )
    parser.add_argument("--repeats", type=int, default=100, help="of every operation in each round")
    parser.add_argument("--steps", type=int, default=3000, help="of every load")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of PyTorch")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parent / "results/cache.json",
        help="figures; a table goes beside",
    )
    args = parser.parse_args()
    if any(length < BLOCK_SIZE or length % BLOCK_SIZE for length in args.lengths):
        parser.error(f"lengths are multiples of {BLOCK_SIZE}")
    torch.set_num_threads(args.threads)
    report = {
        "provenance": provenance(vars(args)),
        "operations": operations(args.lengths, args.repeats),
        "memory": {load: memory(kinds, args.steps) for load, kinds in LOADS.items()},
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=2) + "\n")
    args.out.with_suffix(".md").write_text(markdown(report))
    print(args.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
