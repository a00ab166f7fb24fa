"""Imports torch for a CPU in less time and memory: modules that serving does not use wait until something does."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

NVIDIA_DRIVER = Path("/dev/nvidiactl")
FUNCTION = object()


class _Until(type):
    """A class that stands for the one of its name in a module until that has been loaded, and for it afterwards."""

    def __instancecheck__(cls, instance: object) -> bool:
        module = sys.modules[cls.__module__]
        return not isinstance(module, _Waiting) and isinstance(instance, getattr(module, cls.__name__))

    def __call__(cls, *args: Any) -> Any:
        module = sys.modules[cls.__module__]
        module.__dict__["__load__"]()
        return getattr(module, cls.__name__)(*args)


_SYM_NODE = "torch.fx.experimental.sym_node"
# Compiled code takes this class once, on any call, under a lock that its module's own file would wait for.
_DYNAMIC_INT = _Until("DynamicInt", (), {"__module__": _SYM_NODE})

# What waits, in an order in which these modules can be loaded, as their imports are circular. Each has the names that
# torch imports from it before it uses them, with their values for the time until then; FUNCTION calls the module's own.
# What traces, compiles or trains a model uses these, and so does the meta device.
WAITING: Mapping[str, Mapping[str, Any]] = {
    "torch.fx": {},
    "torch.fx.experimental": {},
    _SYM_NODE: {"DynamicInt": _DYNAMIC_INT},
    "torch.fx.operator_schemas": {"_SCHEMA_TO_SIGNATURE_CACHE": {}},  # of which a library removes its own operators
    "torch._logging": {"_init_logs": lambda: None},  # of the compiler, which initializes its own
    "torch.distributions": {},
    "torch.hub": {},
    "torch.nested": {},
    "torch.optim": {},
    "torch.profiler": {},
    "torch.sparse": {},
    "torch.utils.data": {},
    "torch.mps": {},
    "torch.mtia": {},
    "torch.ao": {},
    "torch.nn.intrinsic": {},
    "torch.nn.qat": {},
    "torch.nn.quantizable": {},
    "torch.nn.quantized": {},
    "torch.quantization": {},
    "torch._lobpcg": {"lobpcg": FUNCTION},
    "torch.masked": {},
    "torch.export": {},
    "torch.func": {"vmap": FUNCTION},
    "torch._higher_order_ops": {"cond": FUNCTION, "while_loop": FUNCTION},
    "torch.distributed._meta_registrations": {},
    "torch._meta_registrations": {},
    "torch.compiler": {},
    "torch._native": {},
    "torchgen.model": {},
}


def preload_torch() -> None:
    """Let another thread map and link torch's libraries, which is a third of its import, while this one goes on."""
    spec = find_spec("torch")  # which imports nothing
    if NVIDIA_DRIVER.exists() or spec is None or not spec.submodule_search_locations or sys.platform != "linux":
        return
    limit_spinning()
    library = Path(spec.submodule_search_locations[0], "lib", "libtorch_cpu.so")
    # A call of dlopen as any function releases the interpreter's lock, while CDLL keeps it. torch reports what fails.
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    threading.Thread(target=dlopen, args=(os.fsencode(library), os.RTLD_NOW), name="libraries", daemon=True).start()


def import_torch() -> None:
    """Import torch, without the modules of WAITING where there is no GPU."""
    limit_spinning()
    if "torch" in sys.modules or NVIDIA_DRIVER.exists():
        return
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    import torch  # noqa: F401

    finder.is_complete = True


def limit_spinning() -> None:
    """Set, before a library reads it, how long threads spin at the end of a parallel region.

    That is long by default. If another process has taken the core of the one thread that still works, each of a step's
    many regions can then last a time slice (docs/performance.md).
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def waiting_modules() -> list[str]:
    """The modules that nothing has used yet."""
    return [name for name, module in sys.modules.items() if isinstance(module, _Waiting)]


class _Waiting(ModuleType):
    """A module whose file has not run yet."""

    def __getattr__(self, name: str) -> Any:
        # Imports and inspection ask every module for such names, which say nothing about a use of it.
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__dict__["__load__"]()
        return ModuleType.__getattribute__(self, name)


class _Finder(Loader):
    """Finds the modules that wait, and loads them.

    While torch is being imported, a module that is asked for another name is loaded alone, as torch expects. Later the
    first such question loads all.
    """

    def __init__(self) -> None:
        self.is_complete = self._loads_all = False
        self._loaders: dict[str, Loader] = {}  # of what has not been loaded
        self._lock = threading.RLock()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in WAITING and not self.is_complete:
            spec = PathFinder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                self._loaders[name], spec.loader = spec.loader, self
            return spec
        if self.is_complete and name.startswith("torch.") and self._loaders and not self._loads_all:
            # What torch imports only now expects all of it. It may have been imported by that already.
            self._load_all()
            if (module := sys.modules.get(name)) is None:
                return None
            # The import system takes the spec of a module that has come meanwhile, and would run its file again.
            spec = module.__spec__ = ModuleSpec(name, _Loaded(module))
            return spec
        parent = sys.modules.get(name.rpartition(".")[0])
        if isinstance(parent, _Waiting):
            self._load(parent)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Waiting(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__load__"] = lambda: self._load(module)
        for name, value in WAITING[module.__name__].items():
            setattr(module, name, self._function(module, name) if value is FUNCTION else value)

    def _load(self, module: ModuleType) -> None:
        """Run a module's file, unless this thread runs it already or another one has run it."""
        with self._lock:
            if self.is_complete and not self._loads_all:
                self._load_all()
            self._load_one(module)

    def _load_all(self) -> None:
        with self._lock:
            self._loads_all = True
            for name in WAITING:
                if name in self._loaders:
                    self._load_one(sys.modules[name])

    def _load_one(self, module: ModuleType) -> None:
        loader = self._loaders.pop(module.__name__, None)
        if loader is None:
            return
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = loader
        loader.exec_module(module)
        module.__class__ = ModuleType

    def _function(self, module: ModuleType, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._load(module)
            return getattr(module, name)(*args, **kwargs)

        return call


class _Loaded(Loader):
    """Gives a module that has been imported."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
