"""The report of peers.py: medians, ratios and the Markdown tables."""

import json
import statistics
from collections.abc import Collection, Iterable

# What rates are compared with: the fastest of each.
BASES = {
    "transformers plain": ("transformers-plain",),
    "transformers assisted": ("transformers-assisted", "transformers-assisted-constant"),
    "llama.cpp plain": ("llamacpp-plain",),
    "vLLM plain": ("vllm-plain",),
    "vLLM draft model": ("vllm-draft",),
}
BUSY_PERCENT = 10  # processor use before a run from which the report warns


def median(values: Iterable[float | None]) -> float | None:
    """The median of those that could be measured (an answer of one token has no rate)."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def summarise(runs: list[dict], plain: list[dict] | None) -> dict:
    """One engine's medians over its runs, then over the prompts; `plain`: its undrafted runs."""
    by_prompt = list(zip(*(run["records"] for run in runs), strict=True))
    summary = {
        "versions": runs[0]["versions"],
        "start_up_seconds": median(run["start_up_seconds"] for run in runs),
        "busy_before_percent": max(run["busy_before_percent"] for run in runs),
    }
    for field in ("tokens_per_s", "tokens_per_step", "seconds_to_first_token"):
        per_prompt = [median(record[field] for record in records) for records in by_prompt]
        summary[field] = median(per_prompt)
        summary[f"{field}_by_prompt"] = per_prompt
    summary["prompt_tokens"] = [records[0]["prompt_tokens"] for records in by_prompt]
    if plain:
        expected = [record["token_ids"] for record in plain[0]["records"]]
        summary["same_as_plain"] = [
            all(record["token_ids"] == ids for record in records)
            for records, ids in zip(by_prompt, expected, strict=True)
        ]
    return summary


def add_ratios(engines: dict[str, dict]) -> None:
    """Rates relative to each of `BASES` that was measured."""
    bases = {
        base: max(
            (engines[name]["tokens_per_s"] or 0.0 for name in names if name in engines), default=0
        )
        for base, names in BASES.items()
    }
    for summary in engines.values():
        rate = summary["tokens_per_s"]
        summary["ratios"] = {n: rate / base if rate and base else None for n, base in bases.items()}


def cell(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def shown_versions(summary: dict) -> str:
    return ", ".join(f"{name} {version}" for name, version in summary["versions"].items())


def table(title: str, columns: Collection[str], rows: dict[str, Iterable[str]]) -> list[str]:
    """Lines of a titled table with a row for each engine."""
    return [
        "",
        title,
        "",
        f"| engine | {' | '.join(columns)} |",
        "|---" * (len(columns) + 1) + "|",
        *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()),
    ]


def markdown(report: dict) -> str:
    """The report as two tables, with the failures and what it ran on."""
    source, prompts, engines = report["provenance"], report["prompts"], report["engines"]
    lines = [
        "# Ridgeline and its peers",
        "",
        f"`{report['command']}`",
        "",
        "Greedy, one request at a time. Tokens/s: decoding alone, from the first token on; medians",
        "over the prompts (and the repeats). Start-up: imports, loading, warm-up.",
        "",
        "| engine | tokens/s | tokens per step | first token, s | start-up, s |"
        " same tokens as its plain run |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in engines.items():
        same = row.get("same_as_plain")
        cells = [
            name,
            cell(row["tokens_per_s"]),
            cell(row["tokens_per_step"], 2),
            cell(row["seconds_to_first_token"], 2),
            cell(row["start_up_seconds"]),
            f"{sum(same)} of {len(same)}" if same else "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    for name, reason in report["failed"].items():
        lines.append(f"| {name} | did not run: {reason.replace('|', '/')} |")
    ratios = {
        name: [cell(row["ratios"][base], 2) for base in BASES] for name, row in engines.items()
    }
    lines += table("Tokens/s as a multiple of another engine's:", BASES, ratios)
    rates = {name: map(cell, row["tokens_per_s_by_prompt"]) for name, row in engines.items()}
    lines += table("Tokens/s of each prompt:", [prompt["kind"] for prompt in prompts], rates)
    busy = {name: row["busy_before_percent"] for name, row in engines.items()}
    noisy = [f"{name} ({value:.0f} %)" for name, value in busy.items() if value > BUSY_PERCENT]
    if noisy:
        lines += ["", f"**Not an idle machine**: processor use just before: {', '.join(noisy)}."]
    lines += ["", "Versions: " + "; ".join(sorted({shown_versions(r) for r in engines.values()}))]
    lines += ["", "```json", json.dumps(source, indent=2), "```", ""]
    return "\n".join(lines)
