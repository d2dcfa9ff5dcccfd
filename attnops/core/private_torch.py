"""Private names of torch that all but lowering needs, which has `attnops.lowering.inductor`. Each
says what it is for, and what takes its place where torch lacks it.

One without such a word has no other way: its import fails with its name. Names that `import torch`
loads are bound here, so that a call costs what torch's own costs. `_LATE` has the others.

`torch.autograd.forward_ad._current_level` is not here: torch binds it anew, so it is read where it
is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch._guards import TracingContext as TracingContext, tracing as _under_context
from torch._subclasses.fake_tensor import (
    DataDependentOutputException as DataDependentOutputException,
    DynamicOutputShapeException as DynamicOutputShapeException,
    FakeTensor as FakeTensor,
    FakeTensorMode as FakeTensorMode,
    unset_fake_temporarily as unset_fake_temporarily,
)
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# A call on fake tensors, which have no memory, is planned and does not run. Code that reads their
# values gets the two exceptions, and `unset_fake_temporarily` lets a block see real tensors.
# `TorchDispatchMode` is the base of modes of ours that see every op of a block.

F = TypeVar("F", bound=Callable[..., Any])
ContextManager = AbstractContextManager[Any]

# What is in force around a call -------------------------------------------------------------------

transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Is a transform of torch.func under way?"""


def _publicly_autocasting() -> bool:
    return any(map(torch.is_autocast_enabled, ("cpu", "cuda")))


autocasting: Callable[[], bool]
autocasting = getattr(torch._C, "_is_any_autocast_enabled", _publicly_autocasting)
"""Is autocast on, for any device? Publicly: for a CPU or for CUDA."""


@contextmanager
def _publicly_uncast() -> Iterator[None]:
    with ExitStack() as off:
        for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            off.enter_context(torch.autocast(kind, enabled=False))
        yield


uncast: Callable[[], AbstractContextManager[None]]
uncast = getattr(torch._C, "_DisableAutocast", _publicly_uncast)
"""Autocast is off within the block: an op has no autocast rule, and its kernels compute in the
dtypes of its contract. torch.autocast, which takes its place, takes longer."""

_untyped: Any = torch  # stubs have not all of its modules
_functorch = _untyped._C._functorch
of_a_batch: Callable[[Tensor], bool]
of_a_batch = getattr(_functorch, "is_legacy_batchedtensor", lambda tensor: False)
"""Is it a batch of tensors, as torch.autograd.grad makes one of gradients? Else: no, as in a torch
that makes them by torch.vmap."""

profiling: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", lambda: False)
"""Does a profiler record calls? Else: no, and it sees kernels without our ops' names."""

tracing: Callable[[], bool]
tracing = getattr(torch._C, "_is_tracing", torch.jit.is_tracing)  # type: ignore[attr-defined]
"""Does torch.jit.trace record the call?"""

must_repeat: Callable[[], bool]
must_repeat = getattr(
    torch._C, "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled
)
"""Is torch.use_deterministic_algorithms on?"""

only_warns: Callable[[], bool]
only_warns = getattr(
    torch._C,
    "_get_deterministic_algorithms_warn_only",
    torch.is_deterministic_algorithms_warn_only_enabled,
)
"""Does it only warn?"""

tracing_context: Callable[[], Any] = TracingContext.try_get
"""What Dynamo or AOTAutograd traces now, or None. torch.compiler.is_compiling, the public way,
answers no to code that Dynamo runs while it traces."""

under_context: Callable[[Any], ContextManager] = _under_context
"""The block has this TracingContext. Passes ask it for the fake mode and give it their guards, also
for a graph that no compiler traced."""


def capturing(tensor: Tensor) -> bool:
    """Does a call on `tensor` become part of a CUDA graph?"""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


# Modes --------------------------------------------------------------------------------------------

dispatch_mode_stack: Callable[[], list[Any]] = _python_dispatch._get_current_dispatch_mode_stack
"""The dispatch modes in force, the innermost last."""

