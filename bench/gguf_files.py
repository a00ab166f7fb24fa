"""The model as GGUF files, for peers that read nothing else."""

from __future__ import annotations

from pathlib import Path

import gguf
from gguf.quants import dequantize, quantize

from bench.errors import BenchError
from checkpoints import DEFAULT_MODEL, Progress
from checkpoints.cache import Cache
from checkpoints.default_model import fetch_gguf
from checkpoints.files import written_whole


def quantized_gguf(model: str, progress: Progress) -> Path:
    """The file that the model came from. Raises BenchError if it came from none."""
    if model == DEFAULT_MODEL:
        folder = Cache.default().root / "bench"
        folder.mkdir(parents=True, exist_ok=True)
        return fetch_gguf(folder, progress)
    if model.endswith(".gguf"):
        return Path(model)
    raise BenchError(f"no GGUF file of {model} is known: --gguf names one")


def bfloat16_gguf(source: Path) -> Path:
    """A copy with every matrix dequantised to bfloat16, kept beside the benchmark's other files."""
    target = Cache.default().root / "bench" / f"{source.stem}-{source.stat().st_size}-bf16.gguf"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(source)
    with written_whole(target) as partial:
        architecture = reader.fields[gguf.Keys.General.ARCHITECTURE].contents()
        writer = gguf.GGUFWriter(partial, architecture)
        _copy_metadata(reader, writer)
        for tensor in reader.tensors:
            values = dequantize(tensor.data, tensor.tensor_type)
            if values.ndim == 1:  # norms and biases, which every reader wants in float32
                writer.add_tensor(tensor.name, values)
            else:
                kind = gguf.GGMLQuantizationType.BF16
                writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return target


def _copy_metadata(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    written_anyway = {gguf.Keys.General.ARCHITECTURE, gguf.Keys.General.FILE_TYPE}
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in written_anyway:
            continue
        element = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=element)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
