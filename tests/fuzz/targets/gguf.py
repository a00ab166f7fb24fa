"""A GGUF file: it is imported, and what the import wrote is read as a model folder's files are."""

from __future__ import annotations

from pagoda_server.checkpoints.folder import CheckpointError, check_folder
from pagoda_server.checkpoints.gguf_import import import_gguf
from pagoda_server.checkpoints.progress import no_progress
from pagoda_server.engine.core.errors import ConfigError
from pagoda_server.engine.models import read_config
from tests.fuzz.common import check_line, folder_of
from tests.fuzz.targets import tokenizer


def check(data: bytes) -> bool:
    with folder_of(model__gguf=data) as folder:
        imported = folder / "imported"
        imported.mkdir()
        try:
            import_gguf(folder / "model.gguf", imported, no_progress)
            (imported / "model.gguf").symlink_to(folder / "model.gguf")
            check_folder(imported)
        except CheckpointError as error:
            check_line(error)
            return False
        try:
            read_config(imported)
        except ConfigError as error:
            check_line(error)
            return False
        return tokenizer.check_folder(imported)