function_mode_stack: Callable[[], list[Any]] = torch.overrides._get_current_function_mode_stack
"""The function modes in force, the innermost last."""

count_dispatch_modes: Callable[[], int]
count_dispatch_modes = getattr(
    torch._C, "_len_torch_dispatch_stack", lambda: len(dispatch_mode_stack())
)
"""How many dispatch modes are in force: one that is must see a call."""

count_function_modes: Callable[[], int]
count_function_modes = getattr(
    torch._C, "_len_torch_function_stack", lambda: len(function_mode_stack())
)
"""How many function modes are in force."""

without_modes: Callable[[], ContextManager] = _python_dispatch._disable_current_modes
"""No dispatch mode sees what the block calls: work of our own in the middle of somebody's trace."""

module_hooks: Mapping[int, Any] = torch.nn.modules.module._global_forward_hooks
module_pre_hooks: Mapping[int, Any] = torch.nn.modules.module._global_forward_pre_hooks
"""The hooks that torch calls for every module, as they come and go."""

# The getters behind torch.backends, torch.use_deterministic_algorithms and the like. One that torch
# lacks is left out: its flag does not exist, or is public and called for itself.
_FLAGS = (
    "_get_deterministic_algorithms",
    "_get_deterministic_algorithms_warn_only",
    "_get_deterministic_fill_uninitialized_memory",
    "_get_float32_matmul_precision",
    "_get_cublas_allow_tf32",
    "_get_cublas_allow_fp16_reduced_precision_reduction",
    "_get_cublas_allow_bf16_reduced_precision_reduction",
    "_get_cublas_allow_fp16_accumulation",
    "_get_cudnn_allow_tf32",
    "_get_cudnn_enabled",
    "_get_cudnn_deterministic",
    "_get_cudnn_benchmark",
    "_get_mkldnn_enabled",
    "_get_mkldnn_deterministic",
    "_get_flash_sdp_enabled",
    "_get_mem_efficient_sdp_enabled",
    "_get_math_sdp_enabled",
    "_get_math_sdp_allow_fp16_bf16_reduction",
    "_get_cudnn_sdp_enabled",
)
_PRECISIONS = (
    ("generic", "all"),
    ("cuda", "all"),
    ("cuda", "matmul"),
    ("cuda", "conv"),
    ("mkldnn", "all"),
    ("mkldnn", "matmul"),
    ("mkldnn", "conv"),
)


def _flags() -> Iterator[Callable[[], Any]]:
    yield from (get for name in _FLAGS if (get := getattr(torch._C, name, None)) is not None)
    if (precision := getattr(torch._C, "_get_fp32_precision_getter", None)) is not None:
        yield from (partial(precision, *names) for names in _PRECISIONS)


FLAGS = tuple(_flags())
"""Functions that read torch's flags, in one order."""

# Tensors, ops and schemas -------------------------------------------------------------------------

TensorGuards: Any
TensorGuards = getattr(
    getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None
)
"""Dynamo's check that tensors are like others. Else None, and `eager_cache.Likeness` compares."""

try:
    from torch.nested._internal.nested_tensor import NestedTensor as NestedTensor
except ImportError:  # the class of a ragged tensor, which every op refuses by name
    NestedTensor: Any = type(  # type: ignore[no-redef]
        torch.nested.nested_tensor([torch.empty(0)], layout=torch.jagged)
    )

OpOverloadPacket: Any = type(torch.ops.aten.add)
OpOverload: Any = type(torch.ops.aten.add.Tensor)
"""The types of ops, which torch names in private only."""

SET_GRAD: Any = torch._C._set_grad_enabled
"""What torch.set_grad_enabled calls, and Dynamo writes into a graph for it."""

HigherOrderOperator = torch._ops.HigherOrderOperator
"""The type of ops that take functions, as torch.cond does: what they do is within."""

