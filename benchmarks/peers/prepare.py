"""Makes what all engines share: dense weights, prompts as token ids, and the tokens that end.

Started as `python prepare.py JOB RESULT`. The dense weights are the folders that Ridgeline unpacks
GGUF files to, once; a test holds them against what Transformers unpacks.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, GenerationConfig

from ridgeline.model.gguf_convert import gguf_folder


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    dtype = getattr(torch, job["dtype"])
    result = {role: str(gguf_folder(Path(job[role]), dtype)) for role in ("target", "draft")}
    tokenizer = AutoTokenizer.from_pretrained(result["target"])
    result["prompts"] = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in job["texts"]
    ]
    end_tokens = GenerationConfig.from_pretrained(result["target"]).eos_token_id
    result["end_tokens"] = [end_tokens] if isinstance(end_tokens, int) else end_tokens
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
