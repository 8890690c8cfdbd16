"""llama.cpp's logits of every position, for accuracy.py: `logits_llamacpp.py JOB RESULT`."""

import json
import sys

import llama_cpp
import numpy as np


def main() -> None:
    with open(sys.argv[1]) as file:
        job = json.load(file)
    length = len(job["segments"][0])
    model = llama_cpp.Llama(
        job["model"], n_ctx=length, n_batch=length, logits_all=True, verbose=False
    )
    logits = []
    for tokens in job["segments"]:
        model.reset()
        model.eval(tokens)
        logits.append(np.array(model.scores[:length]))
    np.save(sys.argv[2], np.stack(logits))


if __name__ == "__main__":
    main()
