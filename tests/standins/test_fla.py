"""`fla` through stand-ins of the functions it calls: which it calls, on what, and what a capture
wants."""

import inspect

import pytest
import torch

from attnops.core.errors import NotCompiled
from attnops.core.kernel import kernels_of
from attnops.core.needs import _installed
from attnops.kernels.fla import recurrent as kernel
from attnops.testing import Source, check_kernel, make_call
from tests.standins import fla_ops

NAME = "fla"
BF16 = torch.bfloat16
CONV_WIDTH = 4
CONV = ["causal_conv1d_fwd", "causal_conv1d_update_states"]
CHUNKS = [
    "l2norm_fwd",
    "l2norm_fwd",
    "chunk_local_cumsum",
    "chunk_gated_delta_rule_fwd_intra",
    "chunk_gated_delta_rule_fwd_h",
    "chunk_fwd_o",
]


def rule(lengths, **more):
    sizes = (1, 2, 32, 16, BF16, {"normalize": True} | more)
    return make_call("gated_delta_rule", Source(3), lengths, *sizes)


def conv(lengths, kept=CONV_WIDTH, **more):
    call = make_call("causal_conv1d", Source(3), lengths, 36, CONV_WIDTH, BF16, more)
    state = torch.randn(len(lengths), 36, kept).to(BF16)
    return call.with_(state=state)


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (lambda: rule((64, 3)), [kernel.STEP]),
        (lambda: rule((65, 0, 3)), CHUNKS),
        (lambda: rule((200,), padding=None), CHUNKS),
        (lambda: rule((130, 0, 65), padding=None, fresh=True), CHUNKS),
        (lambda: conv((1, 1), padding=None), ["causal_conv1d_update"]),
        (lambda: conv((1, 1), padding=None, fresh=True), ["causal_conv1d_update"]),
        (lambda: conv((1, 1)), CONV),
        (lambda: conv((1, 1), CONV_WIDTH - 1, padding=None), CONV),
        (lambda: conv((70,), padding=None), CONV),
    ],
    ids=[
        "steps",
        "packed",
        "one",
        "fresh",
        "conv_step",
        "fresh_step",
        "padded",
        "shorter_state",
        "conv",
    ],
)
def test_what_is_called(call, wanted, standin):
    made = call()
    assert check_kernel(kernels_of(made.op)[NAME], made).worst <= 1.0
    assert standin == wanted


def test_the_step_writes_states_where_they_are(standin, monkeypatch):
    call = rule((1, 1), padding=None)
    seen = []
    monkeypatch.setattr(fla_ops, "step", lambda **given: seen.append((given["h0"], given["ht"])))
    kernels_of(call.op)[NAME].run(call.record)
    assert all(x.data_ptr() == call.record.state.data_ptr() for x in seen[0])


@pytest.mark.parametrize("call", [lambda: rule((70,)), lambda: conv((5,))], ids=["rule", "conv"])
def test_a_new_kind_is_refused_in_a_capture(call, standin, monkeypatch):
    kernel.kinds().clear()
    capturing = [True]
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(kernel, "clear", lambda *parts: None)
    made = call()
    run = kernels_of(made.op)[NAME].run
    with pytest.raises(NotCompiled, match="fla: got a kind of call not yet compiled"):
        run(made.record)
    capturing[0] = False
    run(made.record)
    capturing[0] = True
    run(made.record)


@pytest.mark.skipif(not _installed("fla"), reason="fla-core is not installed")
@pytest.mark.parametrize("name", fla_ops.BODIES)
def test_the_standin_has_the_arguments_of_the_package(name):
    theirs = inspect.signature(kernel.function(name)).parameters
    ours = inspect.signature(fla_ops.BODIES[name]).parameters
    assert set(ours) <= set(theirs)
