"""Adapters around a kernel's function: arguments one by one (contract 1), tables without holes, and the GPU it runs on."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from attnops.call import Call, Spec, changed, same
from attnops.errors import RegistrationError
from attnops.reference.rows import Rules, how, refuse_plan_of_holes

PAGE = "docs/add-a-kernel.md, Kernels of contract 1"
PLACES = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def warn_of_contract_1(name: str, run: Callable[..., Any]) -> None:
    """Warn that the next release refuses the kernel. Raises RegistrationError for one that cannot be adapted."""
    kinds = kinds_of(getattr(run, "of_arguments", run))
    if swallow := next((name for name, kind in kinds.items() if kind is inspect.Parameter.VAR_KEYWORD), ""):
        want = f"run(call), and takes= with the arguments that it handles, which **{swallow} does not say: {PAGE}"
        raise RegistrationError(f"kernel {name}: run got **{swallow}, want {want}")
    text = f"kernel {name}: run takes the op's arguments one by one (contract 1), which the next release refuses; write run(call): {PAGE}"
    warnings.warn(text, FutureWarning, stacklevel=3)


def adapted(run: Callable[..., Any]) -> Callable[[Call], Any]:
    """`run` of contract 1 as a function of a call. It gets the keyword arguments that it names. The last positional ones are left out where
    `run` has no place for them and they are at their defaults."""
    known = kinds_of(run)
    endless = inspect.Parameter.VAR_POSITIONAL in known.values()
    places = [name for name, kind in known.items() if kind in PLACES]

    @functools.wraps(run)
    def call(call: Any) -> Any:
        spec: Spec = call.spec
        n = spec.positional
        room = n if endless else sum(name not in spec.names[n:] for name in places)
        if all(same(call[i], spec.args[i].default) for i in range(room, n)):
            n = min(n, room)
        return run(*call[:n], **{name: call[i] for i, name in enumerate(spec.names) if i >= spec.positional and name in known})

    call.of_arguments, call.adapted = run, call  # type: ignore[attr-defined]
    return call


@functools.cache
def kinds_of(run: Callable[..., Any]) -> dict[str, Any]:
    """The kinds of a function's parameters, by name."""
    return {p.name: p.kind for p in inspect.signature(run).parameters.values()}


def takes_a_call(run: Callable[..., Any]) -> bool:
    """Has the function one parameter, as those of contract 2? One of contract 1 is given the policy beside the op's tensors."""
    kinds = [*kinds_of(run).values()]
    return len(kinds) == 1 and kinds[0] in PLACES


def readable(run: object) -> bool:
    """Is it a function whose parameters can be read?"""
    try:
        return callable(run) and bool(inspect.signature(run))
    except (TypeError, ValueError):
        return False


def filled(op: str, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`run` for tables or lists with holes, too: a call that may have holes is cleared of them before `run` reads it."""
    clean = KNOW_HOLES[op]

    @functools.wraps(run)
    def whole(call: Any) -> Any:
        return run(clean(call) if call.holes else call)

    return whole


# The GPU of a call ----------------------------------------------------------------------------------------------------

# torch's own function asks before every call whether CUDA is initialised.
_current_device: Callable[[], int] = vars(torch._C).get("_cuda_getDevice", torch.cuda.current_device)


def elsewhere(x: Tensor) -> bool:
    """Is `x` on a GPU that is not the current one? Where CUDA is not initialised `x` is a fake tensor,
    and nothing is launched."""
    return x.is_cuda and torch.cuda.is_initialized() and x.get_device() != _current_device()


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Within the block the GPU of `x` is the current one."""
    return torch.cuda.device(x.device) if elsewhere(x) else nullcontext()


def placed(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`run`, a function of a call, with the GPU of the call's first tensor as the current one.

    Triton and most launchers of other packages launch on the current GPU, whatever GPU holds their
    arguments. Where that is the right one already, as in all but a few calls, this costs a comparison.
    """
    before: Callable[[Any], Any] | None = getattr(run, "placed", None)
    if before is run and before is not None:
        return before

    @functools.wraps(run)
    def there(call: Any) -> Any:
        if call is None or not elsewhere(call[0]):  # `Kernel.ahead` is given None, too
            return run(call)
        with torch.cuda.device(call[0].device):
            return run(call)

    there.__module__ = origin(run).__module__
    there.placed = there  # type: ignore[attr-defined]
    return there


def origin(run: Any) -> Any:
    """The function below wrappers and `functools.partial`."""
    while (inner := getattr(run, "__wrapped__", None) or getattr(run, "func", None)) is not None:
        run = inner
    return run


# Holes ----------------------------------------------------------------------------------------------------------------


def _pages(call: Any) -> Any:
    refuse_plan_of_holes(call)
    pages = call.k_pages if "k_pages" in call.spec.names else call.latent_pages
    sizes = {"num_pages": pages.shape[0], "page_size": pages.shape[1], **how(Rules.of(call), call.mask)}
    table, lengths = torch.ops.attnops.named_pages.default(call.page_table, call.seq_lens, call.cu_seqlens_q, **sizes)
    return changed(call, page_table=table, seq_lens=lengths, holes=False)


def _slots(call: Any) -> Any:
    indices, slots = call.indices, call.latent_pages.shape[0] * call.latent_pages.shape[1]
    return changed(call, indices=torch.where((indices >= 0) & (indices < slots), indices, -1), holes=False)


KNOW_HOLES: dict[str, Callable[[Any], Any]] = {"paged_attention": _pages, "mla_attention": _pages, "sparse_mla_attention": _slots}
"""The ops whose tables or lists may have holes, and the call without them."""
