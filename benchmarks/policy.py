"""Policies side by side: tokens per second by batch size, plain decoding beside them.

Four engines on one loaded target take turns over the same texts: without drafts, and with the
policies `fixed`, `table` and `goodput`. What counts is `goodput` against plain and against `fixed`,
the lower of the two medians over the rounds (the better of the two in each round would be whichever
the noise favoured). The article's failure is `fixed` below plain in large batches.
"""

import argparse
import json
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from ridgeline import LLM, SamplingParams
from ridgeline.bench.measure import PLAIN, Contender, Load, Side, measure, requests
from ridgeline.bench.prompts import SHIPPED, Prompt, encode, read_prompts
from ridgeline.config import EngineConfig
from ridgeline.llm import Request
from ridgeline.model.load import LoadedModel, load_model
from ridgeline.model.threads import set_threads
from ridgeline.provenance import portable, provenance

HERE = Path(__file__).parent
POLICIES = ("fixed", "table", "goodput")
RANDOM_PROMPTS, RANDOM_LENGTH = 10, 64
WORKLOADS = {"mixed, T = 0": 0.0, "mixed, T = 1": 1.0, "random, T = 2": 2.0}
"""Temperatures. The mixed prompts are those of `ridgeline bench`; the random ones are random
tokens, continued so hot that what follows is hardly ever guessed."""


def prompts_of(loaded: LoadedModel, workload: str, tokens: int) -> list[Prompt]:
    """Every answer has `tokens` tokens, so that the batch stays as large as it is said to be."""
    if workload.startswith("random"):
        rng = random.Random(0)
        vocab = range(1, loaded.vocab_size)
        asked = [rng.choices(vocab, k=RANDOM_LENGTH) for _ in range(RANDOM_PROMPTS)]
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        return [Prompt("random", Request(prompt, params)) for prompt in asked]
    llm = LLM(loaded, kv_tokens=4096)
    return [
        replace(p, request=replace(p.request, params=replace(p.request.params, ignore_eos=True)))
        for p in encode(llm, read_prompts(SHIPPED), SHIPPED, tokens)
    ]


def figures(names: Sequence[str], rounds: Sequence[Sequence[Side]]) -> dict[str, Any]:
    """Of one batch size: rates by engine, and what `goodput` makes of it."""
    rates = {
        name: [sides[i].emitted / sides[i].seconds for sides in rounds]
        for i, name in enumerate(names)
    }
    ratios = {
        name: [g / r for g, r in zip(rates["goodput"], rates[name], strict=True)]
        for name in ("plain", "fixed")
    }
    texts = [[text.tokens for text in side.texts] for side in rounds[0]]
    counts = {
        name: [text.speculation for text in side.texts]
        for name, side in zip(names, rounds[0], strict=True)
    }
    return {
        "tokens_per_s": {name: median(values) for name, values in rates.items()},
        "speed_up": {
            name: median(r / p for r, p in zip(values, rates["plain"], strict=True))
            for name, values in rates.items()
        },
        "goodput_to_best": min(median(values) for values in ratios.values()),
        "goodput_by_round": ratios,
        "drafted": {name: sum(c.drafted for c in each) for name, each in counts.items()},
        "accepted": {name: sum(c.accepted for c in each) for name, each in counts.items()},
        "identical": all(text == texts[0] for text in texts),
    }


def table(report: dict[str, Any]) -> str:
    lines = ["# Policies", "", f"{report['about']}; medians; plain decoding is 1.", ""]
    for workload in dict.fromkeys(cell["workload"] for cell in report["cells"]):
        lines += [
            f"## {workload}",
            "",
            "| batch | plain, tokens/s | fixed | table | goodput | goodput to the better of plain "
            "and fixed | drafted a token: fixed, goodput | accepted: fixed, goodput |",
            "|---" * 8 + "|",
        ]
        for cell in sorted(report["cells"], key=lambda cell: cell["batch"]):
            if cell["workload"] == workload:
                speeds = [f"{cell['speed_up'][name]:.2f}x" for name in POLICIES]
                drafted, accepted = cell["drafted"], cell["accepted"]
                shares = [f"{drafted[name] / cell['tokens']:.2f}" for name in ("fixed", "goodput")]
                kept = [
                    f"{accepted[name] / drafted[name]:.2f}" if drafted[name] else "-"
                    for name in ("fixed", "goodput")
                ]
                cells = [str(cell["batch"]), f"{cell['tokens_per_s']['plain']:.1f}", *speeds]
                cells += [f"{cell['goodput_to_best']:.2f}", ", ".join(shares), ", ".join(kept)]
                lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    same = all(cell["identical"] for cell in report["cells"])
    lines += [f"All texts the same with every policy: {'yes' if same else 'no'}.", ""]
    lines += ["```json", json.dumps(report["provenance"], indent=2), "```", ""]
    return "\n".join(lines)


