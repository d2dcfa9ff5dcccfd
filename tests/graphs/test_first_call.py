"""What the first call of a process imports, in a process of its own."""

from tests.helpers import fresh_process

STEP = """
import sys
import torch
import attnops
from attnops.graphs import piecewise
from tests.graphs.helpers import Pair
pair = Pair(piecewise, layers=2)
pair.agree("ab", 3)
pair.agree("ab")
print(pair.step.report().compile_seconds > 0, "torch._inductor.lowering" in sys.modules)
q = torch.randn(1, 4, 2, 8)
torch.compile(lambda q: attnops.attention(q, q, q), backend="aot_eager")(q)
print("torch._inductor.lowering" in sys.modules)
"""


def test_a_step_that_is_traced_and_not_compiled_imports_no_lowering():
    """It takes more of a first call than the trace. A later trace, which may go to Inductor, has
    it."""
    assert fresh_process(STEP).split() == ["True", "False", "True"]
