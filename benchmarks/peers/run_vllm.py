"""vLLM on the CPU: plain, or with a draft model."""

import os
import sys
from pathlib import Path

from worker import Recorder, serve


def load(job: dict):
    cores = sorted(os.sched_getaffinity(0))[: job["threads"]]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB; one request at a time
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # steps are timed here, in this process
    # Only now, for vLLM reads the environment as it is imported.
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    speculation = None
    if job["mode"] == "draft":
        speculation = {
            "method": "draft_model",
            "model": job["draft"],
            "num_speculative_tokens": job["draft_tokens"],
        }
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=job["target"],
            dtype=job["dtype"],
            max_model_len=max(map(len, job["prompts"])) + job["tokens"] + 64,
            max_num_seqs=1,
            enable_prefix_caching=False,
            enforce_eager=True,
            speculative_config=speculation,
        )
    )
    served = 0

    def generate(prompt: list[int], max_tokens: int, recorder: Recorder) -> None:
        nonlocal served
        served += 1
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=max_tokens, stop_token_ids=job["end_tokens"]
        )
        engine.add_request(str(served), {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                recorder.put(output.outputs[0].token_ids[len(recorder.token_ids) :])

    return generate, {"vllm": vllm.__version__}


if __name__ == "__main__":
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.is_file() and "LD_PRELOAD" not in os.environ:  # as vLLM recommends on a CPU
        os.environ["LD_PRELOAD"] = str(openmp)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    serve(load)
