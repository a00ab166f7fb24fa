"""The weights of a model folder by their names, from whatever files hold them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .folder import linked_gguf, read_config, weight_files
from .gguf_file import open_gguf
from .gguf_weights import open_gguf_weights
from .quantized_weights import with_quantized
from .safetensors_file import open_safetensors
from .stored import StoredTensor


def open_weights(folder: Path) -> Mapping[str, StoredTensor]:
    """Every tensor of a folder. Each header is parsed once until `forget_headers`, and no tensor's data is read.

    Raises CheckpointError if a file is missing or broken, or if its format is not supported.
    """
    if gguf := linked_gguf(folder):
        return open_gguf_weights(open_gguf(gguf))
    tensors: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        tensors |= open_safetensors(path)
    return with_quantized(tensors, read_config(folder).get("quantization_config"))
