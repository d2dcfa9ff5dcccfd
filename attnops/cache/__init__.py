"""The paged caches: pages of keys and values or of latents, their owners, and the tensors of a
step."""

from attnops.cache.batch import (
    PagedBatch as PagedBatch,
    PrefixChunk as PrefixChunk,
    SharedPrefix as SharedPrefix,
)
from attnops.cache.latent import LatentCache as LatentCache
from attnops.cache.page_size import (
    PageSizeChoice as PageSizeChoice,
    negotiate_page_size as negotiate_page_size,
)
from attnops.cache.paged import PagedCache as PagedCache
from attnops.cache.planner import Planner as Planner
