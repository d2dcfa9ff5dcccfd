"""Kernels of contract 1, whose `run` takes the op's arguments one by one, as functions of a call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from attnops.call import Call, Spec


def as_of_a_call(run: Callable[..., Any]) -> Callable[[Any], Any]:
    """`run` as a function of a call."""
    return run if takes_a_call(run) else adapted(run)


def adapted(run: Callable[..., Any]) -> Callable[[Call], Any]:
    """`run` of contract 1, which takes the op's arguments one by one, as a function of a call.

    It is handed the keyword arguments that it names, and no last positional ones at their defaults that it has no place for. `**kwargs` get
    those that the call asks for.
    """
    known = parameters_of(run)
    parameters = inspect.signature(run).parameters.values()
    swallows = any(p.kind is p.VAR_KEYWORD for p in parameters)
    endless = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    places = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]

    @functools.cache
    def handed(spec: Spec) -> tuple[int, tuple[tuple[int, Any], ...], tuple[tuple[str, int], ...], tuple[tuple[str, int, Any], ...]]:
        n = spec.positional
        room = n if endless else sum(name not in spec.names[n:] for name in places)
        over = tuple((i, spec.args[i].default) for i in range(room, n))
        named = tuple((a.name, i) for i, a in enumerate(spec.args) if i >= n and a.name in known)
        others = tuple((a.name, i, a.default) for i, a in enumerate(spec.args) if i >= n and a.name not in known)
        return n, over, named, others if swallows else ()

    @functools.wraps(run)
    def call(call: Any) -> Any:
        n, over, named, others = handed(call.spec)
        kwargs = {name: call[i] for name, i in named}
        for name, i, default in others:
            if not _is(call[i], default):
                kwargs[name] = call[i]
        if over and all(_is(call[i], default) for i, default in over):
            n -= len(over)
        return run(*call[:n], **kwargs)

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
