"""Ridgeline through its own command, as a user starts it."""

import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from worker import WARM_UP_TOKENS, record


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    dtype = "auto" if job["weights"] == "gguf" else job["dtype"]
    dense = job["weights"] == "dense"
    draft_dtype, draft_quantize = (job["dtype"], "none") if dense else ("auto", "auto")
    drafter = job["mode"].replace("draft", f"model:{job['draft']}")
    lines = [{"prompt": job["texts"][0], "max_tokens": WARM_UP_TOKENS}]
    lines += [{"prompt": text} for text in job["texts"]]
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as prompts:
        prompts.writelines(json.dumps(line) + "\n" for line in lines)
        prompts.flush()
        done = subprocess.run(
            [
                *(sys.executable, "-m", "ridgeline", "generate", "--json", "--chat"),
                *("--prompt-file", prompts.name, "--model", job["target"], "--drafter", drafter),
                *("--dtype", dtype, "--draft-dtype", draft_dtype),
                *("--draft-quantize", draft_quantize),
                *("--threads", str(job["threads"])),
                *("--max-tokens", str(job["tokens"]), "--temperature", "0", "--batch", "1"),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
    if done.returncode:
        sys.exit(done.returncode)  # its own message is the last line of the log
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    # All prompts arrive at once and run one after the other: a first token's time counts from the
    # end of the text before.
    ends = [answer["seconds_to_first_token"] + answer["decode_seconds"] for answer in answers]
    records = [
        record(
            prompt_tokens=answer["prompt_tokens"],
            token_ids=answer["token_ids"],
            first_tokens=1,
            steps=answer["steps"],
            seconds_to_first_token=answer["seconds_to_first_token"] - end_before,
            decode_seconds=answer["decode_seconds"],
        )
        for answer, end_before in zip(answers[1:], ends, strict=False)
    ]
    versions = {name: version(name) for name in ("ridgeline", "torch", "transformers")}
    Path(sys.argv[2]).write_text(json.dumps({"versions": versions, "records": records}))


if __name__ == "__main__":
    main()
