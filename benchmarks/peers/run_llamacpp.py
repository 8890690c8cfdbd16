"""llama.cpp through llama-cpp-python, on the GGUF file as it is."""

import llama_cpp
from worker import Recorder, serve


def load(job: dict):
    context = max(map(len, job["prompts"])) + job["tokens"] + 8
    model = llama_cpp.Llama(
        job["target"],
        n_ctx=context,
        n_threads=job["threads"],
        n_threads_batch=job["threads"],
        verbose=False,
    )
    end_tokens = frozenset(job["end_tokens"])

    def generate(prompt: list[int], max_tokens: int, recorder: Recorder) -> None:
        model.reset()  # no prefix of the last prompt is reused
        for token in model.generate(prompt, temp=0.0):
            recorder.put([token])
            if token in end_tokens or len(recorder.token_ids) == max_tokens:
                break

    return generate, {"llama-cpp-python": llama_cpp.__version__}


if __name__ == "__main__":
    serve(load)
