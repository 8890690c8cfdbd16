"""Stream a chat answer; accepted drafts are underlined, the model's own tokens are not."""

from ridgeline import LLM, SamplingParams
from ridgeline.model.fetch import demo_model

UNDERLINED, PLAIN = "\033[4m", "\033[0m"


def main() -> None:
    llm = LLM(demo_model(), drafter="ngram")
    request = llm.request(
        [{"role": "user", "content": "Why is the sky blue?"}],
        SamplingParams(max_tokens=80),
    )
    for event in llm.stream(request):
        for piece in event.pieces:
            text = f"{UNDERLINED}{piece.text}{PLAIN}" if piece.drafted else piece.text
            print(text, end="", flush=True)
        if event.completion:
            print(f"\n-- finished: {event.completion.finish_reason}")


if __name__ == "__main__":
    main()
