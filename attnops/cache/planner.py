"""`Planner`: the buffers of a host plan, and the step that fills them."""

from __future__ import annotations

from dataclasses import replace

import torch

from attnops.cache.batch import PagedBatch
from attnops.ops.plan import PagedSpec, plan_paged_attention, plan_sizes


class Planner:
    """Plans the attention of the layers that share a `PagedSpec`, where the kernel that will answer them plans on the host.

    Called once a step, outside compiled code, with that step's batch: it gives the batch back with `plan` and `workspace` set, or as it
    was when the layers will run a kernel that needs none. Layers of another spec, e.g. another window, need a Planner of their own.

    Args:
        spec: what the layers ask of `paged_attention`.
        max_tokens, max_requests: the most query tokens and requests of a step. max_pages: columns of the page table.
        device: where the batches lie.
        kernel: plan for this kernel and no other.

    Attributes:
        plan: int64 `[n]` on the CPU, pinned beside a GPU. workspace: uint8 `[m]` on `device`. Made once, written by every step: a
            captured model that was given them follows. Both are empty where no kernel plans.
    """

    def __init__(
        self,
        spec: PagedSpec,
        *,
        max_tokens: int,
        max_requests: int,
        max_pages: int,
        device: torch.device | str,
        kernel: str | None = None,
    ) -> None:
        self.spec, self.kernel = spec, kernel
        numbers, size = plan_sizes(spec, max_tokens=max_tokens, max_requests=max_requests, max_pages=max_pages, device=device)
        # As the cache's pages: born outside of inference mode, and told to the compiler to lie where they lie.
        with torch.inference_mode(False):
            self.plan = torch.zeros(numbers, dtype=torch.int64, pin_memory=torch.device(device).type == "cuda")
            self.workspace = torch.zeros(size, dtype=torch.uint8, device=device)
        if size:
            from torch._dynamo import mark_static, mark_static_address

            for buffer in (self.plan, self.workspace):
                mark_static(buffer, [0])
                mark_static_address(buffer)

    def __call__(self, batch: PagedBatch) -> PagedBatch:
        """`batch` with its plan. Raises what `plan_paged_attention` raises."""
        found = plan_paged_attention(
            self.spec, batch.page_table, batch.seq_lens, batch.cu_seqlens_q, num_tokens=batch.slots.shape[0],
            max_seqlen_q=batch.max_seqlen_q, plan=self.plan, workspace=self.workspace, kernel=self.kernel,
        )  # fmt: skip
        return replace(batch, plan=self.plan, workspace=self.workspace) if found else replace(batch, plan=None)
