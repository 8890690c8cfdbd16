"""Compare drafted and undrafted decoding token by token: greedy, and sampled with a seed."""

from ridgeline import LLM, SamplingParams
from ridgeline.model.fetch import demo_model
from ridgeline.model.load import load_model

PROMPT = "Recite: the rain in Spain stays mainly in the plain. Again: the rain in"


def main() -> None:
    model = load_model(str(demo_model()), dtype="float32")
    plain, drafted = LLM(model), LLM(model, drafter="ngram", depth=6)
    for params in (
        SamplingParams(max_tokens=48),
        SamplingParams(max_tokens=48, temperature=0.8, seed=1),
        SamplingParams(max_tokens=48, temperature=0.8, seed=1, repetition_penalty=1.2),
    ):
        (a,), (b,) = plain.generate(PROMPT, params), drafted.generate(PROMPT, params)
        steps = [output.completions[0].speculation.steps for output in (a, b)]
        verdict = "identical" if a.token_ids == b.token_ids else "DIFFERENT"
        print(f"{verdict}: {len(a.token_ids)} tokens in {steps[0]} and in {steps[1]} steps")


if __name__ == "__main__":
    main()
