"""`LatentCache`: the latents of many requests in pages, for Multi-head Latent Attention,
https://arxiv.org/abs/2405.04434, section 2.1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attnops.cache.batch import PagedBatch
from attnops.cache.ledger import Layer, Request, Room
from attnops.cache.page_size import negotiate_page_size
from attnops.cache.paged import Pages, count
from attnops.cache.planner import device_plan
from attnops.cache.step import common_pages, prefix_chunks, shared_prefix
from attnops.core.kernel import kernels_of
from attnops.core.problem import Target, altered, bytes_of
from attnops.core.record import need
from attnops.core.select import key_for, select
from attnops.ops.pages.plan import latent_layers, step_of

# Query heads of DeepSeek-V3.
HEADS = 128
# Tokens that a row of the page table is a multiple of: kernels that read whole tiles of keys need
# not pad such a table in every layer.
TILE = 128


def columns_of(tokens: int, page_size: int) -> int:
    """Columns of a page table that holds so many tokens of a request, in whole tiles where the page
    size allows it."""
    unit = TILE // page_size if TILE % page_size == 0 else 1
    return -(-tokens // (page_size * unit)) * unit


class LatentCache(Pages):
    """Pages of latents, their owners, and the tables that `mla_attention` reads. Keep its methods,
    host calls, out of compiled functions.

    It has the methods and the promises of `PagedCache`, but its size is given in tokens: the
    kernels decide the page size.

    Args:
        num_layers: layers, each with pages of its own; a page id means the same page in all of
            them.
        num_tokens: room of the pool, in whole pages; a request does not share a partly filled page
            with others, forks apart.
        latent_dim: numbers of a latent, Dc.
        rope_dim: numbers of its rotated key, Dr.
        max_requests: rows of the tables.
        max_tokens_per_request: the most tokens of a request, cached and new.
        page_size: tokens a page holds. None: negotiated, see `negotiate_page_size`.
        q_heads: query heads of the layers, for batches with the plan of the kernel that reads one
            on the device. None: batches have no plan, and the page size is negotiated for the heads
            of DeepSeek-V3.
        kernels: kernels of `mla_attention` that must all take these pages; None: the fastest on
            this machine decides.
        dtype: of the pages; float16, bfloat16, float32, float64, or float8_e4m3fn, int8 (with a
            scale given to the ops).
        device: of pages and tables.
        workspace_bytes: scratch for kernels that ask for it, zero at first, carried by every batch;
            `attnops.explain(...)` shows the size.
        max_new_tokens: the most new tokens of a request in a decode step, more than 1 where drafts
            are verified; for the negotiation.

    Attributes:
        latent_pages: for each layer `[num_pages, page_size, Dc + Dr]`, zero at first.
        page_table: int32 `[max_requests, M]`; row `row(request)` is the request's; unused entries
            are 0. M pages hold max_tokens_per_request rounded up to a multiple of 128, where the
            page size allows it.
        seq_lens: int32 `[max_requests]`, in tokens.
        page_size_choice: the page sizes that each kernel takes, and the reason for this one.

    Raises InvalidInput, PageSizeConflict, UnknownKernel: an argument is out of its range, or
    kernels and page size do not agree.
    """

    def __init__(
        self,
        num_layers: int,
        num_tokens: int,
        *,
        latent_dim: int = 512,
        rope_dim: int = 64,
        max_requests: int,
        max_tokens_per_request: int,
        page_size: int | None = None,
        q_heads: int | None = None,
        kernels: tuple[str, ...] | None = None,
        dtype: torch.dtype,
        device: torch.device | str,
        workspace_bytes: int = 0,
        max_new_tokens: int = 1,
    ) -> None:
        layers = count("num_layers", num_layers, 1)
        tokens = count("num_tokens", num_tokens, 1, "tokens")
        latent, rope = count("latent_dim", latent_dim, 1), count("rope_dim", rope_dim, 1)
        spec = latent_layers(HEADS if q_heads is None else q_heads, 0, dtype, latent + rope, latent)
        self.page_size_choice = negotiate_page_size(
            spec,
            max_requests=max_requests,
            max_tokens_per_request=max_tokens_per_request,
            page_size=page_size,
            kernels=kernels,
            device=device,
            workspace_bytes=workspace_bytes,
            max_new_tokens=max_new_tokens,
        )
        size = self.page_size_choice.page_size
        rows = int(max_requests)
        most = int(max_tokens_per_request)
        self._spec = (
            None
            if q_heads is None or not dtype.is_floating_point
            else replace(spec, page_size=size)
        )
        per_layer, columns = [Layer(((latent + rope,),))] * layers, columns_of(most, size)
        room = Room(
            per_layer,
            1 + -(-tokens // size),
            size,
            rows,
            columns,
            most,
            most,
            "max_tokens_per_request",
        )
        super().__init__(room, dtype=dtype, device=device, workspace_bytes=workspace_bytes)
        self.latent_pages = tuple(pages for (pages,) in self.layers)

    def batch(
        self,
        requests: Sequence[int],
        new_tokens: int | Sequence[int] = 1,
        *,
        prefix_tokens: int | None = None,
        share: bool = False,
    ) -> PagedBatch:
        """As `PagedCache.batch`.

        The batch has a plan where the layers will run a kernel that reads one on the device: in a
        step with neither `prefix` nor `shared`, by the policy in force.

        Args:
            requests: ids, each once.
            new_tokens: tokens of each; an int: as many for each.
            prefix_tokens: describe the cached tokens of the requests in `prefix`, in chunks of at
                most so many tokens over all requests; this bounds the memory of layers that expand
                latents. None: not described, and the layers attend to the latents themselves; a
                step without cached tokens has `()` in any case.
            share: look for whole pages that all requests begin with, as forks do, and describe them
                in `shared`.
        """
        most = None if prefix_tokens is None else count("prefix_tokens", prefix_tokens, 1, "tokens")
        need(isinstance(share, bool), "share", repr(share), "True | False")

        def more(batch: PagedBatch, entries: list[Request]) -> PagedBatch:
            before = [entry.length for entry in entries]
            if most is not None or not any(before):
                batch = replace(
                    batch, prefix=prefix_chunks(batch, before, most or 1, self.page_size)
                )
            # The new tokens do not touch whole pages.
            whole = [entry.pages[0][: entry.length // self.page_size] for entry in entries]
            if share and whole and (pages := common_pages(whole)):
                batch = replace(batch, shared=shared_prefix(batch, pages, self.page_size))
            if batch.prefix is not None or batch.shared is not None:
                return batch
            make = self.plan_maker(batch.slots.shape[0], len(entries), batch.max_seqlen_q)
            return batch if make is None else replace(batch, plan=make(batch))

        return self._append(requests, new_tokens, more)

    def plan_maker(
        self, tokens: int, requests: int, queries: int
    ) -> Callable[[PagedBatch], Tensor] | None:
        """See `Pages`. Kernels are compared with their plans; of float8 pages, for float8
        queries."""
        target = Target.of(self.page_table.device)
        reads = [
            k
            for k in kernels_of("mla_attention").values()
            if k.plan.device is not None and not k.absences(target)
        ]
        if self._spec is None or not reads or not tokens:
            return None
        problem = step_of(self._spec, target, tokens, requests, self.page_table.shape[1], queries)
        kernel = select(
            altered(problem, plan="device", workspace=bytes_of(self.workspace)),
            key_for(problem.op, None),
        ).kernel
        return (
            None
            if kernel is None or kernel.plan.device is None
            else partial(device_plan, kernel, self._spec, q_heads=self._spec.q_heads)
        )
