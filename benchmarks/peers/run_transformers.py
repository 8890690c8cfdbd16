"""Transformers: plain, assisted by a draft model (two schedules), or prompt lookup."""

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer
from worker import Recorder, serve


class Streamer(BaseStreamer):
    """Passes each step's tokens to a recorder; `generate` puts the prompt first."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, then each step's tokens."""
        if self.prompt_seen:
            self.recorder.put(value.flatten().tolist())
        self.prompt_seen = True

    def end(self) -> None:
        """Nothing is held back."""


def load(job: dict):
    torch.set_num_threads(job["threads"])
    model = AutoModelForCausalLM.from_pretrained(job["target"], dtype=job["dtype"])
    options = {}
    if job["mode"] in ("assisted", "assisted-constant"):
        assistant = AutoModelForCausalLM.from_pretrained(job["draft"], dtype=job["dtype"])
        if job["mode"] == "assisted-constant":
            assistant.generation_config.num_assistant_tokens = job["draft_tokens"]
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
            assistant.generation_config.assistant_confidence_threshold = 0.0
        options["assistant_model"] = assistant
    elif job["mode"] == "lookup":
        options["prompt_lookup_num_tokens"] = job["draft_tokens"]

    @torch.inference_mode()
    def generate(prompt: list[int], max_tokens: int, recorder: Recorder) -> None:
        ids = torch.tensor([prompt])
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=job["end_tokens"],
            pad_token_id=job["end_tokens"][0],
            streamer=Streamer(recorder),
            **options,
        )

    return generate, {"transformers": transformers.__version__, "torch": torch.__version__}


if __name__ == "__main__":
    serve(load)
