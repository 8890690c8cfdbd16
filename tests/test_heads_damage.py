"""Heads whose configuration or tensors make no sense: each is refused at load, in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ridgeline import LLM, SamplingParams
from ridgeline.draft.checkpoint import hidden_size
from ridgeline.errors import RidgelineError
from ridgeline.model.load import LoadedModel
from tests.engines import tiny_loaded
from tests.heads import METHODS, write_head

Edit = Callable[[dict[Any, Any]], None]
NAN = float("nan")
RECURRENT = ("eagle", "eagle3", "mtp")


def refused(spec: str, says: str, target: LoadedModel | None = None) -> None:
    """The drafter cannot be made, and one line of bearable length says why."""
    with pytest.raises(RidgelineError, match=says) as caught:
        LLM(target or tiny_loaded(), drafter=spec, kv_tokens=1024)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


def edited(method: str, folder: Path, edit: Edit, **changes: Any) -> str:
    """A head whose tensors were changed; pickled, so that anything can be among them."""
    spec = write_head(method, folder, tiny_loaded(), **changes)
    tensors: dict[Any, Any] = load_file(folder / "model.safetensors")
    edit(tensors)
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    return spec


SIZES = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        *((name, value, f"{name} is ") for name in SIZES for value in ("8", 8.0, [8], -1, 0, NAN)),
        *((name, 10**12, f"{name} is ") for name in SIZES),
        *((name, None, f"{name} is None") for name in SIZES if name not in SIZES[2:4]),
        ("head_dim", 2**19, "are wider than"),
        ("head_dim", 7, "even"),
        ("num_attention_heads", 5, "hidden_size 48 is no multiple of 5"),
        ("num_key_value_heads", 3, "4 is no multiple of num_key_value_heads 3"),
        *(("rms_norm_eps", value, "rms_norm_eps is") for value in ("x", None, NAN, -1, True)),
        ("rope_scaling", 3, "rope_scaling is 3; it must be an object"),
        ("rope_parameters", [1], "rope_parameters is .*object"),
        ("rope_scaling", {"type": "zzz"}, "type 'zzz'; known are default, "),
        ("rope_parameters", {"rope_type": ["zzz"]}, "known are default, "),
        ("rope_scaling", {"rope_type": "linear"}, "factor"),
        ("rope_scaling", {"rope_type": "linear", "factor": 0}, "rope_scaling give no finite"),
        (
            "rope_parameters",
            {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
            "of a part of each head",
        ),
        *(("rope_theta", value, "config.json: ") for value in ("x", 0, -1.0, [1])),
        *(("max_position_embeddings", v, "max_position_embeddings is") for v in (None, "x", -1)),
        *(("hidden_act", value, "hidden_act is") for value in (None, "gelu", 3)),
        *(("transformer_layer_config", value, "is no object") for value in (None, [], "x")),
    ],
)
def test_configurations(field: str, value: Any, says: str, tmp_path: Path) -> None:
    refused(write_head("eagle", tmp_path, tiny_loaded(), config={field: value}), says)


@pytest.mark.parametrize("method", RECURRENT)
@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size", "num_attention_heads"])
def test_configurations_that_lack_a_field(method: str, name: str, tmp_path: Path) -> None:
    spec = write_head(method, tmp_path, tiny_loaded())
    config = json.loads((tmp_path / "config.json").read_text())
    del config[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(spec, f"config.json lacks {name}")


@pytest.mark.parametrize(
    "config",
    [
        {"rms_norm_eps": 1},
        {"num_key_value_heads": 2, "head_dim": None},
        {"rope_scaling": None, "rope_parameters": None},
        {"rope_scaling": {"type": "linear", "factor": 2}},
    ],
)
def test_configurations_that_are_fine(config: dict[str, Any], tmp_path: Path) -> None:
    spec = write_head("eagle", tmp_path, tiny_loaded(), config=config)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    LLM(tiny_loaded(), drafter=spec, kv_tokens=1024, policy="fixed").generate("the rest", params)


@pytest.mark.parametrize("method", METHODS)
def test_a_configuration_nested_too_deep(method: str, tmp_path: Path) -> None:
    spec = write_head(method, tmp_path, tiny_loaded())
    (tmp_path / "config.json").write_text('{"a": ' + "[" * 200_000 + "]" * 200_000 + "}")
    refused(spec, "config.json cannot be read")


@pytest.mark.parametrize(("name", "value"), [("verifier_accept_k", 3), ("accept_tolerance", 0.1)])
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_lossy_verification(method: str, name: str, value: float, tmp_path: Path) -> None:
    proposal = {"proposal_type": "greedy", "verifier_accept_k": 1, "accept_tolerance": 0.0}
    fine = {"speculators_config": {"algorithm": "eagle", "proposal_methods": [proposal]}}
    LLM(
        tiny_loaded(),
        drafter=write_head(method, tmp_path / "fine", tiny_loaded(), config=fine),
        kv_tokens=1024,
    )
    lossy = {"speculators_config": {"proposal_methods": [proposal | {name: value}]}}
    spec = write_head(method, tmp_path / "lossy", tiny_loaded(), config=lossy)
    refused(spec, f"{name} is {value}, which would change the text; only [01] runs here")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "d2t",
    [
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(8, 8, dtype=torch.int64),
        torch.tensor(0),
        torch.zeros(50),
    ],
    ids=["empty", "2-D", "0-D", "floats"],
)
def test_d2t_that_is_no_list(method: str, d2t: Tensor, tmp_path: Path) -> None:
    # an MTP module's tensors lie below its layer
    name = "model.layers.3.d2t" if method == "mtp" else "d2t"
    refused(edited(method, tmp_path, lambda t: t.update({name: d2t})), "d2t is .* must be a whole")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_weights_that_are_not_finite(method: str, value: float, tmp_path: Path) -> None:
    part = {
        "medusa": "3.0.linear.weight",
        "eagle": "fc.bias",
        "eagle3": "norm.weight",
        "mtp": "model.layers.3.mlp.up_proj.weight",
    }[method]

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[part].view(-1)[-1] = value

    refused(edited(method, tmp_path, spoil), "holds NaN or infinity; the head is damaged")


MATRIX = "midlayer.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({MATRIX: torch.tensor(1, dtype=torch.int8), f"{MATRIX}_scale": torch.ones(1)}, "a row"),
        ({MATRIX: torch.ones(96, 0, dtype=torch.int8), f"{MATRIX}_scale": torch.ones(96)}, "a row"),
        ({MATRIX: torch.ones(8, dtype=torch.int8), f"{MATRIX}_scale": torch.ones(8)}, "a row"),
        ({7: torch.ones(1)}, "holds no tensors by name"),
        ({MATRIX: torch.ones(96, 48).to_sparse()}, "dense tensors"),
        ({MATRIX: {"a": torch.ones(1)}}, "dense tensors"),
        ({"lm_head.weight": torch.tensor(1.0)}, r"the LM head is \[\], which is no matrix"),
        ({"lm_head.weight": torch.ones(0, 48)}, "which is no matrix"),
        ({"x" * 5000: torch.ones(1)}, "not implemented"),
    ],
    ids=str,
)
def test_tensors(tensors: dict[Any, Any], says: str, tmp_path: Path) -> None:
    refused(edited("eagle3", tmp_path, lambda t: t.update(tensors)), says)


@pytest.mark.parametrize(
    "content", [[torch.ones(1)], torch.ones(1), 3], ids=["list", "tensor", "3"]
)
def test_pickles_without_names(content: Any, tmp_path: Path) -> None:
    spec = edited("eagle", tmp_path, lambda _: None)
    torch.save(content, tmp_path / "pytorch_model.bin")
    refused(spec, "holds no tensors by name")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("9" * 5000 + ".0.linear.weight", "no part of Medusa heads"),
        ("20000000.0.linear.weight", "no part of Medusa heads"),
        ("200000.0.linear.weight", "lacks Medusa heads"),
        ("0.200000.linear.weight", "lacks Medusa heads"),
        ("3.1.linear.weight", "lacks Medusa heads"),
    ],
    ids=lambda name: name[:24],
)
def test_medusa_heads_with_gaps(name: str, says: str, tmp_path: Path) -> None:
    refused(edited("medusa", tmp_path, lambda t: t.update({name: torch.ones(48, 48)})), says)


@pytest.mark.parametrize("name", ["model.layers.{}.eh_proj.weight", "mtp.layers.{}.x.weight"])
def test_module_numbers_that_are_none(name: str, tmp_path: Path) -> None:
    spec = edited(
        "mtp", tmp_path, lambda t: (t.clear(), t.update({name.format("9" * 5000): torch.ones(1)}))
    )  # type: ignore[func-returns-value]
    refused(spec, "holds no MTP module")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("path", ["~no_such_user/x", "/" + "x" * 5000, "a\0b/c"])
def test_paths_that_are_none(method: str, path: str) -> None:
    refused(f"{method}:{path}", "is no path of a head|is neither a local file")


def test_eagle3_without_what_fuses_its_features(tmp_path: Path) -> None:
    spec = edited("eagle3", tmp_path, lambda t: t.pop("fc.weight"))
    refused(spec, "lacks fc.weight")


def test_an_eagle_head_of_another_width(tmp_path: Path) -> None:
    """All its own parts agree: only the target's features do not fit."""

    def own(tensors: dict[str, Tensor]) -> None:
        tensors["fc.weight"] = torch.ones(96, 48 + 96)
        tensors["lm_head.weight"] = torch.ones(tiny_loaded().vocab_size, 96)

    spec = edited("eagle", tmp_path, own, hidden=96)
    refused(spec, "hidden size 96; tiny-llama has 48: use a head made for this model")


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_eagle3_without_layer_ids_on_a_shallow_target(layers: int, tmp_path: Path) -> None:
    target = tiny_loaded(num_hidden_layers=layers)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    spec = write_head("eagle3", tmp_path, target)
    plain, drafted = (
        LLM(target, drafter=drafter, kv_tokens=1024, policy="fixed").generate("the rest", params)
        for drafter in ("none", spec)
    )
    assert plain[0].token_ids == drafted[0].token_ids


@pytest.mark.parametrize("named", [[], [True, 1, 2], [0, 1, 4], "1", [1.0, 1, 2], [-1, 1, 2]])
def test_eagle3_with_layer_ids_that_are_none(named: Any, tmp_path: Path) -> None:
    config = {"eagle_aux_hidden_state_layer_ids": named}
    spec = write_head("eagle3", tmp_path, tiny_loaded(), config=config)
    refused(spec, re.escape(f"is {named!r}; it must be a list of layers from 0 to 3"))


def test_the_width_is_read_on_the_models_device() -> None:
    device = torch.device("meta")

    def embed(tokens: Tensor) -> Tensor:
        assert tokens.device == device
        return torch.empty(len(tokens), 24, device=device)

    model = SimpleNamespace(device=device, embed=embed)
    assert hidden_size(replace(tiny_loaded(), model=cast("Any", model))) == 24
