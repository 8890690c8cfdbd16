"""CPU threads: torch's and those of the native product, one number for both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ridgeline.core.batch import Batch
from ridgeline.errors import ConfigError
from ridgeline.model.linear import set_native_threads

MOST_THREADS = 1024
SMALL_ROWS = 32
"""A batch of more rows has operators that are worth several threads."""
SMALL_KEYS = 4096
"""So has one whose rows attend to more keys, counted over all its sequences."""


def set_threads(threads: int | None) -> None:
    """Use so many threads from now on, in this process; None: as many as torch has.

    Raises:
        ConfigError: fewer than one or absurdly many.
    """
    if threads is not None:
        whole = isinstance(threads, int) and not isinstance(threads, bool)
        if not whole or not 1 <= threads <= MOST_THREADS:
            raise ConfigError(f"threads is {threads!r}; it must be an integer, 1 to {MOST_THREADS}")
        torch.set_num_threads(threads)
    set_native_threads(torch.get_num_threads())


@contextmanager
def operator_threads(batch: Batch) -> Iterator[None]:
    """torch's operators run on one thread within, where the batch is small.

    The native product has threads of its own for the weights. What is left to torch are hundreds
    of operators of microseconds each, in which waking and awaiting a second thread costs more than
    it does, and much more while other processes run.
    """
    keys = sum(len(entry.slots) for entry in batch.entries)
    threads = torch.get_num_threads()
    if threads == 1 or len(batch.tokens) > SMALL_ROWS or keys > SMALL_KEYS:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
