"""Times llama.cpp's forward passes for forward.py: `passes_llamacpp.py MODEL THREADS MOST`.

Reads a JSON object a line, `{"sequences": B, "rows": N, "context": S}`, runs that pass and answers
with its seconds: B sequences with N new tokens each after S tokens that they share. What
is shared is computed at the first need of it. MOST: tokens that the cache has to hold.
"""

import json
import sys
import time

import llama_cpp


class Passes:
    """One model with a cache."""

    def __init__(self, path: str, threads: int, most: int, sequences: int = 32) -> None:
        llama_cpp.llama_backend_init()
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, None)
        model = llama_cpp.llama_model_load_from_file(
            path.encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = most
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max = sequences + 1
        params.kv_unified = True  # so that sequences can share their context
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(model, params)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(512, 0, 1)
        self._shared, self._filled = sequences, 0

    def seconds(self, sequences: int, rows: int, context: int) -> float:
        """One pass; the cache is afterwards as before."""
        while self._filled < context:
            count = min(256, context - self._filled)
            self._decode([(self._shared, self._filled + i) for i in range(count)], set())
            self._filled += count
        for sequence in range(sequences):
            llama_cpp.llama_memory_seq_cp(self._memory, self._shared, sequence, 0, context)
        cells = [(s, context + i) for s in range(sequences) for i in range(rows)]
        # As many rows of logits as ours: all of a few, else the last.
        wanted = set(range(len(cells))) if rows <= 32 else {len(cells) - 1}
        start = time.perf_counter()
        self._decode(cells, wanted)
        spent = time.perf_counter() - start
        for sequence in range(sequences):
            llama_cpp.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        return spent

    def _decode(self, cells: list[tuple[int, int]], wanted: set[int]) -> None:
        batch = self._batch
        batch.n_tokens = len(cells)
        for i, (sequence, position) in enumerate(cells):
            batch.token[i] = (position * 7919 + sequence * 31) % 1000
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = i in wanted
        code = llama_cpp.llama_decode(self._context, batch)
        if code:
            raise SystemExit(f"llama_decode returned {code}")
        llama_cpp.llama_synchronize(self._context)


def main() -> None:
    path, threads, most = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    passes = Passes(path, threads, most)
    print(json.dumps({"version": llama_cpp.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(passes.seconds(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
