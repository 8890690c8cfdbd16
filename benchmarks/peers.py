"""Ridgeline beside other engines: same machine, same prompts, greedy, one request at a time.

Every engine runs in a process of its own with its models loaded once, one engine after the other,
the whole list once per repeat. A finished run is kept under `--work` and not run again for the
same arguments and code. An engine that is missing or fails is reported with its reason.
"""

import argparse
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from peers_report import add_ratios, cell, markdown, median, summarise
from ridgeline.bench.prompts import SHIPPED
from ridgeline.provenance import provenance

HERE = Path(__file__).parent
ROOT = HERE.parent
WORKERS = HERE / "peers"
ENVIRONMENTS = ROOT / ".venv-peers"
CODE_SUFFIXES = (".py", ".cpp", ".h", ".hpp", ".so")
DRAFT_TOKENS = 4  # where an engine wants a constant number of drafted tokens


@dataclass(frozen=True)
class Engine:
    """One row of the table: a worker in one of its modes, the first of a worker being plain."""

    name: str
    worker: str
    mode: str
    weights: str = "dense"
    """of Ridgeline's models: "dense", "gguf" (as the files are), "gguf drafter" (only that one)"""

    @property
    def python(self) -> Path:
        """The interpreter of the environment that the worker needs."""
        if self.worker in ("ridgeline", "transformers"):
            return Path(sys.executable)
        return ENVIRONMENTS / self.worker / "bin" / "python"

    @property
    def plain(self) -> str:
        """Name of the same engine without drafts."""
        return f"{self.worker}-4bit-plain" if self.weights == "gguf" else f"{self.worker}-plain"

    @property
    def reads_gguf(self) -> bool:
        """Whether it is given the GGUF files, not the dense weights made from them."""
        return self.worker in ("ridgeline", "llamacpp")

    def code(self) -> Iterable[Path]:
        """The files whose change makes an earlier run stale."""
        yield from (WORKERS / "worker.py", WORKERS / f"run_{self.worker}.py")
        if self.worker == "ridgeline":
            for folder in (ROOT / "src", ROOT / "native"):
                yield from sorted(p for p in folder.rglob("*") if p.suffix in CODE_SUFFIXES)


ENGINES = {
    engine.name: engine
    for engine in (
        Engine("ridgeline-plain", "ridgeline", "none"),
        Engine("ridgeline-ngram", "ridgeline", "ngram"),
        Engine("ridgeline-draft", "ridgeline", "draft"),
        Engine("ridgeline-draft-4bit", "ridgeline", "draft", "gguf drafter"),
        Engine("ridgeline-4bit-plain", "ridgeline", "none", "gguf"),
        Engine("ridgeline-4bit-ngram", "ridgeline", "ngram", "gguf"),
        Engine("ridgeline-4bit-draft", "ridgeline", "draft", "gguf"),
        Engine("ridgeline-4bit-ngram-draft", "ridgeline", "ngram+draft", "gguf"),
        Engine("transformers-plain", "transformers", "plain"),
        Engine("transformers-assisted", "transformers", "assisted"),
        Engine("transformers-assisted-constant", "transformers", "assisted-constant"),
        Engine("transformers-lookup", "transformers", "lookup"),
        Engine("llamacpp-plain", "llamacpp", "plain"),
        Engine("vllm-plain", "vllm", "plain"),
        Engine("vllm-draft", "vllm", "draft"),
    )
}


class WorkerError(Exception):
    """A worker is missing, failed, or took too long; the message says which."""


