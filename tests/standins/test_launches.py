"""What the wraps of foreign kernels launch besides them: nothing but views and empty tensors, or
what is listed here with its reason.

Over stand-ins: aten ops that a wrap calls are counted, those of the stand-ins are not. On a GPU
each is a launch.
"""

import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import attnops
from attnops.core.kernel import kernels_of
from attnops.testing import Features, Source, equip, make_call, with_device_plan
from tests.standins import test_speculative
from tests.standins.calls import is_free
from tests.standins.vendors import VENDORS

BF16 = torch.bfloat16
# By import: a clone may lie in a folder of any name, and torch may be installed below it.
PACKAGE, STANDINS = (str(Path(file).parent) + os.sep for file in (attnops.__file__, __file__))

# By (op, kernel, planned): the ops besides the foreign ones, and why they are there.
OWN_OUTPUT = "the foreign call returns a tensor of its own, and the op writes into the caller's"
BLIND = (
    "the kernel reads before its table for a row without keys, which is given one key and "
    "cleared afterwards"
)
ROWS = "one query token a row, made once a step where a plan is brought"
EXTRA: dict[tuple[str, str, bool], tuple[dict[str, int], str]] = {
    ("attention", "fa3", False): ({}, ""),
    ("varlen_attention", "fa3", False): ({}, ""),
    ("paged_attention", "fa3", False): ({}, ""),
    ("mla_attention", "fa3", False): (
        {"zero_": 1},
        "rows of no request are not written by the kernel, and the op has no promise of none",
    ),
    ("mla_attention", "flashmla", True): ({"copy_": 1}, OWN_OUTPUT),
    ("mla_attention", "flashmla", False): ({"decode_rows": 1, "copy_": 1}, f"{ROWS}; {OWN_OUTPUT}"),
    ("mla_attention", "flashmla_fp8", True): (
        {"clamp": 1, "eq": 1, "masked_fill": 1, "copy_": 1},
        f"{BLIND}; {OWN_OUTPUT}",
    ),
    ("mla_attention", "flashmla_fp8", False): (
        {"decode_rows": 1, "clamp": 1, "eq": 1, "masked_fill": 1, "copy_": 1},
        f"{ROWS}; {BLIND}; {OWN_OUTPUT}",
    ),
    ("mla_attention", "flashinfer_mla_fa2", False): ({}, ""),
    ("mla_attention", "flashinfer_mla_fa3", False): ({}, ""),
}
NOT_HERE = {
    "cutlass_mla": (
        "SM100, never run on hardware: pads heads and tables, and clears rows without keys"
    ),
    "trtllm_mla": "SM100, never run on hardware",
    "trtllm": "SM100, never run on hardware",
    "fa4": "SM100, never run on hardware",
    "xqa": "rows without keys are cleared: FlashInfer's module is built for each call's kind",
    "flashinfer": "its plan is the host's; tests/standins/test_flashinfer.py",
    "flashinfer_rope": "one call of one launch; tests/standins/test_flashinfer_rope.py",
    "aten_flash": "torch's own op",
}


class Launches(TorchDispatchMode):
    """Counts what code of attnops calls, by the nearest caller that is ours or a stand-in's."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, space = func._schema.name.partition("::")[2], func.namespace
        frame = sys._getframe(1)
        while not (file := frame.f_code.co_filename).startswith((PACKAGE, STANDINS)):
            frame = frame.f_back
        core = space == "attnops" and "__" in name
        if (
            file.startswith(PACKAGE)
            and space in ("aten", "attnops")
            and not is_free(func)
            and not core
        ):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def a_call(op, name):
    f = Features(dtype=BF16, head_dim=64, q_heads=8, kv_heads=2, causal=True)
    if op == "mla_attention":
        call = test_speculative.call(name, (1, 1, 1), (70, 9, 130))
        t = call.arguments
        both = torch.cat([t[n].view(torch.uint8) for n in ("q_nope", "q_pe")], -1).view(
            t["q_nope"].dtype
        )
        return call.with_(q_nope=both[..., :512], q_pe=both[..., 512:])
    if op == "attention":
        return make_call("attention", Source(0), 2, 5, 5, f)
    if op == "varlen_attention":
        return make_call("varlen_attention", Source(0), (5, 3), (5, 3), f, padding=None)
    return make_call("paged_attention", Source(0), (1, 1), (9, 30), 16, f, padding=None)


@pytest.mark.parametrize(("op", "name", "planned"), EXTRA, ids=str)
def test_a_wrap_launches_its_kernel_and_what_is_listed(op, name, planned):
    kernel = kernels_of(op)[name]
    with VENDORS[name].running():
        call = equip(kernel, a_call(op, name))
        call = with_device_plan(kernel, call) if planned else call
        assert (call.arguments.get("plan") is not None) == (
            planned or name.startswith("flashinfer_mla")
        )
        assert not kernel.refusals(call.problem), kernel.refusals(call.problem)
        call = (
            call.with_(holes=False) if "page_table" in call.arguments else call
        )  # as the caches' batches say
        record = call.record
        with torch.no_grad(), Launches() as launches:
            kernel.run(record)
    assert launches.found == EXTRA[op, name, planned][0]


def test_every_foreign_kernel_is_listed():
    ops = ("attention", "varlen_attention", "paged_attention", "mla_attention")
    foreign = {
        (op, k.name)
        for op in ops
        for k in kernels_of(op).values()
        if k.packages and "triton" not in {p.module for p in k.packages}
    }
    listed = {(op, name) for op, name, _ in EXTRA}
    assert {name for op, name in foreign - listed} <= set(NOT_HERE) and listed <= foreign
    assert all(reason for extra, reason in EXTRA.values() if extra)