def draw(path: Path, report: dict[str, Any]) -> None:
    """Speed-up over plain decoding by batch size, a panel for each workload."""
    from matplotlib.figure import Figure

    workloads = list(dict.fromkeys(cell["workload"] for cell in report["cells"]))
    figure = Figure(figsize=(4.5 * len(workloads), 3.6), layout="constrained")
    panels = figure.subplots(1, len(workloads), squeeze=False, sharey=True)[0]
    for panel, workload in zip(panels, workloads, strict=True):
        cells = [cell for cell in report["cells"] if cell["workload"] == workload]
        cells.sort(key=lambda cell: cell["batch"])
        batches = [cell["batch"] for cell in cells]
        for name in POLICIES:
            panel.plot(batches, [c["speed_up"][name] for c in cells], marker="o", label=name)
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set_xscale("log", base=2)
        panel.set_xticks(batches, map(str, batches))
        panel.set_xlabel("texts at once")
        panel.set_title(workload)
    panels[0].set_ylabel("tokens/s, plain decoding = 1")
    panels[0].legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="hub id, folder or GGUF file")
    parser.add_argument("--dtype", default="auto", help="of the weights, as for ridgeline generate")
    parser.add_argument("--drafter", default="ngram", help="NAME or NAME:ARGUMENT")
    parser.add_argument("--depth", type=int, default=EngineConfig.depth, help="of all policies")
    parser.add_argument(
        "--confidence",
        type=float,
        default=EngineConfig.confidence,
        help="of all policies; with 0 a head drafts all that it may, also where it knows nothing",
    )
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="texts at once"
    )
    parser.add_argument(
        "--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS), help="of these"
    )
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3, help="the median of which counts")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument(
        "--out",
        type=Path,
        default=HERE / "results" / "policy.json",
        help="figures; the same command goes on where it was interrupted; a table goes beside",
    )
    parser.add_argument("--plot", type=Path, help="draw speed-up against batch size, such as x.svg")
    args = parser.parse_args()
    set_threads(args.threads)
    loaded = load_model(args.model, args.dtype)
    grid = {"batches", "workloads", "out", "plot"}
    fixed = {name: portable(v) for name, v in vars(args).items() if name not in grid}
    report: dict[str, Any] = {"arguments": fixed, "cells": []}
    if args.out.exists():
        report = json.loads(args.out.read_text())
        if report["arguments"] != fixed:
            parser.error(f"{args.out} has figures of other arguments; give --out another file")
    drafts = f"drafter {fixed['drafter']}, confidence {args.confidence:g}"
    report["about"] = f"{loaded.name}, {loaded.model.computes}; {drafts}"
    drafted = Contender(
        args.drafter, depth=args.depth, nodes=args.depth, confidence=args.confidence
    )
    contenders = [Contender(PLAIN), *(replace(drafted, policy=policy) for policy in POLICIES)]
    names = ("plain", *POLICIES)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for workload in args.workloads:
        prompts = prompts_of(loaded, workload, args.tokens)
        for batch in args.batches:
            place = {"workload": workload, "batch": batch}
            if any(place.items() <= cell.items() for cell in report["cells"]):
                continue
            load = Load(WORKLOADS[workload], batch)
            asked = requests(prompts, load, seed=0)
            busy = os.getloadavg()
            rounds = [
                measure(loaded, contenders, load, asked, number, lambda: None)
                for number in range(args.rounds)
            ]
            written = {"tokens": len(asked) * args.tokens, "load_average": busy}
            report["cells"].append(place | written | figures(names, rounds))
            report["provenance"] = provenance(vars(args))
            part = args.out.with_suffix(".part")
            part.write_text(json.dumps(report, indent=2) + "\n")
            os.replace(part, args.out)  # whole or not at all
            speeds = report["cells"][-1]["speed_up"]
            print(workload, batch, {name: round(s, 2) for name, s in speeds.items()}, flush=True)
    args.out.with_suffix(".md").write_text(table(report))
    if args.plot:
        draw(args.plot, report)
    print(args.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
