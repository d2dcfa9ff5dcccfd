"""The compile caches never return a graph chosen under other circumstances: several processes share
one cache folder."""

import json

from attnops.core.kernel import kernels_of
from attnops.core.problem import Target, altered, pretend
from attnops.lowering import cache_key
from attnops.measured import Grid, Table, cpu_name
from attnops.measured.store import path_for
from attnops.measured.table import version_of
from attnops.ops.attention.timed import DENSE
from attnops.ops.sweeps import toy
from tests.helpers import ready_process
from tests.lowering.models import HKV, HQ, D

PROGRAM = """
import json, torch
from torch._dynamo.utils import counters
import attnops
from attnops.core.problem import Target, pretend
from tests.lowering.models import Dense, HQ, D, compiled_code, kernel_calls
torch.manual_seed(0)
model, x = Dense().eval(), torch.randn(2, 8, HQ * D)
for policy in {policies}:
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad(), attnops.use(**policy):
        _, code = compiled_code(lambda: torch.compile(model, fullgraph=True)(x))
    assert ("attention.reference.run(" in code) == ("kernel" in policy or "attention.reference" in kernel_calls(code))
    hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    print(json.dumps([kernel_calls(code), bool(hits)]))
"""  # noqa: E501

NEWCOMER = """
from dataclasses import replace
from functools import wraps
from attnops.core.kernel import kernels_of, register
body = kernels_of("attention")["sdpa"].run
@wraps(body)
def run(call):
    return body(call)
register(replace(kernels_of("attention")["sdpa"], name="newcomer", run=run, cost_us=lambda p: 0.0))
"""


def run(tmp_path, *policies, **env):
    """In a new process, under each policy in turn (none, unless given): the kernels in the code,
    and whether it came from the cache."""
    env["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "cache")
    lines = ready_process(PROGRAM.format(policies=policies or ({},)), env=env).splitlines()
    return [tuple(json.loads(line)) for line in lines if line.startswith("[[")]


def write_table(folder, **us):
    """Measured times of this CPU, as `attnops tune` leaves them under the cache folder."""
    kernels = kernels_of("attention")
    heads = {"q_heads": HQ, "kv_heads": HKV, "head_dim": D, "v_head_dim": D}
    grid = Grid(
        altered(toy(DENSE), **heads), (1.0,), (8.0,), (1.0,), {name: (t,) for name, t in us.items()}
    )
    versions = {f"attention.{name}": version_of(kernels[name]) for name in us}
    path = folder / "tables" / path_for(cpu_name()).name
    path.parent.mkdir(parents=True)
    path.write_text(Table(cpu_name(), "cpu", versions, (grid,)).to_json())


def test_other_circumstances_miss_and_the_same_ones_hit(tmp_path):
    sdpa, reference = ["attention.sdpa"], ["attention.reference"]
    assert run(tmp_path, {}, {"kernel": "reference"}) == [(sdpa, False), (reference, False)]
    # The same graph and policy, on a machine that has one more kernel.
    site = tmp_path / "site"
    info = site / "newcomer-0.1.dist-info"
    info.mkdir(parents=True)
    (site / "newcomer.py").write_text(NEWCOMER)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: newcomer\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[attnops.kernels]\nnewcomer = newcomer\n")
    assert run(tmp_path, PYTHONPATH=str(site)) == [(["attention.newcomer"], False)]
    # The same graph, kernels and versions, with measured times: by these the reference is faster.
    write_table(tmp_path / "mine", sdpa=9.0, reference=5.0)
    assert run(tmp_path, ATTNOPS_CACHE_DIR=str(tmp_path / "mine")) == [(reference, False)]
    assert run(tmp_path, ATTNOPS_CACHE_DIR=str(tmp_path / "mine")) == [(reference, True)]
    assert run(tmp_path, {}, {"kernel": "reference"}) == [(sdpa, True), (reference, True)], (
        "without newcomer and table, as at first"
    )


def test_circumstances_follow_target_registry_and_code():
    here = cache_key.choice_inputs()
    with pretend(Target("cuda", 90)):
        assert cache_key.choice_inputs() != here
    assert cache_key.choice_inputs() == here and cache_key.code_digest() in here
    # In a checkout it is a link.
    assert any("lowering" in str(file) for file in cache_key.code_files()), (
        "a changed lowering must change the key"
    )
