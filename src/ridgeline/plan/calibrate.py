"""This machine's figures, measured through the engine's own path.

For each number format two models of random weights are timed over a grid of rows, one of small
layers and one of large ones: what a layer costs whatever its size (threads that wake, norms,
activations) and what a weight costs are the solution of two equations. Attention is what longer
contexts add to a model of hardly any weights; the rest of a step is timed around a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import nnls
from transformers import LlamaConfig

from ridgeline.bench.clock import Clock, clocked
from ridgeline.bench.measure import PLAIN, Contender, engine_of
from ridgeline.core.params import SamplingParams
from ridgeline.model.linear import native_kernels, native_module
from ridgeline.model.load import LoadedModel
from ridgeline.plan.calibration import (
    Calibration,
    KindRates,
    calibration_writer,
    machine_of,
    read_calibration,
)
from ridgeline.plan.cost import fit
from ridgeline.plan.passes import Pass, Passes
from ridgeline.plan.probe import DENSE, native_kinds, probe, probe_config
from ridgeline.plan.shape import BITS

STREAM = 1 << 28
"""Bytes read to measure the bandwidth."""


@dataclass(frozen=True)
class Effort:
    """How thoroughly to measure."""

    nbytes: int = 64 << 20
    """of weights of a probe: more than caches hold"""
    rows: tuple[int, ...] = (
        *(1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 17, 20, 24, 32, 33, 40, 48, 64),
        *(80, 96, 97, 128, 192, 288),
    )
    contexts: tuple[int, int] = (64, 2048)
    rounds: int = 3
    steps: int = 24
    """of the engine"""


def calibrated(
    kinds: Iterable[str],
    device: torch.device,
    native: bool,
    *,
    again: bool = False,
    effort: Effort | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Calibration:
    """The machine's figures for weights of `kinds`, measured where they are not known yet.

    Args:
        kinds: number formats, as in `ModelShape.kinds`.
        device: where the engine would run.
        native: whether on the native decoder, else on transformers' layers.
        again: forget what is known.
        effort: how thoroughly.
        say: told what is being measured.

    Raises:
        ConfigError: that path has no such weights.
        ModelLoadError: the cache folder cannot be written.
    """
    effort = effort or Effort()
    machine = machine_of(device, native)
    known = None if again else read_calibration(machine)
    calibration = known or Calibration(machine)
    missing = [kind for kind in kinds if kind not in calibration.kinds]
    if known is not None and not missing:
        return calibration
    with calibration_writer() as write:  # measures nothing where it could not be kept
        if known is None:
            say("memory, attention and the engine's own time")
            calibration.bandwidth = _bandwidth(device)
            calibration.key, calibration.pair = _attention(device, native, effort)
            calibration.step, calibration.sequence = _overhead(device, native, effort)
        for kind in missing:
            say(f"{kind} weights")
            calibration.kinds[kind] = _rates(kind, device, native, effort)
        write(calibration)
    return calibration


def runnable(kind: str, native: bool) -> bool:
    """Whether the engine computes with such weights as they are."""
    return kind in (native_kinds() if native else DENSE)


def _bandwidth(device: torch.device) -> float:
    """Bytes/s of reading memory."""
    if device.type == "cpu" and native_kernels() is not None:
        rate: float = native_module().stream_read(bytes=STREAM, repeats=5)
        return rate
    numbers = torch.ones(STREAM // 4, device=device)
    clock = Clock(device)
    return STREAM / min(clock.timed(numbers.sum)[1] for _ in range(6))


def _rates(kind: str, device: torch.device, native: bool, effort: Effort) -> KindRates:
    """Solves for the cost of a layer and of a weight at each number of rows."""
    layers, weights, seconds = [], [], []
    for hidden, intermediate in ((512, 1536), (2048, 5632)):
        config = probe_config(hidden, intermediate, 1, 512)
        of_layer = _layer_weights(config)
        count = max(round(8 * effort.nbytes / (_bits(kind) * of_layer)), 1)
        config = probe_config(hidden, intermediate, count, 512)
        passes = Passes(probe(config, kind, device, native), max(effort.rows) + 64)
        sizes = [Pass(1, rows, 16) for rows in effort.rows]
        layers.append(count)
        weights.append(count * of_layer + config.vocab_size * hidden)
        seconds.append([sample.seconds for sample in passes.samples(sizes, effort.rounds)])
    layer, weight = _solved(layers, weights, np.array(seconds))
    return KindRates(effort.rows, layer, weight)


def _solved(
    layers: Sequence[int], weights: Sequence[int], seconds: NDArray[np.float64]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Cost of a layer and of a weight at each number of rows, neither of which ever falls.

    Args:
        layers, weights: how many each probe has.
        seconds: [probes, numbers of rows].
    """
    count = seconds.shape[1]
    steps = np.tri(count)  # from increments to values
    lines = [np.hstack([n * steps, w * steps]) for n, w in zip(layers, weights, strict=True)]
    system = np.vstack(lines) / seconds.reshape(-1, 1)
    scale = np.linalg.norm(system, axis=0)
    found, _ = nnls(system / scale, np.ones(len(system)))
    values = (steps @ (found / scale).reshape(2, count).T).T
    return tuple(values[0].tolist()), tuple(values[1].tolist())


