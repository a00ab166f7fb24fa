"""Programmatic dependent launch: a kernel starts while the kernel before it still runs, from capability 9.0 on.

A kernel launched this way starts as soon as every program of the kernel before it on the stream has called
`await_previous` or has ended. Without it, each launch waits until the GPU is empty, which costs microseconds that a
decode step pays some ten times a layer. CUDA graphs keep the property.

The rule that makes this correct: **every program calls `await_previous` before it reads what any kernel writes, before
its first store or atomic, and before it returns, early or not.** The call returns once the previous kernel has
completed and its writes are visible. So

- the kernels before that one have completed too, since it has made the same call or was launched the usual way;
- memory that earlier kernels still read, or that the allocator has given out again, is not written too early.

Only constants may be read before the call, to hide the time of their loads: weights, which nothing has written since
the host last waited for the device. Block tables, lengths and positions are no constants, although copies write them.

A kernel that lacks the property, of a library or a copy, waits for the whole kernel before it, as ever.

A launcher passes `**dependent_launch()`; its kernel has the parameter `PDL: tl.constexpr`, and calls
`await_previous(PDL)` before its first branch. The compile gate checks the machine code: no branch, no return, no store
and no load comes first, except loads from the parameters in `CONSTANTS`.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from .configs import capability, tuned

FIRST_CAPABILITY = 90
CONSTANTS = frozenset({"weight_ptr", "scales_ptr", "minimums_ptr", "bias_ptr", "query_norm_ptr", "key_norm_ptr"})


@dataclass(frozen=True, slots=True)
class Config:
    """is_on  0 or 1; a GPU's table may turn it off, and a benchmark may compare both."""

    is_on: int


ON, OFF = Config(is_on=1), Config(is_on=0)


def dependent_launch() -> dict[str, bool]:
    """Return the options of a launch on the current GPU: `PDL` for the kernel, and `launch_pdl` for Triton."""
    is_dependent = capability() >= FIRST_CAPABILITY and tuned("dependent_launch", "", ON) == ON
    return {"PDL": is_dependent, "launch_pdl": is_dependent}


@triton.jit
def await_previous(PDL: tl.constexpr):
    """Wait for the kernel before this one. Then let the next kernel start: all programs of it will wait in turn."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
