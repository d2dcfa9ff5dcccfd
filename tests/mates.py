"""Requests taken out of a batch: what must be bit for bit the same with and without the others."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnops.core.kernel import Kernel
from attnops.core.record import changed, split
from attnops.core.select import Policy, select
from attnops.testing import Call, Source
from attnops.testing.calls import planned

POLICY = "deterministic"
BY_TOKEN = ("query", "q_nope", "q_pe", "mask", "temperature", "indices", "topk_length", "output", "lse")
RESULTS = ("output", "lse", "weights", "index")
BY_REQUEST = ("page_table", "seq_lens", "block_count", "block_offset", "column_count", "column_index")
WEIGHTS = ("weight", "norm_weight", "bias", "gate_up", "gate_up_scales", "gate_up_bias", "down", "down_scales", "down_bias")


def invariant(kernel: Kernel) -> Kernel:
    """The kernel, given every call with the policy."""
    return replace(kernel, run=lambda call: kernel.run(changed(call, policy=POLICY)), contract=2)


def rows_of(call: Call, chosen: Sequence[int]) -> Tensor:
    """The tokens of these requests; of a dense or a sparse call, and of a merge, requests are rows."""
    device = next(iter(call.tensors().values())).device
    if "cu_seqlens_q" not in call.arguments:
        return torch.tensor(list(chosen), device=device)
    starts = call.arguments["cu_seqlens_q"].tolist()
    return torch.cat([torch.arange(starts[b], starts[b + 1], device=device) for b in chosen])


def only(call: Call, chosen: Sequence[int], columns: int = 0) -> Call:
    """The call of these requests alone, in a page table of `columns` more columns. What is written is NaN beforehand."""
    t, rows = call.arguments, rows_of(call, chosen)
    new: dict[str, Any] = {}
    if "cu_seqlens_q" not in t:  # dense, sparse, merges: every tensor of rows
        count = next(iter(call.tensors().values())).shape[0]
        same = (
            *("sinks", "k_scale", "v_scale", "kv_scale", "q_scale", "latent_pages", "k_pages", "v_pages"),
            *("q_norm", "k_norm", "workspace", *WEIGHTS),
        )
        new = {n: x[rows] for n, x in call.tensors().items() if n not in same and x.shape[0] == count}
        new |= {"page_table": pad(new["page_table"], (0, columns), value=-1)} if "page_table" in new else {}
    else:
        new = {n: t[n][rows] for n in BY_TOKEN if n in t}
        new |= {n: t[n][list(chosen)] for n in BY_REQUEST if n in t}
        source = Source(device=rows.device)
        lengths = t["cu_seqlens_q"].diff()[list(chosen)].tolist()
        new |= {"cu_seqlens_q": source.cumulative(lengths), "max_seqlen_q": max(lengths)}
        if "cu_seqlens_k" in t:
            starts = t["cu_seqlens_k"].tolist()
            keys = torch.cat([torch.arange(starts[b], starts[b + 1], device=rows.device) for b in chosen])
            lengths = t["cu_seqlens_k"].diff()[list(chosen)].tolist()
            new |= {"key": t["key"][keys], "value": t["value"][keys]}
            new |= {"cu_seqlens_k": source.cumulative(lengths), "max_seqlen_k": max(lengths)}
        if "page_table" in t:
            page = t["k_pages" if "k_pages" in t else "latent_pages"].shape[1]
            new["page_table"] = pad(new["page_table"], (0, columns), value=-1)
            new |= {"mask": pad(new["mask"], (0, columns * page))} if "mask" in new else {}
    if "block_count" in t:  # as many blocks as the lists have
        new |= {n: t[n] for n in ("max_seqlen_q", "max_seqlen_k")}
    for name in RESULTS:
        if name in call.mutated:
            unwritten = float("nan") if new[name].is_floating_point() else -1
            new[name] = torch.full_like(new[name], unwritten)
    return call.with_(**new)


def results(call: Call, kernel: Kernel | None = None) -> list[Tensor]:
    """What the op gives under a deterministic policy: of `kernel` with the plan it wants from the host, or of the one that is chosen."""
    call = call if kernel is None else planned(kernel, call, POLICY)
    record = changed(call.record, policy=POLICY)
    args, kwargs = split(record)
    returned = getattr(torch.ops.attnops, call.op).default(*args, **kwargs) if kernel is None else kernel.run(record)
    if returned is None:
        return [call.arguments[n] for n in RESULTS if n in call.mutated]
    return [x for x in (returned if isinstance(returned, tuple) else (returned,)) if x.numel()]


def may_be_chosen(kernel: Kernel, call: Call) -> bool:
    """Does the kernel take this call under a deterministic policy, given the plan it wants?"""
    problem = planned(kernel, call, POLICY).problem
    return kernel.name not in select(problem, Policy(deterministic=True)).refused


def same_bits(call: Call, groups: Sequence[Sequence[int]], kernel: Kernel | None = None) -> None:
    """Every group of requests alone gives what it gives among the others, in page tables of several widths."""
    whole = [x.clone() for x in results(call, kernel)]
    assert whole
    for n, chosen in enumerate(groups):
        rows = rows_of(call, chosen)
        for among, alone in zip(whole, results(only(call, chosen, columns=n), kernel), strict=True):
            assert not alone.isnan().any()
            assert torch.equal(among[rows], alone), f"requests {tuple(chosen)} differ when they are alone"
