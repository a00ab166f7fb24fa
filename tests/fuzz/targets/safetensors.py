"""A file of weights, as import and engine read it."""

from __future__ import annotations

import torch

from pagoda_server.checkpoints.folder import CheckpointError, check_folder
from pagoda_server.engine.core.errors import ConfigError
from pagoda_server.engine.models.tensors import Checkpoint, Rows
from pagoda_server.kernels import INT4, GroupedWeight
from tests.fuzz.common import check_line, folder_of

CONFIG = b'{"model_type": "llama"}'
NAME = "w"  # of a matrix [2, 32]


def check(data: bytes) -> bool:
    with folder_of(model__safetensors=data, config__json=CONFIG, tokenizer__json=b"{}") as folder:
        try:
            check_folder(folder)
        except CheckpointError as error:
            check_line(error)
            return False
        try:
            checkpoint = Checkpoint(folder)
            is_in_groups = checkpoint.format_of(NAME) is not None
            kept = [GroupedWeight.allocate(INT4, 2, 32)] if is_in_groups else []
            places = [torch.empty(2, 32, dtype=torch.bfloat16), *kept]
            for place in places:
                checkpoint.dtype_of(NAME)
                checkpoint.fill(place, NAME, Rows(NAME, place.shape[0], torch.tensor([1, 0]), 0.5))
        except ConfigError as error:
            check_line(error)
            return False
    return True
