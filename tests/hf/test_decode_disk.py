"""The compiled layers of a process are on disk for the next one."""

import json

from tests.helpers import fresh_process

CODE = """
import json
import torch
from torch._dynamo.utils import counters
import attnops
from attnops.graphs.pieces import inductor
from attnops.hf import Decode, tiny
from tests.graphs.standin import StandIn

model, device = tiny.model("llama"), StandIn()
inner = lambda module, examples: device.opaque(inductor(module, examples))
with torch.no_grad(), attnops.patch(model, cache="paged", decode=Decode("piecewise", inner=inner, graphs=device)) as handle:
    cache, ids = handle.new_cache({rows}, 40), torch.full(({rows}, 5), 7)
    model(ids, past_key_values=cache)
    handle.step(ids[:, :1], cache)
    report = handle.graphs.report()
found = counters["inductor"]
print(json.dumps([report.whole, report.compiled["decode"], found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]]))
"""


def test_a_second_process_compiles_nothing(tmp_path):
    """Nor does it for a cache of other sizes. Keys hold names of symbols and pages, which may not depend on the process."""
    found = []
    for seed, rows in (("1", 2), ("2", 3)):
        env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONHASHSEED": seed}
        found.append(json.loads(fresh_process(CODE.format(rows=rows), env=env).splitlines()[-1]))
    assert found == [["", 5, 0, 5], ["", 5, 5, 0]]
