"""What every peer worker shares; standard library only, for it runs in each peer's environment.

A worker is started as `python run_NAME.py JOB RESULT`. JOB is a JSON object: `mode`, `target` and
`draft` (a GGUF file or a folder, as the engine reads), `dtype`, `threads`, `tokens`,
`draft_tokens`, `prompts` (lists of token ids), `texts` (the same prompts as plain text) and
`end_tokens`. RESULT receives `versions` and one record a prompt.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

WARM_UP_TOKENS = 16


class Recorder:
    """Notes when each step of one request delivered its tokens."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.steps: list[tuple[float, int]] = []
        self.token_ids: list[int] = []

    def put(self, tokens: Sequence[int]) -> None:
        """Take what one step delivered."""
        self.token_ids.extend(tokens)
        self.steps.append((time.perf_counter() - self.start, len(tokens)))

    def record(self, prompt_tokens: int) -> dict:
        """The request's figures, once it is done."""
        first, first_tokens = self.steps[0]
        return record(
            prompt_tokens=prompt_tokens,
            token_ids=self.token_ids,
            first_tokens=first_tokens,
            steps=len(self.steps) - 1,
            seconds_to_first_token=first,
            decode_seconds=self.steps[-1][0] - first,
        )


def record(
    *,
    prompt_tokens: int,
    token_ids: list[int],
    first_tokens: int,
    steps: int,
    seconds_to_first_token: float,
    decode_seconds: float,
) -> dict:
    """One request's figures.

    Tokens that came with the prompt's own step (`first_tokens`: one, or more where an engine
    verifies drafts in its prefill) are not decoded, so the rate leaves them out.
    """
    decoded = len(token_ids) - first_tokens
    measured = decoded > 0 and steps > 0
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(token_ids),
        "seconds_to_first_token": seconds_to_first_token,
        "decode_seconds": decode_seconds,
        "tokens_per_s": decoded / decode_seconds if measured else None,
        "tokens_per_step": decoded / steps if measured else None,
        "token_ids": token_ids,
    }


def serve(load: Callable[[dict], tuple[Callable, dict]]) -> None:
    """Load the models once, warm up, then measure each prompt of the job.

    `load(job)` returns `generate(prompt_ids, max_tokens, recorder)` and the versions to report.
    """
    job = json.loads(Path(sys.argv[1]).read_text())
    generate, versions = load(job)
    generate(job["prompts"][0], WARM_UP_TOKENS, Recorder())
    records = []
    for prompt in job["prompts"]:
        recorder = Recorder()
        generate(prompt, job["tokens"], recorder)
        records.append(recorder.record(len(prompt)))
    Path(sys.argv[2]).write_text(json.dumps({"versions": versions, "records": records}))
