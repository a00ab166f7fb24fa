"""How a folder holds quantized weights, whatever kind of file they came from.

A quantized weight W [out, in] takes the place of one tensor by three, and weight = scale * value + minimum:

W.values    U8   [out, groups, 16], of a group of 32 inputs: the first 16 in low nibbles, the others in high ones
W.scales    F16  [out, groups]
W.minimums  F16  [out, groups]

Which weights are quantized is told by the names; that some are, by `quantization_config` in config.json. Every other
tensor is stored as it is.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

BITS = 4
GROUP_SIZE = 32
GROUP_BYTES = GROUP_SIZE * BITS // 8
VALUES, SCALES, MINIMUMS = ".values", ".scales", ".minimums"

QUANTIZATION_CONFIG: dict[str, object] = {"quant_method": "pagoda", "bits": BITS, "group_size": GROUP_SIZE}


def quantized_names(tensors: Iterable[str]) -> frozenset[str]:
    """The weights that are quantized, by the names of all tensors in a folder."""
    return frozenset(name.removesuffix(VALUES) for name in tensors if name.endswith(VALUES))


def dequantize(
    values: NDArray[np.uint8], scales: NDArray[np.float16], minimums: NDArray[np.float16]
) -> NDArray[np.float32]:
    """[rows, in], of arrays as this module describes them, or [groups, 32] of groups without rows."""
    nibbles = np.concatenate([values & 15, values >> 4], axis=-1).astype(np.float32)
    nibbles *= scales[..., None].astype(np.float32)
    nibbles += minimums[..., None].astype(np.float32)
    return nibbles.reshape(len(values), -1)
