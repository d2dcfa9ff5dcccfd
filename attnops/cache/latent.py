"""`LatentCache`: the latents of many requests in pages, for Multi-head Latent Attention, https://arxiv.org/abs/2405.04434, section 2.1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attnops.cache.batch import PagedBatch
from attnops.cache.ledger import Request
from attnops.cache.page_size import OP, PageSizeChoice, negotiate_page_size
from attnops.cache.paged import Pages, count, ordinary
from attnops.cache.planner import device_planner
from attnops.cache.prefix import common_pages, prefix_chunks, shared_prefix
from attnops.errors import InvalidInput
from attnops.kernel import kernels_of
from attnops.ops._check import FLOATS, name, workspace_bytes
from attnops.ops._op import target_of
from attnops.ops.latent import STORED
from attnops.ops.plan_mla import LatentSpec
from attnops.select import key_for, select

TILE = 128
"""Tokens that a row of the page table is a multiple of: kernels that read whole tiles of keys then need not pad it in every layer."""


class LatentCache(Pages):
    """Pages of latents, their owners, and the tables that `mla_attention` reads. Host calls; none belongs inside a compiled function.

    As `PagedCache`, with its verbs, but sized in tokens: which page size the kernels take is for them to say.

    Args:
        num_layers: layers, each with pages of its own; a page id means the same page in all of them.
        num_tokens: what the pool has room for, in whole pages; a request's last page is its own, however full.
        latent_dim, rope_dim: numbers of a latent and of its rotated key, Dc and Dr.
        max_requests: rows of the tables. max_tokens_per_request: the most a request may hold, cached and new.
        page_size: tokens a page holds. None: negotiated, see `negotiate_page_size`.
        q_heads: query heads of the layers. Batches then bring the plan that the kernel which will answer reads on the device. None:
            they bring none, and the page size is negotiated for as many as DeepSeek-V3 has.
        kernels: kernels of `mla_attention` that must all be able to run on these pages; None: whichever is fastest here.
        dtype: of the pages; float16, bfloat16, float32, float64, or float8_e4m3fn, int8 (with a scale given to the ops).
        device: where pages and tables lie.
        workspace_bytes: scratch for kernels that ask for one, zeroed here, carried by every batch; `attnops.explain(...)` knows the size.
        max_new_tokens: the most new tokens of a request in a decode step, more than 1 where drafted ones are verified; for the negotiation.

    Attributes:
        latent_pages: a tuple of one `[num_pages, page_size, Dc + Dr]` tensor a layer, zero at first.
        page_table: int32 `[max_requests, M]`, seq_lens: int32 `[max_requests]`, tokens. Row `row(request)` is the request's; unused
            entries are 0. M pages hold max_tokens_per_request rounded up to a multiple of 128, where pages can. All tensors are written
            in place and keep their addresses.
        page_size_choice: which page size each kernel takes, and why this one was chosen.

    A call that raises leaves the cache as it was. Raises InvalidInput, PageSizeConflict, UnknownKernel, and where said OutOfPages,
    TooManyRequests, RequestTooLong, UnknownRequest (an id freed before or of another cache).
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
        most = count("max_tokens_per_request", max_tokens_per_request, 1, "tokens")
        scratch = count("workspace_bytes", workspace_bytes, 0)
        if dtype not in (*FLOATS, *STORED):
            raise InvalidInput("dtype", dtype, " | ".join(map(name, (*FLOATS, *STORED))))
        self.page_size_choice: PageSizeChoice = negotiate_page_size(
            latent_dim=latent_dim, rope_dim=rope_dim, max_requests=max_requests, max_tokens_per_request=most, page_size=page_size,
            q_heads=q_heads, kernels=kernels, dtype=dtype, device=device, workspace_bytes=scratch, max_new_tokens=max_new_tokens,
        )  # fmt: skip
        size = self.page_size_choice.page_size
        unit = TILE // size if TILE % size == 0 else 1
        pages = 1 + -(-tokens // size)
        with ordinary():
            # Zero and not empty: kernels multiply what lies past a request's end by 0, and 0 * NaN is NaN.
            shape = (pages, size, latent_dim + rope_dim)
            self.latent_pages = tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers))
        query = dtype if dtype.is_floating_point else None
        self._spec = None if q_heads is None or query is None else LatentSpec(q_heads, size, query, latent_dim + rope_dim, latent_dim)
        super().__init__(
            self.latent_pages, max_requests=max_requests, max_pages_per_request=-(-most // (size * unit)) * unit, limit=most,
            limited_by="max_tokens_per_request", workspace_bytes=scratch,
        )  # fmt: skip

    def batch(
        self, requests: Sequence[int], new_tokens: int | Sequence[int] = 1, *, prefix_tokens: int | None = None, share: bool = False
    ) -> PagedBatch:
        """Append new_tokens[i] tokens (an int: as many to each) to requests[i], for all or none, and describe the step.

        The tensors are made once and serve every layer; they are new ones at each call. `plan` is set where the layers will run a kernel
        that reads one on the device: a step that neither says what was before nor shares a prefix, by the policy in force.

        Args:
            requests: ids, each once.
            new_tokens: tokens of each.
            prefix_tokens: describe in `prefix` what the requests had before, in chunks of at most so many tokens over all requests: what
                bounds the memory of layers that expand latents. None: not described, so that layers attend to the latents themselves,
                except where no request had any, which costs nothing to say.
            share: look for whole pages that all requests begin with, as forks do, and describe them in `shared`.

        Raises InvalidInput (no request, one named twice, counts that do not match), UnknownRequest, RequestTooLong, OutOfPages.
        """
        most = None if prefix_tokens is None else count("prefix_tokens", prefix_tokens, 1, "tokens")
        if not isinstance(share, bool):
            raise InvalidInput("share", repr(share), "True | False")

        def more(batch: PagedBatch, entries: list[Request], counts: list[int]) -> PagedBatch:
            before = [entry.length for entry in entries]
            if most is not None or not any(before):
                batch = replace(batch, prefix=prefix_chunks(batch, before, most or 1, self.page_size))
            # Pages that the new tokens do not touch, hence whole.
            whole = [entry.pages[: entry.length // self.page_size] for entry in entries]
            if share and (pages := common_pages(whole)):
                batch = replace(batch, shared=shared_prefix(batch, pages, self.page_size))
            if batch.prefix is not None or batch.shared is not None:
                return batch
            make = self.plan_maker(batch.slots.shape[0], len(entries), batch.max_seqlen_q)
            return batch if make is None else replace(batch, plan=make(batch))

        return self._append(requests, new_tokens, more)

    def plan_maker(self, tokens: int, requests: int, queries: int) -> Callable[[PagedBatch], Tensor] | None:
        """See `Pages`. Kernels are compared as they run with their plans. Of float8 pages: for queries of float8."""
        target = target_of(self.page_table)
        reads = [k for k in kernels_of(OP).values() if k.device_plan is not None and not k.absences(target)]
        if self._spec is None or not reads or not tokens:
            return None
        problem = self._spec.problem(target, tokens, requests, self.page_table.shape[1], queries)
        problem = replace(problem, plan="device", workspace=workspace_bytes(self.workspace))
        kernel = select(problem, key_for(problem.op, None)).kernel
        return None if kernel is None else device_planner(kernel, self._spec)
