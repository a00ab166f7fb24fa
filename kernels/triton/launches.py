"""Records the kernels that launchers launch, and compiles them without a GPU."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from tempfile import NamedTemporaryFile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .dependent_launch import CONSTANTS

# The most shared memory of one block, in bytes, by compute capability (CUDA C++ Programming Guide, table of limits).
SHARED_LIMITS = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}

# What a launcher may set.
_OPTIONS = ("num_warps", "num_ctas", "num_stages", "maxnreg", "enable_fp_fusion", "launch_pdl")

_VECTOR = re.compile(r"\b(ld|st)\.global[\w:.]*?(?:\.v(\d))?\.[busf](\d+)\b")
_ASYNC_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global(?:\.\w[\w:]*)* \[[^]]*\], \[[^]]*\], (0x[0-9a-f]+|\d+)")
_LOCAL_ACCESS = re.compile(r"\b(LDL|STL)\b")
_PRODUCT, _WAIT = re.compile(r"\bHGMMA\b"), re.compile(r"\bWARPGROUP\.DEPBAR\b")
_NO_STATEMENT = re.compile(r"//.*|^\s*\.(loc|reg|pragma)\b.*|^\s*\$\w+:|@!?%\w+", re.MULTILINE)
_STATEMENT = re.compile(r"([a-z][\w.:]*)\s*([^;]*);")
_REGISTER, _PARAMETER = re.compile(r"%\w+"), re.compile(r"\w+_param_(\d+)\b")
_ACCESS = re.compile(r"(ld|st|atom|red|cp)\.(?!param|shared\.(?!global)|shared$|local|const|async\.(commit|wait))")
_MACHINE_ACCESS = re.compile(r"\b(LD|LDG|LDGSTS|ST|STG|ATOM|ATOMG|RED|REDG|UBLKCP|UTMALDG|UTMASTG)\b")
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel as Triton would compile it for one call of a launcher.

    capability  compute capability, 90 for an H100
    identity    the same for launches that share compiled code
    """

    kernel: Any
    capability: int
    signature: dict[str, str]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]
    identity: str

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)


@dataclass(frozen=True, slots=True)
class Compiled:
    """The resources of a compiled kernel.

    registers     per thread
    spilled       bytes per thread in device memory for lack of registers
    shared        bytes of shared memory per block
    load, store   bytes that a thread moves with its widest access to device memory; 0: it has no access
    products      asynchronous matrix instructions (compute capability 9.0 only)
    waits         waits for them; as many as products mean that none overlap (ptxas's warnings C7510 to C7519)
    dependent     1 if it starts before the kernel before it ends, and lets the next one do so
    unguarded     what it must not do before it waits for the kernel before it: see dependent_launch.py
    """

    num_warps: int
    num_stages: int
    registers: int
    spilled: int
    shared: int
    load: int
    store: int
    products: int = 0
    waits: int = 0
    dependent: int = 0
    unguarded: int = 0


