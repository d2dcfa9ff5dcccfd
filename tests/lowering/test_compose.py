"""attnops beside other users of the same compiler: their passes run, their lowerings stay, ours are registered once."""

import torch
from torch._inductor import config as inductor
from torch._inductor.custom_graph_pass import CustomGraphPass

from tests.lowering.models import HQ, D, Dense, compiled_code, kernel_calls


class CountPass(CustomGraphPass):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.seen.append(sum("attnops" in str(n.target) for n in graph.nodes))

    def uuid(self) -> str:
        return "a user's pass"


def test_a_users_pass_in_every_slot_runs_and_ours_is_not_in_the_way():
    model, x = Dense().eval(), torch.randn(2, 8, HQ * D)
    before, after = CountPass(), CountPass()
    with torch.no_grad(), inductor.patch(post_grad_custom_pre_pass=before, post_grad_custom_post_pass=after, force_disable_caches=True):
        got, code = compiled_code(lambda: torch.compile(model, fullgraph=True)(x))
        torch.testing.assert_close(got, model(x))
    assert before.seen == [1] and after.seen == [1]
    assert kernel_calls(code) == ["attention.sdpa"]


def test_installing_adds_our_lowerings_once_and_nothing_else():
    from torch._inductor.codegen.common import custom_backend_passes
    from torch._inductor.lowering import lowerings

    from attnops.lowering.choose import install

    before = set(lowerings)
    install()
    ours = {op: fn for op, fn in lowerings.items() if "attnops" in str(op)}
    install()
    assert {op: fn for op, fn in lowerings.items() if "attnops" in str(op)} == ours and lowerings.keys() - before == ours.keys() - before
    assert list(custom_backend_passes).count("attnops") == 1


def test_eager_import_does_not_load_the_compiler():
    from tests.helpers import torch_process

    out = torch_process(
        "import sys, torch, attnops\n"
        "q = torch.randn(1, 3, 2, 8)\n"
        "attnops.attention(q, q, q)\n"
        "print([m for m in sys.modules if m.startswith(('torch._inductor', 'torch._dynamo', 'attnops.lowering'))])"
    )
    assert out.strip() == "[]"
