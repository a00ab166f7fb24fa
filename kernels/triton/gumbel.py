"""`kernels.gumbel` on the device: the same key and bits, so that a seed draws the same tokens on every backend.

The two logarithms that turn bits into noise may differ from the CPU's in their last bit, and a draw with them only
where two tokens' scores are that close.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def noise_key(seed_low, seed_high, position):
    """uint64 of `kernels.gumbel.noise_keys`, from int32 halves of the seed."""
    seed = (seed_high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | seed_low.to(tl.uint32, bitcast=True)
    return _mix_64(_mix_64(seed) ^ position.to(tl.uint64))


@triton.jit
def gumbel(key, token_ids):
    """Noise of each token, float32; `token_ids` int32 of any shape."""
    bits = token_ids.to(tl.uint32, bitcast=True) ^ (key & 0xFFFFFFFF).to(tl.uint32)
    bits = _mix_32(_mix_32(bits) ^ (key >> 32).to(tl.uint32))
    uniform = ((bits >> 8) | 1).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
    return -tl.log(-tl.log(uniform))


@triton.jit
def _mix_64(x):
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _mix_32(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)