class _NoDevice:
    """A stand-in for Triton's driver that names the target to specialize kernels for."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return int(self._target.arch)  # Triton keeps specializations by device, so each target is a device

    def get_current_stream(self, device: int) -> int:
        return 0


def record(capability: int, call: Callable[[], object]) -> list[Launch]:
    """Record what `call` launches on tensors of the meta device, in order, each specialization once. Nothing runs."""
    launches: dict[str, Launch] = {}

    def note(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        given = json.loads(compile["specialization_data"])["options"]
        options = {name: given[name] for name in _OPTIONS if given[name] is not None}
        launch = Launch(
            fn.jit_function,
            capability,
            compile["signature"],
            compile["constants"],
            compile["configs"][0],
            options,
            identity=f"{fn.module}.{fn.name} {key}",
        )
        launches.setdefault(launch.identity, launch)
        return True  # skip compilation, and so the launch

    previous = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = note
    triton.runtime.driver.set_active(_NoDevice(capability))
    try:
        call()
    finally:
        triton.knobs.runtime.jit_cache_hook = previous
    return list(launches.values())


def compile_kernel(launch: Launch) -> Any:
    """Compile a recorded launch to Triton's kernel. Raises Triton's exception if it does not compile."""
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    return triton.compile(source, target=GPUTarget("cuda", launch.capability, 32), options=launch.options)


def compile_launch(launch: Launch) -> Compiled:
    """Compile a recorded launch, and measure the code."""
    compiled = compile_kernel(launch)
    registers, spilled = resources(compiled.asm["cubin"])
    load, store = widest_accesses(compiled.asm["ptx"])
    products, waits = warpgroup_products(compiled.asm["cubin"]) if "wgmma" in compiled.asm["ptx"] else (0, 0)
    is_dependent = launch.options.get("launch_pdl", False)
    return Compiled(
        num_warps=compiled.metadata.num_warps,
        num_stages=compiled.metadata.num_stages,
        registers=registers,
        spilled=spilled,
        shared=compiled.metadata.shared,
        load=load,
        store=store,
        products=products,
        waits=waits,
        dependent=int(is_dependent and "griddepcontrol.launch_dependents" in compiled.asm["ptx"]),
        unguarded=unguarded(compiled.asm, launch.signature) if is_dependent else 0,
    )


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, and bytes per thread spilled to device memory."""
    found = _RESOURCES.search(output := _cuobjdump(cubin, "-res-usage"))
    assert found, output
    registers, stack, local = (int(number) for number in found.groups())
    # A reserved frame may be unused; then no instruction accesses local memory.
    spilled = max(stack, local)
    return registers, spilled if spilled and _LOCAL_ACCESS.search(_cuobjdump(cubin, "-sass")) else 0


def warpgroup_products(cubin: bytes) -> tuple[int, int]:
    """The number of matrix instructions of warp groups, and of waits for them."""
    code = _cuobjdump(cubin, "-sass")
    return len(_PRODUCT.findall(code)), len(_WAIT.findall(code))


@lru_cache(4)  # it takes a third of a second to disassemble a large kernel
def _cuobjdump(cubin: bytes, what: str) -> str:
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def widest_accesses(ptx: str) -> tuple[int, int]:
    """The bytes of the widest load from device memory and of the widest store to it."""
    widest = {"ld": 0, "st": 0}
    for kind, elements, bits in _VECTOR.findall(ptx):
        widest[kind] = max(widest[kind], int(elements or 1) * int(bits) // 8)
    copies = [int(size, 0) for size in _ASYNC_COPY.findall(ptx)]
    return max([widest["ld"], *copies]), widest["st"]


def unguarded(asm: Mapping[str, Any], signature: Mapping[str, str]) -> int:
    """Count the branches, returns and accesses to device memory before a kernel waits for the one before it.

    asm        PTX and machine code
    signature  the kernel's parameters by name, from which `CONSTANTS` are known: loads from them do not count
    """
    body = asm["ptx"][asm["ptx"].index(".entry") :].split("{", 1)[1]
    early, wait, _ = body.partition("griddepcontrol.wait")
    names = [name for name, kind in signature.items() if kind != "constexpr"]
    sources: dict[str, set[str]] = {}  # of each register: the parameters that its value depends on
    wrong, num_loads = int(not wait), 0
    for code, operands in _STATEMENT.findall(_NO_STATEMENT.sub("", early)):
        found = {names[int(number)] for number in _PARAMETER.findall(operands)}
        found = found.union(*(sources.get(register, ()) for register in _REGISTER.findall(operands)))
        results = operands.partition("}" if operands.startswith("{") else ",")[0]
        sources |= dict.fromkeys(_REGISTER.findall(results), found)
        if code.split(".")[0] in ("bra", "brx", "ret", "exit", "call"):
            wrong += 1
        elif _ACCESS.match(code):
            num_loads += 1
            pointers = {name for name in found if signature[name].startswith("*")}
            wrong += not (code.startswith(("ld.", "cp.")) and pointers and pointers <= CONSTANTS)
    # The assembler must not have moved others before the wait.
    machine_early, machine_wait, _ = _cuobjdump(asm["cubin"], "-sass").partition("ACQBULK")
    return wrong + (not machine_wait) + max(len(_MACHINE_ACCESS.findall(machine_early)) - num_loads, 0)
