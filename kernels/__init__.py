"""The ops of a model on one device: each with a contract, a plain torch reference and the versions of its backends."""

from kernels.adjust_logits import LogitAdjustments
from kernels.backend import Backend, load_backend
from kernels.gumbel import noise_key
from kernels.linear import Linear
from kernels.paged import AttentionPlan, PagedKV
from kernels.sample import Draws

__all__ = [
    "AttentionPlan",
    "Backend",
    "Draws",
    "Linear",
    "LogitAdjustments",
    "PagedKV",
    "load_backend",
    "noise_key",
]
