"""A process that compiles kernels for the one that started it, which finds them in Triton's cache.

Run as a script, so that it imports triton and device functions alone: attnops itself imports torch,
which takes seconds. It reads pickled messages: first a `Start`, then a pickled `Job` at a time.
After each job it writes a byte. It ends with its input, after a minute without a job, and in the
middle of one that takes too long.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, BinaryIO

IDLE_S, MOST_S = 60, 120
"""Seconds without a job, and of one job, after which the process ends."""

ALIGNED = 16
"""Triton compiles a kernel for addresses, in bytes, and for whole numbers that are multiples of it,
and another for others."""
DONE = b"\1"

Start = tuple[list[str], dict[str, list[str]], tuple[Any, ...]]
"""sys.path, the folders of packages by name, and the arguments of Triton's GPUTarget."""

Job = tuple[str, str, tuple[Any, ...], dict[str, Any]]
"""The module and name of a device function, and the arguments of its launch."""


@dataclass(frozen=True)
class Dtype:
    """In place of a torch dtype, which Triton knows by its text. itemsize: in bytes."""

    text: str
    itemsize: int

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Pointer:
    """In place of a tensor for Triton's compiler. dtype: torch's, or in its place."""

    dtype: Any
    address: int

    def data_ptr(self) -> int:
        """The address."""
        return self.address

    def ptr_range(self) -> int:
        """Bytes that can be read from there: as of a large tensor."""
        return 1 << 40


@dataclass(frozen=True)
class Described:
    """In place of a TensorDescriptor for pickle. fields: its others by name."""

    base: Pointer
    fields: dict[str, Any]


class Driver:
    """In place of Triton's driver: this process does not use the GPU that it compiles for."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        """The GPU."""
        return self.target

    def get_current_device(self) -> int:
        """The index of the only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """No stream is used."""
        return 0


def unpacked(x: Any) -> Any:
    """An argument as Triton takes it."""
    if not isinstance(x, Described):
        return x
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(base=x.base, **x.fields)


def prepare(start: Start) -> None:
    """Find what the other process finds, and know its GPU."""
    path, packages, target = start
    sys.path[:] = path
    for name, folders in packages.items():
        # In place of the package, whose own code may import torch.
        package = types.ModuleType(name)
        package.__path__ = folders
        sys.modules[name] = package
    # Triton 3.6 looks for torch's class of tensors.
    torch: Any = types.ModuleType("torch")
    torch.Tensor = type("Tensor", (), {})
    sys.modules["torch"] = torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    active: Any = Driver(GPUTarget(*target))
    driver.set_active(active)
    with suppress(Exception):  # of a Triton that has it elsewhere
        import_module("triton.experimental.gluon.nvidia.hopper")
    hash_compiler()


def hash_compiler() -> None:
    """Have Triton hash its own files, which takes a third of a second. The name of a compiled
    kernel has the hash, and threads that compile first would each compute it."""
    compiler: Any = import_module("triton.compiler.compiler")
    from triton.runtime import cache

    # Where it is depends on the release.
    key: Callable[[], str] = getattr(cache, "triton_key", None) or compiler.triton_key
    key()


def compile_job(job: Job) -> None:
    """Compile the kernel of a launch, and where this Triton has one, the function that launches
    it."""
    module, name, args, given = job
    kernel = getattr(import_module(module), name)
    named = {key: unpacked(x) for key, x in given.items()}
    made = kernel.warmup(*map(unpacked, args), grid=(1,), **named)
    with suppress(Exception):  # of a Triton that asks the GPU for it
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(made.src, made.metadata)


def serve(jobs: BinaryIO, answers: BinaryIO) -> None:
    """Answer every job, until there are no more."""
    # An alarm ends the process. The one that started it may ignore them.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(MOST_S)
    prepare(pickle.load(jobs))
    while True:
        signal.alarm(IDLE_S)
        try:
            message: bytes = pickle.load(jobs)
        except EOFError:
            return
        signal.alarm(MOST_S)
        with suppress(Exception):  # the other process compiles it, and raises the error
            compile_job(pickle.loads(message))
        answers.write(DONE)
        answers.flush()


if __name__ == "__main__":
    # Pickled objects are of the module that the other process imports.
    sys.modules["attnops.kernels.shared.launch.compile_worker"] = sys.modules["__main__"]
    # What a compiler prints is no answer.
    with os.fdopen(os.dup(1), "wb") as own, os.fdopen(0, "rb") as given:
        os.dup2(2, 1)
        serve(given, own)
