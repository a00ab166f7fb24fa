"""The parts of the benchmark, in order: each yields rows, and has so many seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

from bench.gpu.rows import Bench, Row


@dataclass(frozen=True, slots=True)
class Part:
    """What `function` of `module` yields; `shape` is the model's name in kernels.triton.inputs, where it takes one."""

    name: str
    limit_s: float
    module: str
    function: str = "rows"
    shape: str = ""

    def rows(self, bench: Bench) -> Iterator[Row]:
        """Imports it only now: a module that is broken is this part's failure alone."""
        function = getattr(import_module(self.module), self.function)
        arguments = [getattr(import_module("pagoda_server.kernels.triton.inputs"), self.shape)] if self.shape else []
        yield from function(bench, *arguments)


CEILINGS = Part("ceilings", 40, "bench.gpu.ceilings")
# Before all others, where they are asked for.
CHECKS = (
    Part("tests of kernels", 240, "bench.gpu.checks", "kernel_rows"),
    Part("tests of the runner", 120, "bench.gpu.checks", "runner_rows"),
    Part("tests of the server", 60, "bench.gpu.checks", "server_rows"),
)
PARTS = (
    CEILINGS,
    Part("decode attention", 60, "bench.gpu.attention", "decode_rows"),
    Part("decode step 8B", 110, "bench.gpu.step", shape="LLAMA_8B"),
    Part("decode step 1B", 70, "bench.gpu.step", shape="LLAMA_1B"),
    Part("prefill attention", 50, "bench.gpu.attention", "prefill_rows"),
    Part("layers", 40, "bench.gpu.layers"),
    Part("sampling", 40, "bench.gpu.sampling"),
    Part("projections", 60, "bench.gpu.projections"),
    Part("serving", 150, "bench.gpu.serving"),
)
