"""What `ridgeline plan` predicts from this machine's calibration, beside what is then measured.

Passes: the model over a grid of batch sizes, depths and contexts. Speed-ups: the engine with a real
drafter at every depth and batch size, beside plain decoding. The acceptance that a speed-up is
predicted with is that of the deepest drafts at the smallest batch; the rest is the calibration,
which never sees this model. What is finished is kept: the same command goes on where it stopped.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from ridgeline import LLM
from ridgeline.bench.figures import figures_of
from ridgeline.bench.measure import PLAIN, Contender, Load, Round, measure, requests
from ridgeline.bench.prompts import SHIPPED, Prompt, encode, read_prompts
from ridgeline.engine import BLOCK_SIZE
from ridgeline.model.device import choose_device
from ridgeline.model.fetch import demo_model
from ridgeline.model.load import LoadedModel, load_model
from ridgeline.model.threads import set_threads
from ridgeline.plan import planner as planning
from ridgeline.plan.acceptance import Range, of_run
from ridgeline.plan.calibrate import calibrated
from ridgeline.plan.local import local_curve, runs_natively
from ridgeline.plan.passes import Pass, Passes
from ridgeline.plan.setup import Setup, Wanted, set_up
from ridgeline.provenance import moment, portable, provenance

HERE = Path(__file__).parent
AIMS = {"pass": 0.10, "plain step": 0.10, "speed-up": 0.15, "chosen depth": 0.05}
"""Largest median error; of the chosen depth, the largest loss to the best one."""


class Record:
    """Measurements by name, written after each one."""

    def __init__(self, path: Path, source: dict[str, Any], fresh: bool) -> None:
        self._path = path
        found = {} if fresh or not path.exists() else json.loads(path.read_text())
        if found and found["provenance"]["arguments"] != source["arguments"]:
            raise SystemExit(f"{path} has other arguments: give --fresh, or another --out")
        self.found = found or {"provenance": source, "measured": {}}

    def once(self, name: str, run: Callable[[], Any]) -> Any:
        """What is known by that name, else what `run` gives."""
        done = self.found["measured"]
        if name not in done:
            print(name, flush=True)
            done[name] = {**moment(), "value": run()}
            self.write()
        return done[name]["value"]

    def write(self) -> None:
        """The file, whole or not at all."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self.found, indent=1) + "\n")
        partial.replace(self._path)


def measured_passes(loaded: LoadedModel, sizes: list[Pass], most: int, rounds: int) -> list[float]:
    """Median seconds of each, every sequence with keys and values of its own."""
    passes = Passes(loaded.model, most + BLOCK_SIZE * max(size.sequences for size in sizes))
    return [sample.seconds for sample in passes.samples(sizes, rounds)]


def pass_rows(args: argparse.Namespace, setup: Setup, loaded: LoadedModel, record: Record) -> list:
    """Batch, depth, context, predicted and measured seconds of each pass of the grid."""
    device = choose_device("auto")
    calibration = calibrated(setup.shape.kinds, device, runs_natively(setup.shape, device))
    curve = local_curve(setup.shape, replace(calibration, step=0.0, sequence=0.0))
    rows = []
    for context in args.contexts:
        sizes = [Pass(batch, depth + 1, context) for batch in args.batches for depth in args.depths]
        most = max(size.sequences * (size.rows + context) for size in sizes)

        run = partial(measured_passes, loaded, sizes, most, args.rounds)
        for size, seconds in zip(sizes, record.once(f"passes {context}", run), strict=True):
            tokens = size.sequences * size.rows
            predicted = curve.seconds(tokens, size.sequences, context)
            rows.append((size.sequences, size.rows - 1, context, predicted, seconds))
    return rows


def prompts_of(loaded: LoadedModel, args: argparse.Namespace) -> list[Prompt]:
    """Those that ship; every answer has the same length, or batches would not stay full."""
    llm = LLM(loaded, kv_tokens=2048)
    prompts = encode(llm, read_prompts(SHIPPED)[: args.prompts], SHIPPED, args.tokens)
    return [
        replace(
            prompt,
            request=replace(prompt.request, params=replace(prompt.request.params, ignore_eos=True)),
        )
        for prompt in prompts
    ]


def measured_run(
    loaded: LoadedModel, contender: Contender, load: Load, prompts: list[Prompt], rounds: int
) -> dict[str, Any]:
    """The figures of one drafter under one load, as `ridgeline bench` has them."""
    asked, pair = requests(prompts, load, seed=0), (Contender(PLAIN), contender)
    found = [Round(*measure(loaded, pair, load, asked, n, lambda: None)) for n in range(rounds)]
    options = asdict(contender) | {"drafter": portable(contender.drafter)}
    return figures_of(found) | {"options": options}


