"""Makes what all engines share: dense weights, prompts as token ids, and the tokens that end.

Started as `python prepare.py JOB RESULT`. The weights of a GGUF file are dequantised once by
Transformers into `WEIGHTS/STEM-DTYPE`; `source.json` in it holds the file's sha256, and a folder
made from another file is made anew.
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig


def dense_weights(gguf: Path, dtype: str, weights: Path) -> tuple[Path, str]:
    """The folder with the dequantised model, and the sha256 of the file it came from."""
    with gguf.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    folder = weights / f"{gguf.stem}-{dtype}"
    source = folder / "source.json"
    if source.is_file() and json.loads(source.read_text())["sha256"] == sha256:
        return folder, sha256
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=dtype,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(partial)
    (partial / "source.json").write_text(json.dumps({"file": gguf.name, "sha256": sha256}))
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder, sha256


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    result = {}
    for role in ("target", "draft"):
        folder, sha256 = dense_weights(Path(job[role]), job["dtype"], Path(job["weights"]))
        result[role] = str(folder)
        result[f"{role}_sha256"] = sha256
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
