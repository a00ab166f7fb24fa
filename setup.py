"""Builds the CPU kernels; everything else about the package is in pyproject.toml."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

COMPILERS = "GCC 12 or clang 14, or a newer one"
# A decode step was 9 % slower with plain -O2. These passes of -O3 make up for that; all of -O3 was no faster, and took
# a quarter longer to compile.
GCC_OPTIMIZATION = (
    "-O2 -fvect-cost-model=dynamic -fpeel-loops -funswitch-loops -fsplit-paths -fsplit-loops -fgcse-after-reload"
    " -fipa-cp-clone -fpredictive-commoning"
)
LONGEST = ("isa_generic.cpp", "isa_avx512.cpp", "isa_avx2.cpp")  # to compile, so they go first


class BuildKernels(build_ext):
    """Compiles an extension's sources on all cores. If that fails, one line says so and names what it needs."""

    def build_extensions(self) -> None:
        compile_in_turn = self.compiler.compile

        def compile_at_once(sources: list[str], **options: Any) -> list[str]:
            sources = sorted(sources, key=lambda source: not source.endswith(LONGEST))
            with ThreadPoolExecutor(os.cpu_count()) as cores:
                objects = list(cores.map(lambda source: compile_in_turn([source], **options), sources))
            return [name for names in objects for name in names]

        self.compiler.compile = compile_at_once
        for stale in Path(__file__).parent.glob("kernels/_native.*"):
            stale.unlink()  # compiled from older sources, perhaps under a name that Python prefers
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        ext.extra_compile_args += self._optimization()
        try:
            super().build_extension(ext)
        except Exception:  # the caller ignores it, since the extension is optional
            print(
                f"pagoda: the CPU kernels did not compile with {self._program()}: they need {COMPILERS}."
                " Pagoda uses plain torch instead, which is several times as slow.",
                file=sys.stderr,
                flush=True,
            )
            raise

    def _program(self) -> str:
        return str(getattr(self.compiler, "compiler_so_cxx", ["c++"])[0])

    def _optimization(self) -> list[str]:
        """The flags of GCC, or of any other compiler, which need not know GCC's passes."""
        try:
            version = subprocess.run([self._program(), "--version"], capture_output=True, text=True, check=False).stdout
        except OSError:  # there is no compiler, as the build is about to say
            version = ""
        return GCC_OPTIMIZATION.split() if "Free Software Foundation" in version else ["-O3"]


# The compiled module keeps to the stable ABI of Python 3.11 (kernels/native/module.cpp): one wheel fits all later ones.
setup(cmdclass={"build_ext": BuildKernels}, options={"bdist_wheel": {"py_limited_api": "cp311"}})
