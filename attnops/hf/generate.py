"""`generate()` of a patched transformers model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attnops.adapters.handle import MARK
from attnops.hf import not_fast
from attnops.hf.cache import names as cache_names
from attnops.hf.generation import growing
from attnops.hf.models.methods import Method
from attnops.hf.page_model import give_back

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
        try:
            result = method.original(*args, **kwargs)
            if (
                paged is not None
                and paged.chosen
                and generation.why is None
                and not generation.custom
            ):
                not_fast.warn(method.owner, not_fast.PAGES, NO_CACHE)
            return result
        except torch.OutOfMemoryError:
            handle.release()  # for the next try
            raise
        finally:
            for cache in generation.lent:
                returned = cache_names.cache_of(result) is cache
                if not returned:
                    give_back(cache)
                elif paged is not None and paged.chosen:
                    setattr(result, cache_names.NAME, paged.unpaged(cache))
            if paged is not None:
                paged.pool.trim()
            handle._took = handle._taken(generation)
