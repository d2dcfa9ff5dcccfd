"""`Planner`: the plan of a step, made on the host or on the device, as the kernel of the layers
needs it."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from attnops.cache.batch import PagedBatch
from attnops.cache.paged import fix_address, ordinary
from attnops.core.kernel import Kernel, kernels_of
from attnops.core.problem import Problem, Target, altered, bytes_of
from attnops.core.select import choose, key_for, select
from attnops.ops.pages.plan import over_latents, plan_paged_attention, plan_sizes, step_of


class Planner:
    """Plans the attention of the layers that share a kind of call, where their kernel reads a plan.

    Call it once a step, outside compiled code, with the batch of the step. It returns the batch
    with `plan` and `workspace` set, or unchanged where the kernel of the layers reads no plan.
    Layers of another spec, e.g. another window, need another Planner.

    The host writes a plan into the buffers below. A plan for latents may instead be made on the
    device: it is then a new tensor at each step, and the batch keeps its workspace. A batch with
    `shared`, whose two parts have tables of their own, gets no plan. A batch with `prefix` gets
    none either, because a layer may unfold its latents: set prefix to None where the layers attend
    to latents.

    Args:
        spec: what the layers share, of `paged_layers` or `latent_layers`.
        max_tokens: the most query tokens of a step.
        max_requests: the most requests of a step.
        max_pages: columns of the page table.
        device: of the batches.
        num_pages: pages of the pool, for batches without `holes=False`, which the batches of a
            cache have.
        kernel: plan for this kernel only.

    Attributes:
        plan: int64 `[n]` on the CPU, pinned beside a GPU.
        workspace: uint8 `[m]` on `device`. Both keep their addresses, so that a captured model
            reads each step's plan. Both are empty where no kernel plans on the host.
    """

    def __init__(
        self,
        spec: Problem,
        *,
        max_tokens: int,
        max_requests: int,
        max_pages: int,
        device: torch.device | str,
        num_pages: int | None = None,
        kernel: str | None = None,
    ) -> None:
        self.spec, self.kernel, self.num_pages = spec, kernel, num_pages
        numbers, size = plan_sizes(
            spec,
            max_tokens=max_tokens,
            max_requests=max_requests,
            max_pages=max_pages,
            device=device,
        )
        # As the cache's pages: born outside of inference mode, at a static address.
        with ordinary():
            self.plan = torch.zeros(
                numbers,
                dtype=torch.int64,
                device="cpu",
                pin_memory=torch.device(device).type == "cuda",
            )
            self.workspace = torch.zeros(size, dtype=torch.uint8, device=device)
        if size:
            fix_address(self.plan, self.workspace, static=(0,))

    def __call__(self, batch: PagedBatch) -> PagedBatch:
        """`batch` with its plan. It waits for the device where the batch has no `host` lengths, or
        may have holes. Raises as `plan_paged_attention` does."""
        return replace(batch, **self._planned(batch)).known(batch.host)

    def _planned(self, batch: PagedBatch) -> dict[str, Any]:
        """The fields of the batch that its plan changes."""
        name = self.kernel
        if over_latents(self.spec):
            if batch.shared is not None or batch.prefix is not None:
                return {"plan": None}
            hosts = _planned_by_host()
            if name not in hosts:
                kernel = self._answers(self.spec, batch)
                name = kernel.name
            if name not in hosts:
                with ordinary():
                    return {"plan": device_plan(kernel, self.spec, batch, self.spec.q_heads)}
        found = plan_paged_attention(
            self.spec,
            batch.page_table,
            batch.seq_lens,
            batch.cu_seqlens_q,
            num_tokens=batch.slots.shape[0],
            max_seqlen_q=batch.max_seqlen_q,
            num_pages=self.num_pages,
            plan=self.plan,
            workspace=self.workspace,
            kernel=name,
            **_on_host(batch),
        )
        return {"plan": self.plan, "workspace": self.workspace} if found else {"plan": None}

    def _answers(self, spec: Problem, batch: PagedBatch) -> Kernel:
        """The best kernel for the layers. No call has plans of both kinds, so that the kernels of
        either kind are compared."""
        requests, pages = batch.page_table.shape
        problem = step_of(
            spec,
            Target.of(batch.page_table.device),
            batch.slots.shape[0],
            requests,
            pages,
            batch.max_seqlen_q,
        )
        elsewhere = altered(problem, plan="device", workspace=bytes_of(batch.workspace))
        key = key_for(problem.op, self.kernel)
        hosts = _planned_by_host()
        found = select(problem, key)
        if (
            found.kernel is not None
            and found.kernel.name in hosts
            and found.rank <= select(elsewhere, key).rank
        ):
            return found.kernel
        return choose(problem if found.policy.forced(problem.op) in hosts else elsewhere, key)


def _on_host(batch: PagedBatch) -> dict[str, Tensor]:
    """The lengths of a batch for a plan, where the host knows them and the table has no holes."""
    lengths = batch.host
    if lengths is None or batch.holes:
        return {}
    starts = list(accumulate(lengths.new_tokens, initial=0))
    numbers = {"seq_lens_cpu": lengths.seq_lens, "cu_seqlens_q_cpu": starts}
    return {n: torch.tensor(x, dtype=torch.int32, device="cpu") for n, x in numbers.items()}


def _planned_by_host() -> tuple[str, ...]:
    return tuple(
        name
        for name, kernel in kernels_of("plan_mla_attention").items()
        if kernel.plan.sizes is not None
    )


def device_plan(kernel: Kernel, spec: Problem, batch: PagedBatch, q_heads: int) -> Any:
    """The plan that `kernel` reads on the device, made by torch ops that a graph may hold; None: it
    reads no plan.

    q_heads: in place of the kind's, because Dynamo of torch 2.11 traces no `replace` of a Problem.
    """
    if kernel.plan.device is None:
        return None
    # A plan needs the query's shape, dtype and device, and there is no query yet.
    query = torch.empty((), dtype=spec.dtype, device=batch.page_table.device).expand(
        batch.slots.shape[0], q_heads, spec.head_dim
    )
    return kernel.plan.device(
        q_nope=query[..., : spec.v_head_dim],
        q_pe=query[..., spec.v_head_dim :],
        page_table=batch.page_table,
        seq_lens=batch.seq_lens,
        cu_seqlens_q=batch.cu_seqlens_q,
        max_seqlen_q=batch.max_seqlen_q,
        causal=spec.rules.causal,
    )
