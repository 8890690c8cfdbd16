"""Fetching a model's files from the Hugging Face hub into its own cache."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from ridgeline.errors import ModelLoadError, reason

DESCRIPTION = ("*.json", "*.jinja", "*.txt", "*.model")
"""Configuration and tokenizer: all that is needed to tell whether a model can run."""
WEIGHTS = ("*.safetensors",)
# Files of other formats, and copies of the same weights for other programs.
_IGNORED = ("*/*", "consolidated*")


def download(repository: str, patterns: tuple[str, ...]) -> Path:
    """The repository's folder in the hub's local cache, with the files that match `patterns`.

    Without a connection what the cache holds already is used.

    Raises:
        ModelLoadError: unknown, gated, or not there and out of reach.
    """
    try:
        return Path(
            snapshot_download(repository, allow_patterns=patterns, ignore_patterns=_IGNORED)
        )
    except GatedRepoError:
        raise ModelLoadError(
            f"{repository} is gated: accept its licence at https://huggingface.co/{repository} "
            "and log in with `hf auth login`"
        ) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise ModelLoadError(
            f"{repository!r} is neither a local file or folder nor a model that the Hugging Face "
            "hub shows to you"
        ) from None
    except LocalEntryNotFoundError:
        raise ModelLoadError(
            f"{repository!r} is no local file or folder, and neither is it in the Hugging Face "
            "cache nor can the hub be reached; give a GGUF file or a model folder, or connect"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        raise ModelLoadError(f"{repository} cannot be downloaded: {reason(error)}") from error