def run_worker(python: Path, script: str, job: dict, work: Path, name: str, args) -> dict:
    """Run a worker script on a job and return its result; its output goes to a log file."""
    if not python.is_file():
        raise WorkerError("not installed: run benchmarks/peers/setup.sh")
    job_file, result, log = (work / f"{name}.{end}" for end in ("job.json", "result.json", "log"))
    job_file.write_text(json.dumps(job))
    result.unlink(missing_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
    command = [python, WORKERS / script, job_file, result]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )
        try:
            code = process.wait(args.timeout)
        except subprocess.TimeoutExpired:
            raise WorkerError(f"took longer than {args.timeout:g} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with what the worker started
                process.wait()
    if code:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
        last = next((line for line in reversed(lines) if line), "no output")
        ended = f"ended by signal {-code}" if code < 0 else f"exit code {code}: {last[:300]}"
        raise WorkerError(f"{ended} (see {log.name})")
    return json.loads(result.read_text())


def measure(engine: Engine, job: dict, number: int, args) -> dict:
    """One run of one engine over all prompts, or the kept result of the same run."""
    digest = hashlib.sha256(json.dumps(job, sort_keys=True).encode())
    for path in engine.code():
        digest.update(path.read_bytes())
    name = f"{engine.name}.{number}"
    part_file = args.work / f"{name}.part.json"
    if part_file.is_file() and not args.fresh:
        part = json.loads(part_file.read_text())
        if part["fingerprint"] == digest.hexdigest():
            return part
    busy = psutil.cpu_percent(interval=1.0)
    start = time.perf_counter()
    part = run_worker(engine.python, f"run_{engine.worker}.py", job, args.work, name, args)
    spent = sum(r["seconds_to_first_token"] + r["decode_seconds"] for r in part["records"])
    part["start_up_seconds"] = time.perf_counter() - start - spent
    part["busy_before_percent"] = busy
    part["fingerprint"] = digest.hexdigest()
    part_file.write_text(json.dumps(part))
    return part


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True, help="GGUF file of the target model")
    parser.add_argument("--draft", type=Path, required=True, help="GGUF file of the draft model")
    parser.add_argument(
        "--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="which engines to run"
    )
    parser.add_argument(
        "--prompt-file",
        type=Path,
        default=SHIPPED,
        help="an object with a prompt a line",
    )
    parser.add_argument("--prompts", type=int, help="only the first N prompts")
    parser.add_argument("--tokens", type=int, default=160, help="tokens to write for each prompt")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each engine")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of unpacked weights"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each engine")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for one engine's run")
    parser.add_argument("--fresh", action="store_true", help="run again what is already measured")
    parser.add_argument(
        "--work",
        type=Path,
        default=ROOT / "build" / "peers",
        help="folder of the engines and of single runs",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=HERE / "results" / "peers.json",
        help="figures; a report goes beside",
    )
    args = parser.parse_args()
    for path in (args.target, args.draft):
        if not path.is_file():
            parser.error(f"no such file: {path}")
    return args


def command() -> str:
    """What was typed, without this machine's folders."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return shlex.join(["python", "benchmarks/peers.py", *words])


def main() -> None:
    args = parse()
    args.work.mkdir(parents=True, exist_ok=True)
    prompts = [json.loads(line) for line in args.prompt_file.read_text().splitlines()]
    prompts = prompts[: args.prompts]
    job = {
        "target": str(args.target.resolve()),
        "draft": str(args.draft.resolve()),
        "dtype": args.dtype,
        "threads": args.threads,
        "tokens": args.tokens,
        "draft_tokens": DRAFT_TOKENS,
        "texts": [prompt["prompt"] for prompt in prompts],
    }
    try:
        dense = run_worker(
            Path(sys.executable),
            "prepare.py",
            job,
            args.work,
            "prepare",
            args,
        )
    except WorkerError as error:
        sys.exit(f"peers: the dense weights could not be made: {error}")
    runs: dict[str, list[dict]] = {name: [] for name in args.engines}
    failed: dict[str, str] = {}
    for number in range(args.repeat):
        for name in args.engines:
            if name in failed:
                continue
            engine = ENGINES[name]
            paths = {key: job[key] for key in ("target", "draft")} if engine.reads_gguf else {}
            if engine.worker == "ridgeline":
                paths["weights"] = engine.weights
            try:
                run = measure(engine, job | dense | paths | {"mode": engine.mode}, number, args)
            except WorkerError as error:
                failed[name] = str(error)
                print(f"{name}: did not run: {error}", file=sys.stderr)
                continue
            runs[name].append(run)
            rate = median(record["tokens_per_s"] for record in run["records"])
            print(f"{name}, run {number + 1}: {cell(rate)} tokens/s", file=sys.stderr, flush=True)
    engines = {}
    for name in args.engines:
        if name not in failed:
            plain = ENGINES[name].plain
            engines[name] = summarise(runs[name], runs.get(plain) if name != plain else None)
    add_ratios(engines)
    report = {
        "command": command(),
        "provenance": provenance(vars(args)),
        "prompts": prompts,
        "engines": engines,
        "failed": failed,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=2) + "\n")
    args.out.with_suffix(".md").write_text(markdown(report))
    print(args.out.with_suffix(".md").read_text())


def stop(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)  # so that the running worker ends too
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("peers: interrupted; the same command goes on from the last finished run")
