"""The names under which transformers finds attnops."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from transformers import AttentionInterface, AttentionMaskInterface

from attnops.announce import LATE, NAME
from attnops.core.kernel import check_kernel
from attnops.core.private_torch import tracing_context
from attnops.core.record import need
from attnops.hf.attention.batched import MASKED, function_for_batches, name_for_batches
from attnops.hf.attention.function import attention_function
from attnops.hf.attention.mask import MODES, Mode, mask_function

Kept = Literal["auto", "hf", "paged"]
CACHES: tuple[Kept, ...] = get_args(Kept)


@dataclass(frozen=True)
class Options:
    """The options of `patch`. proven: a trial has shown that the model takes these masks;
    transformers' flags of its class do not count."""

    kernel: str | None = None
    mask: Mode = "auto"
    cache: Kept = "auto"
    proven: bool = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A model keeps the name in its configs, so a process that loads a copy of its options needs
        # the function behind the name.
        vars(self).update(state)
        implementation(self)


class Functions(NamedTuple):
    """What transformers calls under the names of one set of options. batches: in continuous
    batching."""

    attention: Callable[..., Any]
    mask: Callable[..., Any]
    batches: Callable[..., Any]


def functions(options: Options) -> Functions:
    """New functions for these options."""
    kernel, proven = options.kernel, options.proven
    attention = attention_function(kernel, options.mask == "additive", proven)
    batches = function_for_batches(attention, kernel, proven)
    return Functions(attention, mask_function(options.mask), batches)


# Of the name alone: `attnops.announce` calls them before they are registered.
DEFAULT = functions(Options())


def register() -> None:
    """Make `attn_implementation="attnops"` known to transformers. Calling it again has no effect.

    `import attnops` does it, with functions that load these; `import attnops.hf` puts these in
    their place.
    """
    implementation(Options())


def implementation(options: Options) -> str:
    """The name under which these options are registered with transformers; registered now if it was
    not.

    The options are in the name and not on the config: transformers reads the name at every call,
    compiled graphs are guarded by it, and `save_pretrained` leaves it out. Raises UnknownKernel, or
    InvalidInput for a mask mode or a cache that does not exist.
    """
    for field, value, known in (("mask", options.mask, MODES), ("cache", options.cache, CACHES)):
        need(value in known, field, repr(value), " | ".join(map(repr, known)))
    if options.kernel is not None:
        pages = () if options.cache == "hf" else ("paged_attention", "mla_attention")
        check_kernel(options.kernel, pages if options.cache == "paged" else ("attention", *pages))
    # A kernel's own name could hold "flash", by which transformers takes an implementation for
    # FlashAttention.
    name = NAME if options == Options() else f"{NAME}_{zlib.crc32(repr(options).encode()):08x}"
    # Another function object would be a recompilation: compiled code is guarded by the first. A
    # trace under way is, too.
    there = AttentionInterface._global_mapping.get(name)
    if there is None or (hasattr(there, LATE) and tracing_context() is None):
        found = DEFAULT if name == NAME else functions(options)
        batches = name_for_batches(name)
        AttentionInterface.register(batches, found.batches)
        if MASKED:
            AttentionMaskInterface.register(batches, found.mask)
        AttentionMaskInterface.register(name, found.mask)
        AttentionInterface.register(name, found.attention)
    return name
