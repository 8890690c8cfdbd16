"""What one forward pass costs: by the rows that it checks, the context before them, the batch.

Every figure is the median of passes taken in turns (all sizes once, then again), so that a busy
moment of the machine hits all of them. llama.cpp takes its turns too where it is installed
(`peers/setup.sh`) and the model is a GGUF file run as it is.
"""

import argparse
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from ridgeline.core.batch import Entry, pack
from ridgeline.core.tree import TokenTree
from ridgeline.kv.store import KVStore
from ridgeline.model.load import load_model
from ridgeline.model.target import Model
from ridgeline.model.threads import set_threads
from ridgeline.provenance import ROOT, provenance

HERE = Path(__file__).parent
LLAMACPP = ROOT / ".venv-peers" / "llamacpp" / "bin" / "python"
CONTEXT = 128  # tokens before the rows, where it is not the context that varies


class Pass(NamedTuple):
    """So many sequences, each with so many new tokens after so many that they share."""

    sequences: int
    rows: int
    context: int


class Ridgeline:
    """Our passes."""

    def __init__(self, model: Model, most: int) -> None:
        blocks = -(-most // 16)
        store = KVStore(model.layers, blocks, 16, model.device)
        self._target = model.bind(store)
        shuffled = np.random.default_rng(1).permutation(blocks)
        self._slots = (shuffled[:, None] * 16 + np.arange(16)).ravel()
        self._tokens = np.random.default_rng(2).integers(0, 1000, most)
        self._filled = 0

    def seconds(self, size: Pass) -> float:
        """One pass; what is shared is computed at the first need of it."""
        while self._filled < size.context:
            end = min(self._filled + 256, size.context)
            tree = TokenTree.plain(self._tokens[self._filled : end])
            entry = Entry(tree, self._filled, self._slots[:end], np.empty(0, np.int64))
            self._target.forward(pack([entry]))
            self._filled = end
        entries = []
        # New tokens lie behind everything shared, or a later pass would find its context changed.
        free = iter(self._slots[::-1])
        for _ in range(size.sequences):
            tree = TokenTree.plain(self._tokens[: size.rows])
            own = np.array([next(free) for _ in range(size.rows)])
            slots = np.concatenate([self._slots[: size.context], own])
            keep = np.arange(tree.size) if size.rows <= 32 else np.array([tree.root])
            entries.append(Entry(tree, size.context, slots, keep))
        batch = pack(entries)
        start = time.perf_counter()
        self._target.forward(batch)
        return time.perf_counter() - start


class LlamaCpp:
    """llama.cpp's, in a process of its own."""

    def __init__(self, model: Path, threads: int, most: int) -> None:
        command = [LLAMACPP, HERE / "peers" / "passes_llamacpp.py", model, str(threads), str(most)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.version = self._answer()["version"]

    def seconds(self, size: Pass) -> float:
        """One pass; what is shared is computed at the first need of it."""
        assert self._process.stdin
        print(json.dumps(size._asdict()), file=self._process.stdin, flush=True)
        return float(self._answer())

    def _answer(self) -> Any:
        assert self._process.stdout
        return json.loads(self._process.stdout.readline() or "null")


def take_turns(
    sizes: list[Pass], engines: dict[str, Callable[[Pass], float]], rounds: int
) -> dict[str, list[float]]:
    """Median seconds of each size, for each engine."""
    seconds = {name: [[] for _ in sizes] for name in engines}
    for number in range(rounds + 1):
        for name, run in engines.items():
            for size, spent in zip(sizes, seconds[name], strict=True):
                once = run(size)
                if number:  # the first round allocates
                    spent.append(once)
    return {name: [median(spent) for spent in each] for name, each in seconds.items()}


def table(title: str, unit: str, keys: list[int], sizes: list[Pass], seconds: dict) -> str:
    ours, theirs = seconds["ridgeline"], seconds.get("llama.cpp")
    columns = [unit, "ms", "relative", "tokens/s"]
    if theirs:
        columns += ["llama.cpp, ms", "relative", "tokens/s", "their time / ours"]
    lines = ["", f"## {title}", "", "| " + " | ".join(columns) + " |", "|---:" * len(columns) + "|"]
    for i, (key, size) in enumerate(zip(keys, sizes, strict=True)):
        cells = [str(key)]
        for each in filter(None, (ours, theirs)):
            rate = size.sequences * size.rows / each[i]
            cells += [f"{each[i] * 1e3:.1f}", f"{each[i] / each[0]:.2f}", f"{rate:.0f}"]
        if theirs:
            cells.append(f"{theirs[i] / ours[i]:.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="hub id, folder or GGUF file")
    parser.add_argument("--dtype", default="auto", help="of the weights, as for ridgeline generate")
    parser.add_argument("--quantize", help="int8 or int4: round the weights")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8, 12, 16], help="rows of a pass"
    )
    parser.add_argument(
        "--prefill", type=int, nargs="+", default=[64, 512], help="lengths of prompts"
    )
    parser.add_argument(
        "--contexts",
        type=int,
        nargs="+",
        default=[128, 1024, 4096, 8192],
        help="tokens in the cache",
    )
    parser.add_argument(
        "--batches",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8, 16, 32],
        help="sequences decoded at once",
    )
    parser.add_argument("--rounds", type=int, default=7, help="the median of which counts")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--out", type=Path, help="results/forward-MODEL.json")
    args = parser.parse_args()
    set_threads(args.threads)
    loaded = load_model(args.model, args.dtype, quantize=args.quantize)
    most = max(args.contexts) + max(*args.rows, *args.prefill, *args.batches)
    engines = {"ridgeline": Ridgeline(loaded.model, most).seconds}
    versions = {}
    as_it_is = args.model.endswith(".gguf") and (args.dtype, args.quantize) == ("auto", None)
    if as_it_is and LLAMACPP.exists():
        peer = LlamaCpp(Path(args.model), torch.get_num_threads(), most)
        engines["llama.cpp"], versions["llama-cpp-python"] = peer.seconds, peer.version
    plan = {
        "Rows of one sequence": (
            "rows",
            args.rows,
            lambda n: Pass(1, n, CONTEXT),
        ),
        "Prefill": ("tokens", args.prefill, lambda n: Pass(1, n, 0)),
        "Sequences with a row each": (
            "batch",
            args.batches,
            lambda n: Pass(n, 1, CONTEXT),
        ),
        "Context before one row": ("context", args.contexts, lambda n: Pass(1, 1, n)),
        "Context before eight rows": ("context", args.contexts, lambda n: Pass(1, 8, n)),
    }
    source = provenance(vars(args))
    source["versions"] |= versions
    report: dict[str, Any] = {"provenance": source, "computes": loaded.model.computes}
    text = [
        f"# A forward pass of {loaded.name}",
        "",
        f"{loaded.model.computes}; medians; {CONTEXT} tokens before the rows where not said.",
    ]
    for title, (unit, keys, size) in plan.items():
        sizes = [size(key) for key in keys]
        seconds = take_turns(sizes, engines, 2 if unit == "tokens" else args.rounds)
        report[title] = {unit: keys, "seconds": seconds}
        text.append(table(title, unit, keys, sizes, seconds))
        print(text[-1], flush=True)
    text += ["", "```json", json.dumps(source, indent=2), "```", ""]
    out = args.out or HERE / "results" / f"forward-{loaded.name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n")
    out.with_suffix(".md").write_text("\n".join(text))


if __name__ == "__main__":
    main()
