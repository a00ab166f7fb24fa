"""A model folder's config.json, as import, router and engine read it."""

from __future__ import annotations

import math

import torch

from pagoda_server.checkpoints.folder import CheckpointError, check_folder
from pagoda_server.engine.core.errors import ConfigError
from pagoda_server.engine.models import ModelConfig, read_config
from pagoda_server.engine.models.config_file import MAX_SIZE, MAX_SIZES
from pagoda_server.engine.models.rope import Rope
from pagoda_server.router.errors import ConfigError as RouterConfigError
from pagoda_server.router.request.models import LONGEST_CONTEXT, longest_context
from pagoda_server.router.text.tokenizer_files import TokenizerFiles
from tests.fuzz.common import check_line, folder_of


def check(data: bytes) -> bool:
    with folder_of(config__json=data, tokenizer__json=b"{}") as folder:
        assert longest_context(folder) <= LONGEST_CONTEXT
        try:
            TokenizerFiles.read(folder)
        except RouterConfigError as error:
            check_line(error)
        try:
            check_folder(folder)
        except CheckpointError as error:
            check_line(error)
        try:
            config = read_config(folder)
        except ConfigError as error:
            check_line(error)
            return False
    _check_config(config)
    return True


def _check_config(config: ModelConfig) -> None:
    assert len(config.windows) == config.num_layers <= MAX_SIZES["num_hidden_layers"]
    assert 0 < config.max_position_embeddings <= MAX_SIZES["max_position_embeddings"]
    assert all(window is None or window > 0 for window in config.windows)
    assert config.num_heads % config.num_kv_heads == 0
    for size in (config.hidden_size, config.ffn_size, config.vocab_size, config.num_heads, config.num_kv_heads):
        assert 0 < size <= MAX_SIZE
    assert math.isfinite(config.norm_eps)
    last = torch.tensor([0, config.max_position_embeddings - 1])
    for rope in set(config.rotations):
        cosines, sines = Rope(rope, config.head_dim, torch.device("cpu")).rotations(last)
        assert cosines.isfinite().all()
        assert sines.isfinite().all()