def _bits(kind: str) -> float:
    """Bits of a weight; a GGUF type's are taken from its name, which is near enough for a probe."""
    return BITS.get(kind) or float(kind[1])


def _layer_weights(config: LlamaConfig) -> int:
    hidden, keys = config.hidden_size, config.num_key_value_heads * config.head_dim
    count: int = hidden * (2 * hidden + 2 * keys + 3 * config.intermediate_size)
    return count


def _attention(device: torch.device, native: bool, effort: Effort) -> tuple[float, float]:
    """Seconds of a number in the cache, and of a dimension of a pair of row and key."""
    config = probe_config(512, 64, 8, 512)
    low, high = effort.contexts
    passes = Passes(probe(config, "fp32", device, native), 4 * (high + 32))
    sizes = [
        Pass(sequences, rows, context)
        for sequences, rows in ((1, 1), (1, 4), (1, 8), (4, 1), (4, 4))
        for context in (low, high // 2, high)
    ]
    curve = fit(passes.samples(sizes, effort.rounds))
    kept = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
    pairs = 2 * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    return curve.key / kept, curve.pair / pairs


def _overhead(device: torch.device, native: bool, effort: Effort) -> tuple[float, float]:
    """Seconds of a step outside of its forward pass, and what a further sequence adds."""
    config = probe_config(256, 64, 1, 32768)
    loaded = LoadedModel(
        name="probe",
        model=probe(config, "fp32", device, native),
        tokenizer=None,
        end_tokens=frozenset(),
        context_len=config.max_position_embeddings,
        vocab_size=config.vocab_size,
    )
    most = 8
    spent: dict[int, list[float]] = {1: [], most: []}
    for _ in range(effort.rounds):  # in turns, so that a busy moment of the machine hits both
        for batch, seconds in spent.items():
            seconds += _outside(loaded, batch, effort.steps)
    one, several = (median(seconds) for seconds in spent.values())
    # Whatever noise does to the difference, a step of one sequence takes what it took.
    sequence = min(max(several - one, 0.0) / (most - 1), one)
    return one - sequence, sequence


def _outside(loaded: LoadedModel, batch: int, steps: int) -> list[float]:
    """Seconds of each decode step less its forward pass."""
    engine = engine_of(loaded, Contender(PLAIN), batch, steps + 8).engine
    params = SamplingParams(max_tokens=steps, ignore_eos=True)
    for _ in range(batch):
        engine.add([8, 9, 10], params)
    outside = []
    with clocked(engine) as clock:
        while engine.has_work:
            clock.reset()
            _, seconds = clock.timed(engine.step)
            if clock.decodes:
                outside.append(seconds - clock.target)
    return outside
