"""Write a few texts at once, with drafts, and show what drafting brought to each."""

from ridgeline import LLM, SamplingParams
from ridgeline.model.fetch import demo_model

PROMPTS = [
    "The capital of France is Paris. The capital of Italy is",
    "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n",
    "One, two, three, four, five,",
]


def main() -> None:
    llm = LLM(demo_model(), drafter="ngram", depth=4)
    for prompt, output in zip(
        PROMPTS, llm.generate(PROMPTS, SamplingParams(max_tokens=40)), strict=True
    ):
        speculation = output.completions[0].speculation
        print(prompt + output.text)
        print(f"  -- {speculation.accepted} of {speculation.drafted} drafted tokens accepted\n")


if __name__ == "__main__":
    main()
