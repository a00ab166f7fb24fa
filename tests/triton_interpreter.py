"""Spare Triton's interpreter what it computes again for each operation: about half of its time."""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest


def patch_interpreter(patch: pytest.MonkeyPatch) -> None:
    interpreter = importlib.import_module("triton.runtime.interpreter")
    core = interpreter.tl.core
    semantic = interpreter.interpreter_semantic
    is_patched = False

    # It patches triton.language for a launch, and again for each inner call. It patches the modules that a function
    # knows; those of Triton's own functions know another.
    patch_language, scope_type = interpreter._patch_lang, interpreter._LangPatchScope
    all_modules = SimpleNamespace(__globals__={"tl": interpreter.tl, "core": core})

    def patch_once(_: object) -> Any:
        nonlocal is_patched
        if is_patched:
            return scope_type()
        scope = patch_language(all_modules)
        restore = scope.restore

        def restored() -> None:
            nonlocal is_patched
            is_patched = False
            restore()

        scope.restore = restored
        is_patched = True
        return scope

    patch.setattr(interpreter, "_patch_lang", patch_once)

    # Sums of integers are computed twice, to find overflows, which are then told only with `debug`.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))

    # Types of the same name are the same NumPy type: each look-up builds the table of all.
    numpy_type_of, numpy_types = interpreter._get_np_dtype, {}

    def numpy_type(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type_of(kind)
        return numpy_types[name]

    patch.setattr(interpreter, "_get_np_dtype", numpy_type)

    # Tensors of the same shape share it.
    @cache
    def shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        made = core.tensor.__new__(core.tensor)
        make_tensor(made, None, core.block_type(core.float32, list(sizes)) if sizes else core.float32)
        return made.shape, made.numel

    def made_tensor(tensor: Any, handle: Any, kind: Any) -> None:
        tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
        tensor.shape, tensor.numel = shape_of(tuple(kind.shape.values) if kind.is_block() else ())

    make_tensor = core.tensor.__init__
    patch.setattr(core.tensor, "__init__", made_tensor)

    @cache
    def block_of(sizes: tuple[int, ...]) -> tuple[Any, int, str]:
        made = core.block_type.__new__(core.block_type)
        make_block(made, core.float32, list(sizes))
        return made.shape, made.numel, str(made.shape)

    def made_block(block: Any, element: Any, shape: Any) -> None:
        sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        block.element_ty = element
        block.shape, block.numel, text = block_of(sizes)
        block.name = f"<{text}, {element}>"

    make_block = core.block_type.__init__
    patch.setattr(core.block_type, "__init__", made_block)

    # Nothing is broadcast between two blocks of one shape.
    broadcast = type(semantic).broadcast_impl_value

    def broadcast_if_needed(self: Any, left: Any, right: Any) -> Any:
        is_same = left.shape is right.shape and left.type.is_block()
        return (left, right) if is_same else broadcast(self, left, right)

    patch.setattr(type(semantic), "broadcast_impl_value", broadcast_if_needed)