FUNCTIONAL = ("torch.nn.functional", "torch._C._nn")
"""The modules that functions of torch.nn.functional say they are of."""


def _assert(condition: Tensor, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


assert_async: Callable[[Tensor, str], None]
assert_async = getattr(getattr(torch.ops.aten, "_assert_async", None), "msg", _assert)
"""Raise RuntimeError with the message unless the condition holds: on a GPU later, as an assertion
of the device. Else the host waits for the condition."""


def _define(schema: str) -> None:
    scratch = torch.library.Library("attnops_schemas", "FRAGMENT")
    scratch.define(schema.partition("::")[2])


parse_schema: Callable[[str], Any] = getattr(torch._C, "parse_schema", _define)
"""Raises RuntimeError for text that is no schema of an op. Else an op of it is defined and goes."""


def _copy_each(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        one.copy_(other)


copy_all: Callable[[list[Tensor], list[Tensor]], None]
copy_all = getattr(torch, "_foreach_copy_", _copy_each)
"""Copy tensors into others: one kernel for many small ones. Else one by one."""


def _compare_each(tensors: Sequence[Tensor], addresses: Sequence[int], at: Sequence[int]) -> bool:
    return [tensors[i].data_ptr() for i in at] == [addresses[i] for i in at]


same_addresses: Callable[[list[Tensor], list[int], list[int]], bool]
same_addresses = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", _compare_each)
"""Does the memory of the tensors at these places of the list begin at the addresses there?"""

# Autograd -----------------------------------------------------------------------------------------

below_autograd: Callable[[], ContextManager] = torch._C._AutoDispatchBelowAutograd
"""Autograd is left where this is made: kernels below record nothing, though grad mode is on."""

SingleLevelFunction: Any = torch.autograd.function._SingleLevelFunction
"""A Function for the level of torch.func at hand: Function itself begins anew at the outermost."""

single_level: Callable[[], ContextManager]
single_level = _untyped._functorch.utils.enable_single_level_autograd_function
"""Within the block such a Function may be applied."""

saved_tensors_hooks: Callable[[bool], tuple[Callable[..., Any], Callable[..., Any]] | None]
saved_tensors_hooks = getattr(
    _untyped._C._autograd, "_top_saved_tensors_default_hooks", lambda ignored: None
)
"""The innermost hooks of tensors that autograd saves, as torch.utils.checkpoint sets them, or None.
Else None: a checkpoint is not seen."""

# The dispatch keys that a thread takes or leaves, and a block under others. Only flex needs them,
# which is compiled and guarded by them.
DispatchKey = torch._C.DispatchKey
dispatch_keys_taken: Callable[[], Any] = torch._C._dispatch_tls_local_include_set
dispatch_keys_left: Callable[[], Any] = torch._C._dispatch_tls_local_exclude_set
under_dispatch_keys: Callable[[Any, Any], ContextManager] = torch._C._ForceDispatchKeyGuard

# GPUs and their memory ----------------------------------------------------------------------------

current_device: Callable[[], int]
current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""The index of the current GPU. torch's own function asks each time whether CUDA is initialised."""


def _public_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


current_stream: Callable[[int], int]
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _public_stream)
"""The handle of a GPU's current stream, without the object that torch makes of it."""


def clear_workspaces() -> None:
    """Free cuBLAS' workspaces.

    A graph keeps the address of one. Inductor frees the warm-up's before captures of its own. One
    that is allocated in a capture belongs to the graph's pool and must return to it before other
    work uses it.
    """
    torch._C._cuda_clearCublasWorkspaces()


def release_pool(device: torch.device, pool: Any) -> None:
    """One user fewer of a pool of captures. Raises RuntimeError where it has none."""
    torch._C._cuda_releasePool(device.index, pool)


def end_pool(device: torch.device, pool: Any) -> None:
    """The allocator stops to take memory from a pool. Raises RuntimeError where it does not."""
    torch._C._cuda_endAllocateToPool(device.index, pool)


def storage_at(address: int, device: torch.device, size: int) -> Any:
    """A storage of `size` bytes at an address that does not own them; None where torch makes
    none."""
    make = getattr(torch._C, "_construct_storage_from_data_pointer", None)
    return None if make is None else make(address, device, size)


def spin(cycles: int) -> None:
    """Keep the current GPU busy for so many cycles of its clock."""
    torch.cuda._sleep(cycles)


# The compiler -------------------------------------------------------------------------------------


def assume_constant(function: F) -> F:
    """Dynamo runs the function and keeps its result, where it would trace others. The public way,
    torch.compiler.assume_constant_result, takes as long to import as torch."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def dynamo_config() -> Any:
    """Dynamo's settings: torch.compiler.config has none of its limits."""
    return import_module("torch._dynamo.config")


def shapes_config() -> Any:
    """The settings of symbolic sizes, with `patch`, which torch adds when it has loaded them."""
    return import_module("torch.fx.experimental._config")


def inductor_config() -> Any:
    """Inductor's settings: those that torch.compile takes as `options` are of one function."""
    return import_module("torch._inductor.config")


def start_compile_workers() -> None:
    """Have Inductor start its compile workers. Else the first kernel starts them."""
    start = getattr(import_module("torch._inductor.async_compile"), "maybe_warm_pool", None)
    if start is not None:
        start()


# By their modules, which take a second to import: bound when they are first asked for.
_LATE = {
    # What compiled code may be raised from: they tell a refusal of the compiler from an error of
    # the model, and reach the caller of code that Dynamo traces.
    "TorchDynamoException": "torch._dynamo.exc",
    "Unsupported": "torch._dynamo.exc",
    "UserError": "torch._dynamo.exc",
    # A size that compiled code takes as a symbol, in these bounds.
    "mark_dynamic": "torch._dynamo",
    # Hints: a size that is a symbol if it may, one that is none, memory that never moves.
    "maybe_mark_dynamic": "torch._dynamo",
    "mark_static": "torch._dynamo",
    "mark_static_address": "torch._dynamo",
    # The function mode of `torch.set_default_device`, which changes no result.
    "DeviceContext": "torch.utils._device",
    # Compiles a graph that is traced already.
    "standalone_compile": "torch._inductor",
    # For benchmarks: an empty cache on disk, and none in memory.
    "fresh_cache": "torch._inductor.utils",
    "clear_caches": "torch._inductor.utils",
    # The files of generated code that this process has loaded.
    "PyCodeCache": "torch._inductor.codecache",
}


def _unheard(*hint: Any) -> None:
    """In place of a hint: compiled code of other sizes is compiled anew, and memory is copied."""


_HINTS: dict[str, Callable[..., None]]
_HINTS = dict.fromkeys(("maybe_mark_dynamic", "mark_static", "mark_static_address"), _unheard)


def late(homes: Mapping[str, str], name: str, otherwise: Any = None) -> Any:
    """A name of one of these modules, by name. Raises AttributeError, with the version of torch
    where that lacks it."""
    if name not in homes:
        raise AttributeError(f"no private name of torch is called {name!r} here")
    found = getattr(import_module(homes[name]), name, otherwise)
    if found is None:
        raise AttributeError(f"torch {torch.__version__} has no {homes[name]}.{name}")
    return found


def __getattr__(name: str) -> Any:
    found = globals()[name] = late(_LATE, name, _HINTS.get(name))
    return found


# Versions -----------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from packaging.version import InvalidVersion as InvalidVersion, Version as Version
else:
    try:
        from torch._vendor.packaging.version import (
            InvalidVersion as InvalidVersion,
            Version as Version,
        )
    except ImportError:  # torch's copy is not public; a torch without one needs the package itself
        from packaging.version import InvalidVersion as InvalidVersion, Version as Version
