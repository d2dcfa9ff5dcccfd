"""Layers compiled by Inductor give eager's logits, and those of a process are on disk for the next
one."""

import json

import pytest

from tests.helpers import fresh_process, ready_process

CODE = """
import json
import torch
from torch._dynamo.utils import counters
import attnops
from attnops.graphs.compile_pieces import inductor
from attnops.hf import Decode, tiny
from attnops.hf.cache.names import named
from tests.graphs.standin import StandIn

model, device, ids = tiny.model("llama"), StandIn(), torch.arange(5 * {rows}).view({rows}, 5)

def inner(module, examples):
    layer = any(node.target is torch.nn.functional.linear for node in module.graph.nodes)
    return device.opaque(inductor(module, examples)) if layer else module

with torch.no_grad():
    want = model(ids).logits[:, -1:]
with torch.no_grad(), attnops.patch(model, cache="paged", decode=Decode("piecewise", inner=inner, graphs=device)) as handle:
    cache = handle.new_cache({rows}, 40)
    model(ids[:, :4], **named(cache))
    torch.testing.assert_close(handle.step(ids[:, 4:], cache), want, rtol=1e-4, atol=1e-4)
    report = handle.graphs.report()
found = counters["inductor"]
print(json.dumps([report.whole, report.compiled["decode"], found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]]))
"""  # noqa: E501


@pytest.mark.full
def test_a_second_process_compiles_nothing(tmp_path):
    """Nor does it for a cache of other sizes. Keys hold names of symbols and pages, which may not
    depend on the process."""
    found = []
    for process, seed, rows in ((ready_process, "1", 2), (fresh_process, "2", 3)):
        env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONHASHSEED": seed}
        found.append(json.loads(process(CODE.format(rows=rows), env=env).splitlines()[-1]))
    assert found == [["", 6, 0, 3], ["", 6, 3, 0]]
