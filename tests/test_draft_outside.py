"""A drafter from outside the package: the one of docs/add_a_drafter.md, word for word."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from ridgeline import LLM, ConfigError, SamplingParams
from ridgeline.draft import base, drafter_names
from tests.engines import tiny_loaded
from tests.tiny import save_tiny

DOCUMENT = Path(__file__).parents[1] / "docs" / "add_a_drafter.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the Python path that holds the document's drafter as a module."""
    (tmp_path / "followers.py").write_text(BLOCKS[0])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(base, "_FACTORIES", dict(base._FACTORIES))
    monkeypatch.delitem(sys.modules, "followers", raising=False)
    return tmp_path


@pytest.mark.usefixtures("outside")
def test_it_registers_speculates_and_changes_no_token() -> None:
    with pytest.raises(ConfigError, match="no drafter 'followers'"):
        LLM(tiny_loaded(), drafter="followers", kv_tokens=512)
    __import__("followers")
    assert "followers" in drafter_names()
    prompts = [[0, 20, 21, 22], [0, 30, 31]]
    for params in (
        SamplingParams(max_tokens=40, ignore_eos=True),
        SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.5, seed=3),
    ):
        plain = LLM(tiny_loaded(), kv_tokens=512).generate(prompts, params)
        llm = LLM(
            tiny_loaded(), drafter="followers:3", depth=3, nodes=8, kv_tokens=512, policy="fixed"
        )
        llm.generate(prompts, params)  # what it learns here, it drafts below
        drafted = llm.generate(prompts, params)
        assert [a.token_ids for a in plain] == [b.token_ids for b in drafted]
        figures = drafted[0].completions[0].speculation
        assert figures.accepted > 20
        assert len(figures.reached) == 3


def test_the_rest_of_the_document_runs(outside: Path) -> None:
    model = save_tiny("llama", outside / "model")
    sources = [block.replace('"model.gguf"', repr(str(model))) for block in BLOCKS[1:]]
    assert len(sources) == 2
    for source in sources:
        exec(compile(source, DOCUMENT.name, "exec"), {})


def test_the_document_names_what_exists() -> None:
    from ridgeline.core import sampling, tree

    text = DOCUMENT.read_text()
    assert set(re.findall(r"`(?:context|request|sequence)\.(\w+)", text)) <= (
        {*base.DraftContext.__annotations__, *base.DraftRequest.__annotations__}
        | {"table", "draft_len"}
    )
    for method in re.findall(r"^\| `(\w+)\(", text, re.MULTILINE):
        assert hasattr(base.Drafter, method)
    assert sampling.draw_drafts
    assert int(re.findall(r"M is at most (\d+)", text)[0]) == tree.MAX_DRAFTED