def speed_rows(
    args: argparse.Namespace, setup: Setup, loaded: LoadedModel, record: Record
) -> tuple[list, list]:
    """Of plain steps and of drafts: what, predicted, measured; and each drafter's choices."""
    prompts = prompts_of(loaded, args)
    depths = [depth for depth in args.depths if depth]
    runs = {}
    for planned in (contender.planned for contender in setup.contenders):
        for batch in args.batches:
            load = Load(0.0, batch)
            for depth in depths:
                contender = Contender(planned.spec, depth=depth, nodes=depth, policy="fixed")
                run = partial(measured_run, loaded, contender, load, prompts, args.rounds)
                name = f"{planned.label} depth {depth} batch {batch}"
                runs[planned.spec, batch, depth] = record.once(name, run)
    plain, drafted = [], []
    for batch in args.batches:
        rates = [run["plain_tokens_per_s"] for key, run in runs.items() if key[1] == batch]
        plain.append((batch, setup.planner.plain(batch), batch / median(rates)))
    for contender in setup.contenders:
        spec = contender.planned.spec
        acceptance = of_run(runs[spec, min(args.batches), max(depths)])
        known = planning.Contender(contender.planned, Range(acceptance, acceptance, "measured"))
        for batch in args.batches:
            measured = {0: 1.0} | {d: runs[spec, batch, d]["speed_up"] for d in depths}
            choices = [setup.planner.choice(known, d, batch) for d in (0, *depths)]
            gains = {choice.depth: choice.middle for choice in choices[1:]}
            chosen = planning.best_of(choices).depth
            drafted.append((contender.planned.label, batch, gains, measured, chosen))
    return plain, drafted


def error(predicted: float, measured: float) -> float:
    return abs(predicted / measured - 1)


def table(*rows: tuple) -> list[str]:
    head, *rest = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return ["", head, "|" + "---:|" * len(rows[0]), *rest]


def summary(passes: list, plain: list, drafted: list) -> list[str]:
    """The errors beside the aims."""
    errors = {
        "pass": [error(*row[-2:]) for row in passes],
        "plain step": [error(*row[-2:]) for row in plain],
        "speed-up": [error(c[d], m[d]) for _, _, c, m, _ in drafted for d in c],
        "chosen depth": [1 - m[chosen] / max(m.values()) for _, _, _, m, chosen in drafted],
    }
    lines = [("what", "figures", "median error", "mean", "largest", "aim, of the median", "met")]
    for name, each in errors.items():
        if each:
            met = "yes" if median(each) <= AIMS[name] else "no"
            cells = (f"{100 * f(each):.1f} %" for f in (median, mean, max))
            lines.append((name, len(each), *cells, f"{100 * AIMS[name]:.0f} %", met))
    return [
        *table(*lines),
        "",
        "Of the chosen depth: the speed-up lost to the depth that turned out best.",
    ]


def report(
    name: str, setup: Setup, source: dict[str, Any], passes: list, plain: list, drafted: list
) -> str:
    lines = [
        f"# Predicted and measured: {name}",
        "",
        f"{' and '.join(setup.shape.kinds)}; predicted from the calibration of this machine, which "
        "never ran the model.",
        *summary(passes, plain, drafted),
        *["", "## Plain steps of the engine, ms"],
        *table(
            ("batch", "predicted", "measured"),
            *((b, f"{1e3 * p:.2f}", f"{1e3 * m:.2f}") for b, p, m in plain),
        ),
    ]
    for spec in dict.fromkeys(row[0] for row in drafted):
        rows = [row[1:] for row in drafted if row[0] == spec]
        depths = list(rows[0][1])
        lines += ["", f"## Speed-up of {spec}, predicted / measured"]
        lines += table(
            ("batch", *(f"depth {d}" for d in depths), "chosen", "best"),
            *(
                (
                    batch,
                    *(f"{choices[d]:.2f} / {measured[d]:.2f}" for d in depths),
                    chosen,
                    max(measured, key=measured.__getitem__),
                )
                for batch, choices, measured, chosen in rows
            ),
        )
    lines += ["", "## Passes, ms, predicted / measured"]
    batches = list(dict.fromkeys(row[0] for row in passes))
    found = {row[:3]: f"{1e3 * row[3]:.1f} / {1e3 * row[4]:.1f}" for row in passes}
    lines += table(
        ("context", "depth", *(f"batch {batch}" for batch in batches)),
        *(
            (context, depth, *(found[batch, depth, context] for batch in batches))
            for context, depth in dict.fromkeys((row[2], row[1]) for row in passes)
        ),
    )
    return "\n".join([*lines, "", "```json", json.dumps(source, indent=2), "```", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(demo_model()), help="hub id, folder or GGUF file")
    parser.add_argument(
        "--drafter", nargs="+", default=["ngram"], help="NAME or model:PATH, of which speed-ups"
    )
    parser.add_argument(
        "--depths", type=int, nargs="+", default=[*range(9)], help="of drafts; 0: plain"
    )
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="texts at once"
    )
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[128, 512, 1024, 4096], help="of the passes"
    )
    parser.add_argument("--prompts", type=int, default=10, help="of the ten that ship")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3, help="the median of which counts")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--fresh", action="store_true", help="forget what is finished")
    parser.add_argument("--out", type=Path, help="results/plan-MODEL.json")
    args = parser.parse_args()
    set_threads(args.threads)
    loaded = load_model(args.model)
    middle = mean(len(p.request.tokens) for p in prompts_of(loaded, args)) + args.tokens / 2
    wanted = Wanted(
        model=args.model,
        drafters=tuple(args.drafter),
        depth=max(args.depths),
        context=round(middle),
        acceptance="0.5",  # replaced by what is measured
    )
    setup = set_up(wanted, print)
    source = provenance({key: value for key, value in vars(args).items() if key != "fresh"})
    out = args.out or HERE / "results" / f"plan-{loaded.name}.json"
    record = Record(out, source, args.fresh)
    passes = pass_rows(args, setup, loaded, record)
    plain, drafted = speed_rows(args, setup, loaded, record)
    text = report(loaded.name, setup, record.found["provenance"], passes, plain, drafted)
    out.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
