"""Kernels of contract 1, whose `run` takes the op's arguments one by one, as functions of a call."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch

from attnops.call import Call, Spec
from attnops.errors import RegistrationError

PAGE = "docs/add-a-kernel.md, Kernels of contract 1"


def warn_of_contract_1(name: str, run: Callable[..., Any]) -> None:
    """Warn that the next release refuses the kernel. Raises RegistrationError for one that cannot be adapted."""
    kinds = {p.kind: p.name for p in inspect.signature(getattr(run, "of_arguments", run)).parameters.values()}
    if swallow := kinds.get(inspect.Parameter.VAR_KEYWORD):
        want = f"run(call), and takes= with the arguments that it handles, which **{swallow} does not say: {PAGE}"
        raise RegistrationError(f"kernel {name}: run got **{swallow}, want {want}")
    text = f"kernel {name}: run takes the op's arguments one by one (contract 1), which the next release refuses; write run(call): {PAGE}"
    warnings.warn(text, FutureWarning, stacklevel=3)


def adapted(run: Callable[..., Any]) -> Callable[[Call], Any]:
    """`run` of contract 1, which takes the op's arguments one by one, as a function of a call.

    It is handed the keyword arguments that it names, and no last positional ones at their defaults that it has no place for.
    """
    known = parameters_of(run)
    parameters = inspect.signature(run).parameters.values()
    endless = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    places = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]

    @functools.wraps(run)
    def call(call: Any) -> Any:
        spec: Spec = call.spec
        n = spec.positional
        room = n if endless else sum(name not in spec.names[n:] for name in places)
        if all(_is(call[i], spec.args[i].default) for i in range(room, n)):
            n = min(n, room)
        return run(*call[:n], **{name: call[i] for i, name in enumerate(spec.names) if i >= spec.positional and name in known})

    call.of_arguments, call.adapted = run, call  # type: ignore[attr-defined]
    return call


def _is(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and not isinstance(value, torch.Tensor) and bool(value == default))


@functools.cache
def parameters_of(run: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a function's parameters."""
    return tuple(inspect.signature(run).parameters)


@functools.cache
def takes_a_call(run: Callable[..., Any]) -> bool:
    """Has the function one parameter, as those of contract 2?"""
    # A kernel of contract 1 is given the policy beside the op's tensors.
    parameters = [*inspect.signature(run).parameters.values()]
    return len(parameters) == 1 and parameters[0].kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def readable(run: object) -> bool:
    """Is it a function whose parameters can be read?"""
    try:
        return callable(run) and bool(inspect.signature(run))
    except (TypeError, ValueError):
        return False
