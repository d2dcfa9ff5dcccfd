"""Two toy models: dense attention, and paged attention with its writes and metadata made in the graph."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import attnops
from attnops.ops import cu_seqlens, slot_mapping, token_rows

HQ, HKV, D, PAGE = 4, 2, 16, 4


class Dense(nn.Module):
    def __init__(self, softcap: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.softcap = nn.Linear(HQ * D, (HQ + 2 * HKV) * D), softcap

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([HQ * D, HKV * D, HKV * D], -1)
        b, s = x.shape[:2]
        return x + attnops.attention(
            q.view(b, s, HQ, D), k.view(b, s, HKV, D), v.view(b, s, HKV, D), causal=True, softcap=self.softcap
        ).view(b, s, HQ * D)


class Paged(nn.Module):
    def __init__(self, pages: int = 16) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HQ * D, (HQ + 2 * HKV) * D), nn.Linear(HQ * D, HQ * D)
        self.register_buffer("k_pages", torch.zeros(pages, PAGE, HKV, D))
        self.register_buffer("v_pages", torch.zeros(pages, PAGE, HKV, D))

    def forward(self, x: Tensor, page_table: Tensor, seq_lens: Tensor, cu: Tensor, slots: Tensor, longest: int) -> Tensor:
        q, k, v = self.qkv(x).split([HQ * D, HKV * D, HKV * D], -1)
        attnops.write_kv(k.view(-1, HKV, D), v.view(-1, HKV, D), self.k_pages, self.v_pages, slots)
        o = attnops.paged_attention(q.view(-1, HQ, D), self.k_pages, self.v_pages, page_table, seq_lens, cu, max_seqlen_q=longest)
        return x + self.out(o.view(-1, HQ * D))


class PagedModel(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Paged() for _ in range(layers))

    def forward(self, x: Tensor, page_table: Tensor, seq_lens: Tensor, new: Tensor, positions: Tensor, longest: int) -> Tensor:
        cu = cu_seqlens(new)
        slots = slot_mapping(positions, token_rows(cu, x.shape[0]), page_table, page_size=PAGE)
        for layer in self.layers:
            x = layer(x, page_table, seq_lens, cu, slots, longest)
        return x

    def clear(self) -> None:
        for layer in self.layers:
            layer.k_pages.zero_()
            layer.v_pages.zero_()

    def pages(self) -> list[Tensor]:
        return [p.clone() for layer in self.layers for p in (layer.k_pages, layer.v_pages)]


class Step(NamedTuple):
    x: Tensor
    page_table: Tensor
    seq_lens: Tensor
    new: Tensor
    positions: Tensor
    longest: int


def prefill() -> Step:
    table = torch.tensor([[1, 2, 3], [4, 5, 0]], dtype=torch.int32)
    new = torch.tensor([3, 2], dtype=torch.int32)
    return Step(torch.randn(5, HQ * D), table, new.clone(), new, torch.tensor([0, 1, 2, 0, 1]), 3)


def decode() -> Step:
    table = torch.tensor([[1, 2, 3], [4, 5, 0]], dtype=torch.int32)
    lengths, new = torch.tensor([4, 3], dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    return Step(torch.randn(2, HQ * D), table, lengths, new, torch.tensor([3, 2]), 1)


class Passing:
    """A backend that runs a pass and compiles no further. found: what the pass returned, by graph."""

    def __init__(self, run_pass: Callable[[Any], Any]) -> None:
        self.run_pass, self.found, self.graphs = run_pass, list[Any](), list[Any]()

    def __call__(self, gm: torch.fx.GraphModule, inputs: Any) -> Any:
        self.found.append(self.run_pass(gm))
        self.graphs.append(gm)
        return gm.forward

    def calls(self, target: Any) -> list[int]:
        """How many calls of a function each graph has."""
        return [len(gm.graph.find_nodes(op="call_function", target=target)) for gm in self.graphs]


def compiled_code(call: Callable[[], Any]) -> tuple[Any, str]:
    """The result of the first call of something compiled, and all code Inductor wrote for it."""
    from torch._inductor.utils import run_and_get_code

    result, code = run_and_get_code(call)
    return result, "\n".join(code)


def kernel_calls(code: str) -> list[str]:
    """`op.kernel` of each call of ours in generated code, in order; of a kernel lowered in place, of its core, or of torch's attention."""
    found, within = [], []
    for line in code.splitlines():
        if "Source Nodes: [" in line:
            within = re.findall(r"attnops\.(\w*attention\.\w+)", line.partition("Source Nodes: [")[2].partition("]")[0])
        elif call := re.search(r"torch\.ops\.attnops\.(\w+\.\w+?)(?:\.default|\.run)?\(", line):
            found.append(".".join(call[1].removesuffix(".default").split("__")))
        elif within and re.search(r"torch\.ops\.aten\._scaled_dot_product\w+(\.default)?\(", line):
            found += within
    return found
