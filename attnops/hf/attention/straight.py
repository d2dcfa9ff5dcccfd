"""Plain calls that SDPA answers, remembered: the next one hands it the tensors as they are.

In eager decoding the host is slower than the GPU, and the work between two layers drops this code
from the processor's caches, so a layer's call makes few calls. What is remembered maps the facts by
which the kernel of a plain call is chosen, less those that SDPA checks itself, to a function of
query, key and value, and to the numbers of keys that no kernel tells apart. Autocast, torch.func
and forward mode see SDPA itself. Policy, registry and target are attributes, which cost less than a
call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, is_grad_enabled

from attnops.core.eager_cache import KINDS, growth
from attnops.core.kernel import _REGISTRY
from attnops.core.private_torch import count_dispatch_modes, profiling, tracing
from attnops.core.problem import _OVERRIDE
from attnops.core.select import _ACTIVE
from attnops.hf.models.attention_modules import HARMLESS
from attnops.kernels.torch import sdpa
from attnops.ops.attention.record import Attention

Facts = tuple[Any, ...]
Tensors = tuple[Tensor, Tensor, Tensor]
Straight = Callable[[Tensor, Tensor, Tensor], Tensor]

_NUMBERS = (float, type(None))


def is_plain(query: Tensor, scaling: Any, asks: tuple[Any, ...], others: dict[str, Any]) -> bool:
    """May a call without dropout be one that is remembered? It asks for nothing else, and nothing
    records it or looks at it.

    asks: the mask, sinks and other arguments that a plain call does not have.
    """
    for asked in asks:
        if asked is not None and asked is not False:
            return False
    if type(query) is not Tensor or type(scaling) not in _NUMBERS or not others.keys() <= HARMLESS:
        return False
    return not (is_grad_enabled() or count_dispatch_modes() or profiling() or tracing())


class StraightCalls:
    """The plain calls of one attention function; at most KINDS of them."""

    def __init__(self) -> None:
        self._known: dict[Facts, tuple[range, Straight]] = {}

    def answer(
        self,
        module: Any,
        tensors: Tensors,
        is_causal: bool | None,
        scaling: Any,
        window: int | None,
        softcap: Any,
    ) -> tuple[Facts | None, Tensor | None]:
        """(the facts to remember a plain call by, `[B, S, H, Dv]`); no answer to a call that is not
        known.

        No facts for tensors that SDPA refuses: the checks of the op name the argument.
        """
        query, key, value = tensors
        queries, sizes, value_sizes = query.shape, key.shape, value.shape
        facts = (
            type(module),
            getattr(module, "is_causal", True),
            is_causal,
            scaling,
            window,
            softcap,
            _ACTIVE.key,
            _REGISTRY.generation,
            _OVERRIDE.target,
            queries,
            sizes[1],
            value_sizes[-1],
            query.dtype,
            query.is_cpu,
        )
        known = self._known.get(facts)
        if known is None:
            return facts, None
        keys, straight = known
        # SDPA would broadcast a key or a value of another batch, and heads of its own for the
        # value. It refuses all else that differs.
        if not (sizes[2] in keys and sizes[0] == queries[0] and value_sizes[:3] == sizes[:3]):
            return facts, None
        try:
            return facts, straight(query, key, value)
        except RuntimeError:
            return None, None

    def remember(
        self, facts: Facts, call: Attention, run: Any, tensors: Tensors, window: int | None
    ) -> Straight | None:
        """The function that answers all calls of these facts from now on. None: SDPA does not
        answer them as they are.

        run: the kernel that is chosen for `call`. tensors: those of the call, heads first.
        """
        query, key, value = tensors
        if not query.stride(3) == key.stride(3) == value.stride(3) == 1:
            return None  # other strides may choose another kernel
        if run is not sdpa.attention or (straight := sdpa.heads_first(call)) is None:
            return None
        if len(self._known) >= KINDS:
            self._known.clear()
        keys = key.shape[2]
        grown = growth(
            tensors, (-1, 2, 2), (window or 0,)
        )  # a window that begins to bind is another call
        self._known[facts] = (range(keys, keys + 1) if grown is None else grown[0]), straight
        return straight
