"""The paged cache: pages of keys and values, who owns them, and what a step of a batch needs to know of them."""

from attnops.cache.batch import PagedBatch as PagedBatch
from attnops.cache.batch import PrefixChunk as PrefixChunk
from attnops.cache.batch import SharedPrefix as SharedPrefix
from attnops.cache.paged import PagedCache as PagedCache
from attnops.cache.planner import Planner as Planner
