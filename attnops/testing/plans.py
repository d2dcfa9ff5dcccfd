"""Calls of kernels that plan on the host: `planned` makes the plan of a call, `PLAN_CASES` is the grid of the plan ops themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnops.kernel import Kernel, kernels_of
from attnops.ops import OPS
from attnops.testing import builders, latent
from attnops.testing.inputs import Call, Case, Features, Source


def planned(kernel: Kernel, call: Call, policy: str = "", buffers: tuple[Tensor, Tensor] | None = None) -> Call:
    """`call` with the plan that `kernel` wants; as it is when the kernel wants none, or would not take it with a plan either.

    buffers: plan and workspace to write into; new ones of the least size when None.
    """
    maker = None if call.arguments.get("plan") is not None else kernels_of(f"plan_{call.op}").get(kernel.name)
    if maker is None or maker.plan_sizes is None or kernel.refusals(replace(call.problem, plan="host")):
        return call
    made = plan_call(call, maker, buffers)
    with torch.no_grad():
        maker.run(*made.args, **made.kwargs, policy=policy)
    return call.with_(plan=made.arguments["plan"], workspace=made.arguments["workspace"])


def plan_call(call: Call, maker: Kernel, buffers: tuple[Tensor, Tensor] | None = None) -> Call:
    """The call of the plan op that goes with `call`, whose Problem gives the statics their values."""
    p = call.problem
    pool = call.arguments["k_pages" if "k_pages" in call.arguments else "latent_pages"]
    known: dict[str, Any] = {
        **vars(p), "window_left": p.window[0], "window_right": p.window[1], "num_tokens": call.args[0].shape[0],
        "max_seqlen_q": call.arguments["max_seqlen_q"], "dtype": str(p.dtype)[6:], "kv_dtype": str(p.kv_dtype)[6:],
        "num_pages": pool.shape[0],
    }  # fmt: skip
    op = f"plan_{call.op}"
    names = [a.name for a in OPS[op].packet.default._schema.arguments]
    statics = {n: known[n] for n in names if n in known and n not in ("plan", "workspace")}
    tables = {n: call.arguments[n] for n in ("page_table", "seq_lens", "cu_seqlens_q")}
    device = tables["page_table"].device
    if buffers is None:
        requests, pages = tables["page_table"].shape
        fixed = {n: v for n, v in statics.items() if n not in ("num_tokens", "max_seqlen_q", "num_pages")}
        assert maker.plan_sizes is not None
        sizes = maker.plan_sizes(**fixed, max_tokens=known["num_tokens"], max_requests=requests, max_pages=pages, device=device)
        buffers = torch.zeros(sizes[0], dtype=torch.int64), torch.zeros(sizes[1], dtype=torch.uint8, device=device)
    return Call(op, {**tables, **statics, "plan": buffers[0], "workspace": buffers[1]}, writes=("plan", "workspace"))


def _case(label: str, q_lens: Sequence[int], seq_lens: Sequence[int], page: int, f: Features, **more: Any) -> Case:
    def build(source: Source) -> Call:
        call = builders.paged(source, q_lens, seq_lens, page, f, **more)
        # What any kernel asks for these calls: on a GPU, some bytes for each of its multiprocessors.
        size = 1 << (26 if source.device.type == "cuda" else 21)
        buffers = torch.zeros(1 << 15, dtype=torch.int64), torch.zeros(size, dtype=torch.uint8, device=source.device)
        return plan_call(call, kernels_of("plan_paged_attention")["reference"], buffers)

    return Case("plan_paged_attention", label, build)


def _latent(label: str, q_lens: Sequence[int], seq_lens: Sequence[int], page: int, f: Features, **more: Any) -> Case:
    def build(source: Source) -> Call:
        call = latent.mla(source, q_lens, seq_lens, page, f, **more)
        # As above; what FlashInfer's planner of latents asks for follows from the GPU alone.
        size = 1 << (25 if source.device.type == "cuda" else 21)
        buffers = torch.zeros(1 << 17, dtype=torch.int64), torch.zeros(size, dtype=torch.uint8, device=source.device)
        return plan_call(call, kernels_of("plan_mla_attention")["reference"], buffers)

    return Case("plan_mla_attention", label, build)


_LLAMA = Features(dtype=torch.bfloat16, head_dim=128, q_heads=8, causal=True)
PLAN_CASES: dict[str, tuple[Case, ...]] = {
    "plan_paged_attention": (
        _case("decode", (1, 1, 1), (5, 40, 16), 16, _LLAMA),
        _case("decode_padded", (1, 0, 1), (5, 3, 33), 16, _LLAMA),
        _case("extend", (1, 4, 0, 2), (6, 4, 0, 21), 16, _LLAMA),
        _case("window", (1, 4), (6, 40), 16, replace(_LLAMA, window=(7, -1))),
        _case("sinks", (1, 4), (6, 40), 16, replace(_LLAMA, sinks=torch.bfloat16)),
        _case("softcap", (1, 4), (6, 40), 16, replace(_LLAMA, softcap=30.0, dtype=torch.float16, head_dim=64)),
        _case("not_causal", (1, 4), (6, 40), 1, replace(_LLAMA, causal=False, head_dim=256)),
        _case("unlike_dims", (3, 4), (6, 40), 64, replace(_LLAMA, head_dim=192, v_head_dim=128)),
        _case("no_requests", (), (), 4, _LLAMA),
        _case("no_table", (1, 1), (0, 0), 4, _LLAMA, wider=0),
        _case("nothing", (), (), 4, _LLAMA, padding=0, spare=0, wider=0),
    ),
    "plan_mla_attention": (
        _latent("decode", (1, 1, 1), (5, 40, 16), 16, latent.DEEPSEEK),
        _latent("decode_padded", (1, 0, 1), (5, 3, 33), 64, latent.DEEPSEEK),
        _latent("decode_heads_128", (1, 1), (5, 300), 64, replace(latent.DEEPSEEK, q_heads=128)),
        _latent("extend", (1, 4, 0, 2), (6, 4, 0, 21), 1, latent.DEEPSEEK),
        _latent("not_causal", (1, 4), (6, 40), 64, replace(latent.DEEPSEEK, causal=False, dtype=torch.float16)),
        _latent("no_requests", (), (), 64, latent.DEEPSEEK),
        _latent("no_table", (1, 1), (0, 0), 64, latent.DEEPSEEK, wider=0),
        _latent("nothing", (), (), 64, latent.DEEPSEEK, padding=0, spare=0, wider=0),
    ),
}
