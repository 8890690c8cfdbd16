"""Where a step's time goes: the models' forward passes, and everything around them.

"Outside" is drafting without the draft model's own passes, packing, verification, commit,
detokenisation and streaming: whatever is not inside a forward pass of the target or the drafter.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ridgeline import LLM, SamplingParams
from ridgeline.bench.prompts import SHIPPED
from ridgeline.core.batch import Batch
from ridgeline.model.load import load_model
from ridgeline.model.native import NativeTarget
from ridgeline.model.target import Target, TargetOutput
from ridgeline.model.torch_target import TorchTarget
from ridgeline.provenance import provenance

CLASSES: tuple[Any, ...] = (TorchTarget, NativeTarget)
HERE = Path(__file__).parent


def measure(llm: LLM, prompts: Sequence[str], params: SamplingParams) -> dict[str, Any]:
    """Decode steps of each prompt alone; the prompt's own pass is left out."""
    inside: list[float] = []
    forwards = {target: target.forward for target in CLASSES}

    def timed(target: Target, batch: Batch, features: Sequence[int] = ()) -> TargetOutput:
        start = time.perf_counter()
        try:
            return forwards[type(target)](target, batch, features)
        finally:
            inside.append(time.perf_counter() - start)

    steps, shares, tokens = [], [], 0
    for target in CLASSES:
        target.forward = timed
    try:
        for prompt in prompts:
            request = llm.request([{"role": "user", "content": prompt}], params)
            before = None
            for event in llm.stream(request):
                now = time.perf_counter()
                if before is not None:
                    steps.append(now - before)
                    shares.append(1 - sum(inside) / (now - before))
                    tokens += len(event.pieces)
                inside.clear()
                before = now
    finally:
        for target, forward in forwards.items():
            target.forward = forward
    return {
        "steps": len(steps),
        "tokens_per_step": round(tokens / len(steps), 2),
        "step_ms": round(1000 * median(steps), 2),
        "outside_ms": round(1000 * median(s * t for s, t in zip(shares, steps, strict=True)), 2),
        "outside_share": round(median(shares), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="hub id, folder or GGUF file")
    parser.add_argument(
        "--drafters", nargs="+", default=["none", "ngram"], help="NAME or NAME:ARGUMENT"
    )
    parser.add_argument("--dtype", default="auto", help="of the weights, as for ridgeline generate")
    parser.add_argument("--depth", type=int, default=4, help="longest path of drafted tokens")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to write for each prompt")
    parser.add_argument("--prompts", type=int, default=3, help="how many of those that ship")
    parser.add_argument(
        "--temperature", type=float, nargs="+", default=[0.0, 1.0], help="each is measured"
    )
    parser.add_argument(
        "--out", type=Path, default=HERE / "results" / "overhead.json", help="where the figures go"
    )
    args = parser.parse_args()
    lines = SHIPPED.read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines[: args.prompts]]
    loaded, results = load_model(args.model, args.dtype), []
    for drafter in args.drafters:
        llm = LLM(loaded, drafter=drafter, draft_dtype=args.dtype, depth=args.depth, policy="fixed")
        for temperature in args.temperature:
            params = SamplingParams(temperature=temperature, seed=0, max_tokens=args.tokens)
            name = drafter.partition(":")[0]
            results.append(
                {"drafter": name, "temperature": temperature} | measure(llm, prompts, params)
            )
            print(json.dumps(results[-1]), flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(
        json.dumps({"provenance": provenance(vars(args)), "results": results}, indent=2)
    )


if __name__ == "__main__":
    main()
