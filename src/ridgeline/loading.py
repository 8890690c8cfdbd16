"""Loading a model for a command: the demo model where none is named, and a sign of life."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ridgeline.llm import LLM


def load_llm(model: str | None, **options: Any) -> LLM:
    """The LLM that a command line asks for; options that are None keep their defaults.

    Raises:
        RidgelineError: see `LLM`.
    """
    talking = sys.stderr.isatty()
    if talking:  # importing torch and reading weights takes seconds
        print(f"loading {model or 'the demo model'} ...", file=sys.stderr)
    from ridgeline.draft.auto import AUTO, chosen
    from ridgeline.llm import LLM
    from ridgeline.model.linear import native_kernels

    if native_kernels() is None:
        print(
            "note: the native extension is not built: models run on torch alone, slower on CPUs; "
            "`ridgeline info` says more",
            file=sys.stderr,
        )
    if model is None:
        from ridgeline.model.fetch import demo_model

        model = str(demo_model())
    given = {name: value for name, value in options.items() if value is not None}
    llm = LLM(model, **given)
    if talking and options.get("drafter") == AUTO:
        print(chosen(AUTO, llm.loaded, llm.drafter), file=sys.stderr)
    return llm
