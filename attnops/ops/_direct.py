"""Eager calls like one made before go straight to the kernel that was chosen then: no dispatcher, no check, no selection."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch.compiler import is_compiling as _compiling

from attnops.kernel import generation, takes
from attnops.ops._op import Op
from attnops.problem import pretended
from attnops.select import choose

# What Dynamo checks a compiled function's inputs with: type, dtype, device, sizes, strides, requires_grad and dispatch keys (hence
# vmap, inference mode and autocast) of all tensors in half a microsecond. Python takes as long for one. None where torch has moved it.
TensorGuards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)

_profiling: Callable[[], bool] = vars(torch.autograd).get("_profiler_enabled", lambda: False)

Run = Callable[..., Any]
Pick = Callable[[tuple[Any, ...]], tuple[Any, ...]]
KINDS = 512
SHAPES = 8


class Direct:
    """The op, called eagerly. Anything out of the ordinary, and every first call, goes through the dispatcher, whose errors are the errors.

    Remembered: at most KINDS combinations of numbers and policies, and at most SHAPES sets of shapes of each.
    """

    def __init__(self, op: Op) -> None:
        self.op, self.overload = op, op.packet.default
        self.patterns: dict[tuple[Any, ...], tuple[int, Pick, Pick, Pick] | None] = {}
        self.seen: dict[tuple[Any, ...], list[tuple[Any, Any, Run]]] = {}

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The op's result. args: every positional argument. kwargs: always the same names, in the same order, policy among them."""
        # Compiling is asked first, so that Dynamo, to whom it is a constant, traces the dispatcher's call alone. Then: may a gradient be
        # asked for, does somebody listen in, has somebody put something in the place of torch?
        if _compiling() or is_grad_enabled() or _len_torch_dispatch_stack() or _len_torch_function_stack() or _profiling():
            return self.overload(*args, **kwargs)
        values = (*args, *kwargs.values())
        types = tuple(map(type, values))
        try:
            pattern = self.patterns[types]
        except KeyError:
            picks = _pattern(types, self._kinds(len(args), kwargs))
            pattern = self.patterns[types] = picks and (len(self.patterns), *picks)
        if pattern is None:
            return self.overload(*args, **kwargs)
        number, even, odd, rest = pattern
        a, b, key = even(values), odd(values), (number, generation(), pretended(), rest(values))
        for first, second, run in self.seen.get(key, ()):
            if first.check(*a) and second.check(*b):
                return run(*args, **kwargs)
        returned = self.overload(*args, **kwargs)
        self._remember(key, a, b, args, kwargs)
        return returned

    def _kinds(self, positional: int, kwargs: dict[str, Any]) -> list[str]:
        kinds = {a.name: str(a.type) for a in self.overload._schema.arguments}
        return [*list(kinds.values())[:positional], *(kinds[n] for n in kwargs)]

    def _remember(self, key: tuple[Any, ...], a: Any, b: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first, second = (TensorGuards(*x, dynamic_dims_sizes=None, dynamic_dims_strides=None) for x in (a, b))
        if not (first.check(*a) and second.check(*b)):
            return  # one tensor given twice
        asked = {n: v for n, v in kwargs.items() if n != "policy"}
        kernel = choose(self.op.problem(*args, **asked), kwargs["policy"])
        run = (kernel.settled and kernel.settled(*args, **kwargs)) or kernel.run
        # The dispatcher drops what is at its default, so a kernel may not know such an argument.
        unknown = tuple(n for n in kwargs if not takes(run, n))
        if len(self.seen) >= KINDS:
            self.seen.clear()
        kept = self.seen.setdefault(key, [])
        kept[SHAPES - 1 :] = []
        kept.insert(0, (first, second, _without(run, unknown) if unknown else run))


PLAIN: dict[str, tuple[type, ...]] = {
    "Tensor": (Tensor, torch.nn.Parameter),
    "Optional[Tensor]": (Tensor, torch.nn.Parameter, type(None)),
    "int": (int,),
    "float": (float,),
    "bool": (bool,),
    "str": (str,),
}
"""What the dispatcher hands on as it is, by the schema's word for it."""


def _pattern(types: tuple[type, ...], kinds: list[str]) -> tuple[Pick, Pick, Pick] | None:
    """What picks from a call's values two sets of tensors and the rest; None for types that the dispatcher must see."""
    if TensorGuards is None or any(t not in PLAIN.get(kind, ()) for t, kind in zip(types, kinds, strict=True)):
        return None
    where = [i for i, t in enumerate(types) if issubclass(t, Tensor)]
    # A set of guards fails where a tensor comes twice, and those that do are neighbours: key and value, the two cu_seqlens.
    return _pick(where[::2]), _pick(where[1::2]), _pick([i for i, t in enumerate(types) if i not in where and t is not type(None)])


def _pick(where: list[int]) -> Pick:
    if len(where) == 1:
        only = where[0]
        return lambda values: (values[only],)
    return itemgetter(*where) if where else lambda values: ()


def _without(run: Run, names: tuple[str, ...]) -> Run:
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in names:
            kwargs.pop(name)
        return run(*args, **kwargs)

    return call
