"""`generate()` of a patched transformers model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attnops.adapters.handle import MARK
from attnops.hf import not_fast
from attnops.hf.cache import names as cache_names
from attnops.hf.generation import growing
from attnops.hf.models.methods import Method
from attnops.hf.page_model import PagedMode, give_back

if TYPE_CHECKING:
    from attnops.hf.patching import Patched

NO_CACHE = "generate() made no cache for this model"


def generate(method: Method, *args: Any, **kwargs: Any) -> Any:
    """`generate()` of a patched model: the model's own, with the promise that masks only grow (see
    attnops.hf.generation)."""
    handle: Patched = method.owner.__dict__[MARK]
    kwargs = cache_names.renamed(kwargs)
    handle._settle()
    handle._tell()
    with growing(method.owner) as generation:
        generation.custom = kwargs.get("custom_generate") is not None
        result: Any = None
        paged = handle._paged
        if paged is not None and paged.decode.mode != "hf":
            kwargs = paged.loop.kwargs(paged.decoder, method.owner, args, kwargs)
        chosen = paged is not None and paged.chosen
        try:
            result = method.original(*args, **kwargs)
            if chosen and generation.why is None and not generation.custom:
                not_fast.warn(method.owner, not_fast.PAGES, NO_CACHE)
            return result
        except torch.OutOfMemoryError:
            handle.release()  # for the next try
            raise
        finally:
            if paged is not None:
                _take_back(paged, generation.lent, result)
            handle._took = handle._taken(generation)


def _take_back(paged: PagedMode, lent: list[Any], result: Any) -> None:
    """Take the pages of a call back, but for those that the caller keeps with its result."""
    for cache in lent:
        if cache_names.cache_of(result) is not cache:
            give_back(cache)
        elif paged.chosen:
            setattr(result, cache_names.NAME, paged.unpaged(cache))
    paged.pool.trim()
