"""Two toy models: dense attention, and paged attention with its writes and metadata made in the
graph."""

import re
from functools import partial

import torch
from torch import nn

import attnops
from attnops.ops import cu_seqlens, slot_mapping, token_rows

HQ, HKV, D, PAGE = 4, 2, 16, 4


class Dense(nn.Module):
    def __init__(self, softcap=0.0):
        super().__init__()
        self.qkv, self.softcap = nn.Linear(HQ * D, (HQ + 2 * HKV) * D), softcap

    def forward(self, x):
        q, k, v = heads_of(self.qkv(x))
        return x + attnops.attention(q, k, v, causal=True, softcap=self.softcap).flatten(2)


def heads_of(qkv):
    return qkv.unflatten(-1, (-1, D)).split([HQ, HKV, HKV], -2)


class Paged(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(HQ * D, (HQ + 2 * HKV) * D), nn.Linear(HQ * D, HQ * D)
        for name in ("k_pages", "v_pages"):
            self.register_buffer(name, torch.zeros(16, PAGE, HKV, D))

    def forward(self, x, page_table, seq_lens, cu, slots, longest):
        q, k, v = heads_of(self.qkv(x))
        pages = self.k_pages, self.v_pages
        attnops.write_kv(k, v, *pages, slots)
        return x + self.out(
            attnops.paged_attention(
                q, *pages, page_table, seq_lens, cu, max_seqlen_q=longest
            ).flatten(1)
        )


class PagedModel(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.layers = nn.ModuleList(Paged() for _ in range(layers))

    def forward(self, x, page_table, seq_lens, new, positions, longest):
        cu = cu_seqlens(new)
        slots = slot_mapping(positions, token_rows(cu, x.shape[0]), page_table, page_size=PAGE)
        for layer in self.layers:
            x = layer(x, page_table, seq_lens, cu, slots, longest)
        return x

    def clear(self):
        for pages in self.buffers():
            pages.zero_()

    def pages(self):
        return [pages.clone() for pages in self.buffers()]


def step(new, lengths):
    """Arguments of a PagedModel. lengths: of each request, its new tokens included."""
    table = torch.tensor([[1, 2, 3], [4, 5, 0]], dtype=torch.int32)
    positions = torch.cat(
        [torch.arange(length - n, length) for n, length in zip(new, lengths, strict=True)]
    )
    counts = (torch.tensor(x, dtype=torch.int32) for x in (lengths, new))
    return torch.randn(sum(new), HQ * D), table, *counts, positions, max(new)


prefill, decode = partial(step, (3, 2), (3, 2)), partial(step, (1, 1), (4, 3))


class Passing:
    """A backend that runs a pass and compiles no further. found: what the pass returned, by
    graph."""

    def __init__(self, run_pass):
        self.run_pass, self.found, self.graphs = run_pass, [], []

    def __call__(self, gm, inputs):
        self.found.append(self.run_pass(gm))
        self.graphs.append(gm)
        return gm.forward

    def calls(self, target):
        """How many calls of a function each graph has."""
        return [len(gm.graph.find_nodes(op="call_function", target=target)) for gm in self.graphs]


def compiled_code(call):
    """The result of the first call of something compiled, and all code Inductor wrote for it."""
    from torch._inductor.utils import run_and_get_code

    result, code = run_and_get_code(call)
    return result, "\n".join(code)


def code_of(run, *given, **options):
    """The generated code of a model, which gives what the model gives."""
    want = run(*given)
    got, code = compiled_code(lambda: torch.compile(run, fullgraph=True, **options)(*given))
    torch.testing.assert_close(got, want)
    return code


def kernel_calls(code):
    """`op.kernel` of each call of ours in generated code, in order; of a kernel lowered in place,
    of its core, or of torch's attention."""
    found, within = [], []
    for line in code.splitlines():
        if "Source Nodes: [" in line:
            within = re.findall(
                r"attnops\.(\w*attention\.\w+)",
                line.partition("Source Nodes: [")[2].partition("]")[0],
            )
        elif call := re.search(r"torch\.ops\.attnops\.(\w+\.\w+?)(?:\.default|\.run)?\(", line):
            found.append(".".join(call[1].removesuffix(".default").split("__")))
        elif within and re.search(r"torch\.ops\.aten\._scaled_dot_product\w+(\.default)?\(", line):
            found += within
    return found
