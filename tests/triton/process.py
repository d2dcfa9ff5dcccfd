"""Runs tests in processes of their own, because Triton decides when it is imported whether it
interprets or compiles.

The one process interprets: kernels run on CPU tensors. The other compiles and launches nothing.
Neither sees a GPU. Every test process has at most one of each.
"""

import functools
import gc
import os
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed: pip install 'attnops[triton]'"
)


@functools.cache
def _process(interpret: bool) -> ProcessPoolExecutor:
    with patch.dict(
        os.environ, {"TRITON_INTERPRET": str(int(interpret)), "CUDA_VISIBLE_DEVICES": ""}
    ):
        pool = ProcessPoolExecutor(1, get_context("spawn"), _prepare, (interpret,))
        pool.submit(int).result()
    return pool


def _prepare(interpret: bool) -> None:
    import torch

    torch.set_num_threads(1)
    if interpret:
        import numpy
        from triton.language import core
        from triton.runtime import interpreter

        numpy.seterr(all="ignore")  # log2(0) is what is meant
        patch_tensor, patch_language = interpreter._patch_lang_tensor, interpreter._patch_lang
        create_splat = interpreter.InterpreterBuilder.create_splat

        def splat(builder: Any, kind: Any, value: Any) -> Any:
            # Triton makes int32 of a flag that it spreads over a block. From 3.9 on it refuses such
            # a mask.
            found = create_splat(builder, kind, value)
            if value.data.dtype == bool:
                found.data = found.data.astype(bool)
            return found

        def patched(tensor: Any, scope: Any) -> None:
            # Triton 3.6 makes an int of an array of one number, which numpy no longer does.
            patch_tensor(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        modules = set()

        def patched_once(function: Any) -> Any:
            # Triton looks through its whole language at every call of a device function, a third of
            # the time it takes, and undoes after a launch what it changed. Nothing compiles here,
            # so what is changed can stay.
            if function.__module__ not in modules:
                modules.add(function.__module__)
                patch_language(function)
            return SimpleNamespace(restore=lambda: None)

        numpy_types, numpy_type = dict[str, Any](), interpreter._get_np_dtype

        def numpy_type_once(kind: Any) -> Any:
            # Triton makes its table of all types at every question, a tenth of the time it takes.
            name = kind.scalar.name
            if name not in numpy_types:
                numpy_types[name] = numpy_type(kind)
            return numpy_types[name]

        shapes, block_type = dict[tuple[int, ...], Any](), core.block_type.__init__

        def block_type_once(self: Any, element_ty: Any, shape: Any) -> None:
            # Triton checks the shape of every result and writes it out, an eighth of the time it
            # takes.
            sizes = tuple([getattr(size, "value", size) for size in shape])
            if sizes not in shapes or any(type(size) is not int for size in sizes):
                block_type(self, element_ty, shape)
                shapes[sizes] = self.shape, self.numel, str(self.shape)
            self.element_ty = element_ty
            self.shape, self.numel, written = shapes[sizes]
            self.name = f"<{written}, {element_ty}>"

        core.block_type.__init__ = block_type_once
        interpreter._patch_lang_tensor, interpreter._patch_lang = patched, patched_once
        interpreter._get_np_dtype = numpy_type_once
        interpreter.InterpreterBuilder.create_splat = splat
        # Without `debug` Triton computes whether each sum of integers overflows, a third of the
        # time it takes, and drops the answer.
        options = interpreter.interpreter_builder.options
        assert not options.debug
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    # As in tests/conftest.py: Triton allocates by the million.
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def _run(module: str, name: str, given: dict[str, Any]) -> tuple[str, str]:
    import torch

    torch.manual_seed(0)
    test = getattr(import_module(module), name)
    try:
        test.__wrapped__(**given)
    except pytest.skip.Exception as skipped:
        return "skipped", str(skipped)
    except (
        BaseException
    ):  # whatever it is, it is told as text: not every exception survives the way back
        return "failed", traceback.format_exc()
    return "passed", ""


def _elsewhere(interpret: bool, test: Callable[..., None]) -> Callable[..., None]:
    @needs_triton
    @functools.wraps(test)
    def run(**given: Any) -> None:
        outcome, text = (
            _process(interpret).submit(_run, test.__module__, test.__name__, given).result()
        )
        if outcome == "skipped":
            pytest.skip(text)
        assert outcome == "passed", text

    return run


def interpreted(test: Callable[..., None]) -> Callable[..., None]:
    """Run the test where Triton interprets. Its arguments go there pickled; it takes no
    fixtures."""
    return _elsewhere(True, test)


def compiled(test: Callable[..., None]) -> Callable[..., None]:
    """Run the test where Triton compiles."""
    return _elsewhere(False, test)
