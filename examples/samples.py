"""Draw four samples for one prompt, with log-probabilities; the same seed gives the same four."""

from ridgeline import LLM, SamplingParams
from ridgeline.model.fetch import demo_model


def main() -> None:
    llm = LLM(demo_model(), drafter="ngram")
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=7, n=4, logprobs=0, max_tokens=24)
    (output,) = llm.generate("My favourite season is", params)
    for completion in output.completions:
        total = sum(entry.logprob for entry in completion.logprobs or ())
        print(f"{total:8.2f}  {completion.text!r}")


if __name__ == "__main__":
    main()
