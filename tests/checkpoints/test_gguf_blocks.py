"""Blocks of GGUF tensors against the reference decoder of the format's own package, in float64."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from pagoda_server.checkpoints import CheckpointError
from pagoda_server.checkpoints.folder import read_json_object
from pagoda_server.checkpoints.gguf_blocks import READERS
from pagoda_server.checkpoints.gguf_file import TENSOR_TYPES, GgufFile, GgufTensor
from pagoda_server.checkpoints.gguf_weights import StoredGguf
from pagoda_server.checkpoints.safetensors_file import open_safetensors

SIZES = {name: (values, num_bytes) for name, values, num_bytes in TENSOR_TYPES.values()}
# Where the float16 numbers of a block are.
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q4_K": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
    "Q8_0": [0], "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [],
}  # fmt: skip


def random_blocks(kind: str, rows: int = 5, blocks: int = 6) -> np.ndarray:
    rng = np.random.default_rng(0)
    encoded = rng.integers(0, 256, (rows, blocks, SIZES[kind][1]), np.uint8)
    for start in HALVES[kind]:
        numbers = rng.normal(0, 0.01, (rows, blocks, 1)).astype(np.float16)
        encoded[..., start : start + 2] = numbers.view(np.uint8)
    if kind == "MXFP4":
        encoded[..., 0] = rng.integers(110, 135, (rows, blocks))
    return encoded


def test_every_type_has_the_sizes_of_the_formats_package() -> None:
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {number: theirs[number] for number in TENSOR_TYPES} == TENSOR_TYPES


@pytest.mark.parametrize("kind", READERS)
def test_some_inputs_of_a_matrix_are_those_of_the_whole(kind: str) -> None:
    """Blocks of which a part begins or ends within are read whole."""
    encoded, (size, num_bytes) = random_blocks(kind).reshape(5, -1), SIZES[kind]
    tensor = GgufTensor("name", kind, (5, 6 * size), encoded)
    rows, order = np.array([4, 0, 2]), np.array([2, 4, 1, 3, 0])
    matrix = StoredGguf(None, tensor, order)  # type: ignore[arg-type]  # its file is for `release` alone
    for start, stop in ((0, 2 * size), (size, 6 * size), (96, size + 160), (7, 25)):
        part = matrix.columns(slice(start, stop))
        assert part.shape == (5, stop - start)
        assert np.array_equal(part.whole(rows), matrix.whole(rows)[:, start:stop])
        if (start, stop) == (7, 25):
            assert part.grouping is None
            continue
        assert part.grouping == matrix.grouping
        assert np.array_equal(part.groups(rows).dequantize(part.grouping), part.whole(rows))
        if start % size == stop % size == 0:
            blocks = part.blocks(rows)
            assert blocks is not None
            assert blocks[1].flags.c_contiguous
            assert (
                blocks[1].tobytes()
                == encoded[order[rows], start // size * num_bytes : stop // size * num_bytes].tobytes()
            )


@pytest.mark.parametrize("kind", READERS)
def test_groups_stand_for_the_values_of_their_blocks(kind: str) -> None:
    encoded, reader = random_blocks(kind), READERS[kind]
    whole = gguf.quants.dequantize(encoded.reshape(len(encoded), -1), gguf.GGMLQuantizationType[kind]).astype(
        np.float64
    )
    groups = reader.read(encoded)
    shape = (len(encoded), whole.shape[1] // reader.grouping.group)
    assert groups.scales.shape == shape
    assert groups.scales.dtype == np.float16
    assert groups.values.shape == (*shape, reader.grouping.group // (2 if reader.grouping.bits == 4 else 1))
    assert (groups.minimums is not None) == reader.grouping.has_minimum
    found = groups.dequantize(reader.grouping)
    if kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"):
        assert np.array_equal(found, whole.astype(np.float32))
        return
    # Products of two scales are rounded to float16 once, as are minimums.
    most = np.abs(whole).reshape(*shape, -1).max(-1) + np.abs(groups.minimums if groups.minimums is not None else 0)
    errors = np.abs(found - whole).reshape(*shape, -1).max(-1)
    assert (errors <= 2**-11 * most + 1e-6).all()


def test_codes_of_fewer_bits_stay_in_their_range() -> None:
    for kind, low, high in (("Q5_0", -16, 15), ("Q5_1", 0, 31), ("Q5_K", 0, 31), ("Q6_K", -32, 31)):
        values = READERS[kind].read(random_blocks(kind)).values
        assert values.dtype == np.int8
        assert (values.min(), values.max()) == (low, high)


def test_a_header_or_a_json_file_that_would_fill_memory_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    header = b'{"a": [' + b"[]," * (6 << 20) + b"0]}"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match=f"its header has {len(header)} bytes"):
        open_safetensors(path)
    (tmp_path / "config.json").write_bytes(header)
    with pytest.raises(ValueError, match="has more than 16777216 bytes, the limit"):
        read_json_object(tmp_path / "config.json")


def test_a_header_that_lies_about_its_length_is_refused_at_once(tmp_path: Path) -> None:
    key = b"tokenizer.ggml.tokens"
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + struct.pack("<Q", len(key)) + key + struct.pack("<II", 9, 8)
    texts = struct.pack("<Q", 1) + b"x"
    cases = {
        "too few for a list of 4000000 texts": struct.pack("<Q", 4_000_000) + 700_000 * texts,
        "more than 4194304 texts": struct.pack("<Q", 1 << 62) + texts,
        "bytes, but .* are needed": struct.pack("<Q", 2) + texts + struct.pack("<Q", 1 << 63),
    }
    for message, rest in cases.items():
        (tmp_path / "cut.gguf").write_bytes(head + rest)
        started = time.process_time()
        with pytest.raises(CheckpointError, match=f"cut.gguf is truncated or corrupt: .*{message}"):
            GgufFile(tmp_path / "cut.gguf")
        assert time.process_time() - started < 1
