"""FlashInfer's libraries where several GPUs are visible: what they do once in a process, on the GPU
that is current then.

`xqa`: a library asks for its kernel's shared memory while it is loaded, of the current GPU alone
(csrc/xqa/mha.cu, `configureKernel`), and a file that is loaded already is not loaded again. So each
GPU gets a copy of its own, loaded while that GPU is the current one.

`trtllm`: the kernels of a dtype are loaded for the first GPU that calls them, kept, and launched on
every other GPU, too (csrc/trtllm_fmha_kernel_launcher.cu, `TllmGenFmhaRunnerCache`). So these
kernels refuse where another GPU is visible.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnops.core.errors import NotLoaded, one_line
from attnops.core.kernel import renew
from attnops.core.problem import Refusal, Target
from attnops.kernels.flashinfer.libraries import SHORT, Library, announce
from attnops.kernels.flashinfer.modules import no_compiler

ONE = "1 visible GPU (CUDA_VISIBLE_DEVICES)"


def visible() -> int:
    """The GPUs that this process can use."""
    return torch.cuda.device_count()


def several(target: Target) -> bool:
    """Is the target this machine, with more than one GPU?"""
    return target.assume is None and visible() > 1


def trtllm_missing(target: Target) -> Refusal | None:
    """A probe of the generated kernels."""
    if (refusal := no_compiler(target)) is not None or not several(target):
        return refusal
    return Refusal(
        "devices", visible(), f"{ONE}: FlashInfer launches the first GPU's kernels on every GPU"
    )


def xqa_missing(target: Target) -> Refusal | None:
    """A probe of `xqa`."""
    if (refusal := no_compiler(target)) is not None or not several(target):
        return refusal
    want = _unloadable()
    return Refusal("devices", visible(), f"{ONE}, or {want}") if want else None


def _unloadable() -> str:
    """Why no copy of a library can be loaded; "" where nothing is known to be in the way."""
    folder = tempfile.gettempdir()
    if os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):
        return (
            "a folder for temporary files (TMPDIR) from which libraries may be loaded: not "
            f"{folder}"
        )
    return next(iter(_failures()), "")


@functools.cache
def _failures() -> list[str]:
    """What a library that could not be loaded again wanted: `xqa` is not chosen after that."""
    return []


def xqa_module(device: torch.device, *key: Any) -> Callable[..., None]:
    """`get_xqa_module(*key).xqa`, for tensors on `device`, which is the current one. Raises
    NotLoaded."""
    _announce_xqa(*key)
    if visible() > 1:
        return _loaded_on(device.index, key)
    from flashinfer.xqa import get_xqa_module  # pyright: ignore[reportAttributeAccessIssue]

    found: Callable[..., None] = get_xqa_module(*key).xqa
    return found


@functools.cache
def _announce_xqa(*key: Any) -> None:
    announce(xqa_library(*key))


def xqa_library(
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    page: int,
    dim: int,
    group: int,
    window: bool,
    out_dtype: torch.dtype,
    queries: int,
) -> Library:
    """What is built of the module of this key of `get_xqa_module`: the output is of the query's
    dtype, and `queries` is 1."""
    types = (str(dtype), str(kv_dtype))
    flag = ":window" if window else ""
    word = ":".join(["xqa", *(t.removeprefix("torch.") for t in types), f"{page}:{dim}:{group}"])
    name = (
        f"xqa_input_{SHORT[dtype]}_kv_cache_{SHORT[kv_dtype]}_output_{SHORT[out_dtype]}"
        f"_page_size_{page}_head_dim_{dim}_head_group_ratio_{group}_use_sliding_window_{window}"
        f"_use_spec_dec_False_spec_q_seq_len_{queries}"
    )
    key = (dtype, kv_dtype, page, dim, group, window, out_dtype, queries)
    return Library(word + flag, (name,), functools.partial(_load_xqa, key))


def _load_xqa(key: tuple[Any, ...]) -> Any:
    from flashinfer.jit.xqa import gen_xqa_module  # pyright: ignore[reportAttributeAccessIssue]

    return gen_xqa_module(*key).build_and_load()


@functools.cache
def _loaded_on(index: int, key: tuple[Any, ...]) -> Callable[..., None]:
    """The module of a GPU that several are visible beside. index: its number, for the cache."""
    from flashinfer.jit.xqa import gen_xqa_module  # pyright: ignore[reportAttributeAccessIssue]

    spec = gen_xqa_module(*key)
    spec.build_and_load()  # so that the file is there
    return functools.partial(_called, _copy_of(spec).xqa_wrapper)


def _copy_of(spec: Any) -> Any:
    """The library of a module, loaded again. Raises NotLoaded."""
    path = spec.get_library_path()
    try:
        with tempfile.TemporaryDirectory(prefix="attnops-") as folder:
            return spec.load(
                shutil.copy(path, folder)
            )  # a library that is loaded needs its file no longer
    except Exception as error:  # the loader raises whatever it likes
        want = (
            f"a copy of {path.name} in {tempfile.gettempdir()} (TMPDIR) that can be loaded, "
            "one for each GPU"
        )
        _failures().append(want)
        renew()
        raise NotLoaded("flashinfer", one_line(error), f"{want}, or {ONE}") from error


def _called(wrapper: Callable[..., None], *given: Any) -> None:
    """The library's own function. given: the arguments of `get_xqa_module(...).xqa`, whose two
    scales are numbers or tensors."""
    q_scale, kv_scale = (_number_or_tensor(given[i]) for i in (4, 17))
    wrapper(*given[:4], *q_scale, *given[5:17], *kv_scale, *given[21:], *given[18:21])


def _number_or_tensor(scale: float | Tensor) -> tuple[float, Tensor | None]:
    return (1.0, scale) if isinstance(scale, Tensor) else (scale, None)
