from __future__ import annotations

import numpy as np
import pytest

from pagoda_server.kernels.triton.configs import IS_INTERPRETED

DEVICE = "cpu" if IS_INTERPRETED else "cuda"


def compute_each_element_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter compute an element of a product from its row and its column alone, as a GPU does.

    With NumPy's own, an element depends on its place: at the edges of a matrix other instructions compute it.
    """

    def matmul(left: np.ndarray, right: np.ndarray, dtype: np.dtype | None = None) -> np.ndarray:
        left, right = left.astype(dtype), right.astype(dtype)
        product = np.zeros((left.shape[0], right.shape[1]), dtype=dtype)
        for column, row in zip(left.T, right, strict=True):
            product += column[:, None] * row
        return product

    if IS_INTERPRETED:
        monkeypatch.setattr(np, "matmul", matmul)
