"""Models from the Hugging Face Hub, into its own cache."""

from __future__ import annotations

from pathlib import Path

from pagoda_server.checkpoints.errors import CheckpointError
from pagoda_server.checkpoints.local import check_folder

PATTERNS = ["*.json", "*.safetensors", "*.jinja"]


def obtain_hub_model(name: str) -> Path:
    """The snapshot of `org/name`; one that is complete in the Hub's cache needs no network.

    Raises CheckpointError if there is no network, no such repository or no access to it, or if its files are not of
    the supported kinds.
    """
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=PATTERNS))
    except Exception as error:  # from the Hub's own classes, its HTTP library and the operating system
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{name} is no folder here and could not be had from the Hugging Face Hub: {reason}"
        ) from error
    return check_folder(folder)
