"""The promise of a batch without holes, kept for kernels that rely on it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from attnops.call import changed
from attnops.errors import InvalidInput, fail
from attnops.reference.attention import Rules
from attnops.reference.holes import how


def filled(op: str, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`run` of a table or of lists without holes, and of others: it reads no page that they do not name."""
    clean = KNOW_HOLES[op]

    @functools.wraps(run)
    def whole(call: Any) -> Any:
        return run(clean(call) if call.holes else call)

    return whole


def _pages(call: Any) -> Any:
    refuse_plan_of_holes(call)
    pages = call.k_pages if "k_pages" in call.spec.names else call.latent_pages
    asked = how(Rules.of(call), call.mask)
    table, lengths = torch.ops.attnops.named_pages.default(
        call.page_table, call.seq_lens, call.cu_seqlens_q, num_pages=pages.shape[0], page_size=pages.shape[1], **asked
    )
    return changed(call, page_table=table, seq_lens=lengths, holes=False)


def _slots(call: Any) -> Any:
    indices, slots = call.indices, call.latent_pages.shape[0] * call.latent_pages.shape[1]
    return changed(call, indices=torch.where((indices >= 0) & (indices < slots), indices, -1), holes=False)


KNOW_HOLES: dict[str, Callable[[Any], Any]] = {"paged_attention": _pages, "mla_attention": _pages, "sparse_mla_attention": _slots}
"""The ops whose tables or lists may have holes, and the call without them."""


def refuse_plan_of_holes(call: Any) -> None:
    """Raise InvalidInput for a plan on the device, which is of the table as it was, with a table that may have holes."""
    if call.holes and call.plan is not None and call.plan.dtype == torch.int32:
        want = "False, because a device plan is given: make it of the table that named_pages gives, and give both"
        fail(InvalidInput, "holes", call.holes, want)
