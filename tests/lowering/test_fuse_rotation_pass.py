"""`fuse_rotation_pass` and `fuse_rotated_write_pass`: norms and rotations that feed
`decode_attention`, or attention of a prompt and its pages, found in models and in code that only
resembles them."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor.compile_fx import compile_fx

import attnops
from attnops.core.problem import Target, pretend
from attnops.hf import tiny
from attnops.hf.attention import over_pages as paged
from attnops.hf.cache.model_pages import ModelPages
from attnops.hf.cache.page_sizes import Sizes
from attnops.hf.steps import graphed_steps as steps
from attnops.kernels.shared.memory import COUNTERS
from attnops.lowering import fuse_rotated_write_pass, fuse_rotation_pass
from attnops.ops import (
    decode_attention,
    latent_layers,
    paged_attention,
    paged_layers,
    varlen_attention,
    write_kv,
)
from tests.hf.decoding import generated, how
from tests.lowering.models import Passing
from tests.lowering.test_fuse_norm_linear_pass import gemma, gpt_oss, llama, torchs

FORCED = {"decode_attention": "reference"}
CALLS = ((1, 14, 3), (3, 14, 3))
ALIKE = {"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2}
"""Layers of one kind have one trace."""
NOT = "not fused, query and key are not both rotated by halves"
OTHER_ANGLES = "not fused, query and key are rotated by different angles"


def said(backend):
    return {str(each).partition(": ")[2] for found in backend.found for each in found}


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    ("name", "calls", "found"),
    [
        ("llama", CALLS, "rotation"),
        ("qwen3", CALLS[:1], "norms and rotation"),
        ("gpt_oss", CALLS[:1], "rotation"),
        ("gemma3", CALLS[1:], "norms and rotation"),
        ("stablelm", CALLS[:1], NOT),
    ],
)
def test_models(name, calls, found, monkeypatch):
    """Recognised or left alone, in the trace of one row or in that of several; the tokens are
    eager's."""
    told = Passing(fuse_rotation_pass)
    monkeypatch.setattr(steps, "fuse_rotation_pass", lambda graph: told(graph, ()))
    model = tiny.model(name, **(ALIKE if name in ("gpt_oss", "gemma3") else {}))
    want = [generated(model, *call) for call in calls]
    with (
        attnops.use(kernel=FORCED),
        attnops.patch(model, cache="paged", decode=how("piecewise")) as handle,
    ):
        for call, tokens in zip(calls, want, strict=True):
            assert torch.equal(generated(model, *call), tokens), call
        assert handle.plain_steps == 0
    assert len(told.found) >= len(calls) and said(told) == {found}


def test_eager_steps_take_the_op(monkeypatch):
    taken, asked, once = [], [], ModelPages.one_launch
    monkeypatch.setattr(
        paged,
        "decode_attention",
        lambda *args, **more: taken.append(1) or decode_attention(*args, **more),
    )
    monkeypatch.setattr(
        ModelPages, "one_launch", lambda self: asked.append(bool(self._one_launch)) or once(self)
    )
    model = tiny.model("mistral")
    want = [generated(model, *call) for call in CALLS]
    with attnops.patch(model, cache="paged", decode=how("breakable")):
        for policy in (FORCED, {"paged_attention": "reference"}):
            taken.clear(), asked.clear()
            with attnops.use(kernel=policy):
                for call, tokens in zip(CALLS, want, strict=True):
                    assert torch.equal(generated(model, *call), tokens), call
            assert bool(taken) is (policy is FORCED)
            assert not taken or len(taken) == model.config.num_hidden_layers * sum(asked), (
                "a question a step"
            )


# Code that resembles a rotation -------------------------------------------------------------------

B, HQ, HKV, D = 3, 4, 2, 8


def turned(x, cos, sin):
    return x * cos + torch.cat((-x[..., D // 2 :], x[..., : D // 2]), dim=-1) * sin


def swapped(x, cos, sin):
    return sin * torch.cat((-x[..., D // 2 :], x[..., : D // 2]), dim=-1) + cos * x


def by_parts(x, cos, sin):
    first, second = torch.chunk(x, 2, dim=-1)
    cos, sin = cos[..., : D // 2], sin[..., : D // 2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def backwards(x, cos, sin):
    return x * cos + torch.cat((x[..., D // 2 :], -x[..., : D // 2]), dim=-1) * sin


def of_another_tensor(x, cos, sin):
    y = x * 2
    return x * cos + torch.cat((-y[..., D // 2 :], y[..., : D // 2]), dim=-1) * sin


class Gain(NamedTuple):
    """A norm of a layer."""

    gain: torch.Tensor


class Step:
    """A layer's step. turn: of query or key, given angles. between: runs before the attention. use:
    adds to the output."""

    rows = (B, 1)
    by_token = False
    """Are `[B, S, H, D]` rotated, and no `[B, H, S, D]`?"""

    def __init__(
        self,
        turn_q=turned,
        turn_k=turned,
        between=lambda *_: None,
        use=lambda *_: 0.0,
        norm=lambda m, x: x,
    ):
        self.turn_q = turn_q
        self.turn_k = turn_k
        self.between = between
        self.use = use
        self.norm = norm

    def __call__(self, qkv, cos, sin, q_norm, k_norm, k_pages, v_pages, table, lengths, slots):
        cos, sin = (x.unsqueeze(2 if self.by_token else 1) for x in (cos, sin))
        q, k, v = (x.view(*self.rows, -1, D) for x in qkv.split([HQ * D, HKV * D, HKV * D], -1))
        q, k = self.norm(Gain(q_norm), q), self.norm(Gain(k_norm), k)
        if not self.by_token:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        query, key = self.turn_q(q, cos, sin), self.turn_k(k, cos, sin)
        if self.by_token:
            query, key = query.transpose(1, 2), key.transpose(1, 2)
        self.between(qkv, k_pages)
        given = query, key[None][0], v.transpose(1, 2)
        out = self.attend(given, k_pages, v_pages, table, lengths, slots)
        return out + self.use(query, q, cos)

    def attend(self, given, k_pages, v_pages, table, lengths, slots):
        rows = tokens(*given)
        return decode_attention(
            *rows, k_pages, v_pages, table, lengths, slots, holes=False, kernel="reference"
        )


class Prompt(Step):
    """A layer's prompt of one request, whose keys attention and the pages take."""

    rows = (1, B)
    scales: Mapping[str, torch.Tensor] = MappingProxyType({})

    def attend(self, given, k_pages, v_pages, starts, lengths, slots):
        write_kv(*tokens(*given[1:]), k_pages, v_pages, slots, **self.scales)
        return varlen_attention(
            *tokens(*given),
            starts,
            starts,
            max_seqlen_q=B,
            max_seqlen_k=B,
            causal=True,
            padded=False,
            kernel="reference",
        )


class Verify(Step):
    """A layer's step of two tokens of each request, which attention finds in the pages."""

    rows = (B, 2)

    def attend(self, given, k_pages, v_pages, table, lengths, slots):
        query, *new = tokens(*given)
        write_kv(*new, k_pages, v_pages, slots)
        return paged_attention(
            query,
            k_pages,
            v_pages,
            table,
            lengths,
            torch.arange(0, 2 * B + 1, 2, dtype=torch.int32),
            max_seqlen_q=2,
            padded=False,
            holes=False,
            kernel="reference",
        )


class PromptByToken(Prompt):
    by_token = True


class VerifyByToken(Verify):
    by_token = True


def tokens(*given):
    return [x.transpose(1, 2).flatten(0, 1) for x in given]


def inputs(dtype=torch.float32, seed=0, step=Step):
    torch.manual_seed(seed)
    qkv = torch.randn(*step.rows, (HQ + 2 * HKV) * D, dtype=dtype)
    turn = torch.randn(*step.rows, D, dtype=dtype)
    table = torch.arange(2 * B, dtype=torch.int32).view(B, 2)
    lengths = torch.tensor([3, 8, 5], dtype=torch.int32)
    slots = (
        table.gather(1, ((lengths - 1) // 4)[:, None].long())[:, 0].long() * 4 + (lengths - 1) % 4
    )
    pages = [torch.randn(2 * B, 4, HKV, D, dtype=dtype) for _ in range(2)]
    if issubclass(step, Verify):
        before = (lengths - 2)[:, None].long() + torch.arange(2)
        slots = (table.gather(1, before // 4).long() * 4 + before % 4).flatten()
    if issubclass(step, Prompt):
        table = torch.tensor([0, B], dtype=torch.int32)
    return (
        qkv,
        turn.cos(),
        turn.sin(),
        torch.randn(D, dtype=dtype),
        torch.randn(D, dtype=dtype),
        *pages,
        table,
        lengths,
        slots,
    )


def inductor(gm, given):
    """Inductor up to the code that it makes of a graph, which takes seconds."""
    return compile_fx(
        gm, given, inner_compile=lambda lowered, *_, **__: make_boxed_func(lowered.forward)
    )


def other_eps(m, x):
    return llama(m, x, 0.25 if x.shape[2] == HQ else 0.5)


def narrow(m, x):
    return m.gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.25))


STEPS = {
    "plain": ({}, "rotation"),
    "swapped": ({"turn_q": swapped, "turn_k": swapped}, "rotation"),
    "norms": ({"norm": llama}, "norms and rotation"),
    "norms in Inductor": ({"norm": llama}, "norms and rotation"),
    "by parts, of other angles": ({"turn_q": by_parts, "turn_k": by_parts}, OTHER_ANGLES),
    "other eps": ({"norm": other_eps}, "rotation"),
    "norms in bfloat16": ({"norm": narrow}, "rotation"),
    "the other way": ({"turn_q": backwards, "turn_k": backwards}, NOT),
    "of another tensor": ({"turn_q": of_another_tensor, "turn_k": of_another_tensor}, NOT),
    "query alone": ({"turn_k": lambda x, cos, sin: x}, NOT),
    "other angles": ({"turn_k": lambda x, cos, sin: turned(x, sin, cos)}, OTHER_ANGLES),
    "one row of angles": ({"turn_q": lambda x, cos, sin: turned(x, cos[:1], sin)}, OTHER_ANGLES),
    "used twice": ({"use": lambda query, q, cos: query.sum()}, "not fused, .., too"),
    "written in between": (
        {"between": lambda qkv, k_pages: qkv.mul_(2)},
        "not fused, .. writes one of its inputs in between",
    ),
    "others written in between": ({"between": lambda qkv, k_pages: k_pages.mul_(2)}, "rotation"),
    "its input used": ({"use": lambda query, q, cos: q.sum() + cos.sum()}, "rotation"),
}


FUSES = {
    Step: fuse_rotation_pass,
    Prompt: fuse_rotated_write_pass,
    Verify: fuse_rotated_write_pass,
}


@pytest.mark.parametrize("kind", FUSES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", STEPS)
def test_found(name, kind):
    """What is found, and the numbers of the code as it is written."""
    (parts, want), dtype = STEPS[name], torch.bfloat16 if "bfloat16" in name else torch.float32
    told, step = Passing(FUSES[kind]), kind(**parts)
    mine, plain = (inputs(dtype, step=kind) for _ in range(2))

    def backend(gm, given):
        run = told(gm, given)
        return inductor(gm, given) if "Inductor" in name else run

    got, exact = torch.compile(step, fullgraph=True, backend=backend)(*mine), step(*plain)
    close = {"rtol": 0.03, "atol": 0.03} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close((got, mine[5]), (exact, plain[5]), **close)
    [found] = said(told)
    # Dynamo names nodes as it likes.
    head, _, end = want.partition("..")
    assert found == want if not end else found.startswith(head) and found.endswith(end)


@pytest.mark.parametrize("kind", [PromptByToken, VerifyByToken], ids=lambda kind: kind.__name__)
def test_vectors_that_are_rotated_by_token(kind):
    told, step = Passing(fuse_rotated_write_pass), kind()
    mine, plain = (inputs(step=kind) for _ in range(2))
    got = torch.compile(step, fullgraph=True, backend=told)(*mine)
    torch.testing.assert_close((got, mine[5]), (step(*plain), plain[5]))
    assert said(told) == {"rotation"}


@pytest.mark.parametrize("kind", FUSES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("norm", [llama, gpt_oss, gemma, torchs], ids=lambda f: f.__name__)
def test_it_is_no_less_exact_than_the_models_own_code(norm, kind):
    """The op rounds once, where the model rounds after a norm, a product or a rotation: errors of
    the output and of the new keys."""
    told, errors, step = Passing(FUSES[kind]), {"own": 0.0, "fused": 0.0}, kind(norm=norm)
    for seed in range(6):
        given = inputs(torch.bfloat16, seed, kind)
        exact = [x.double() if x.is_floating_point() else x for x in given]
        want = step(*exact)
        for name, call in {
            "own": step,
            "fused": torch.compile(step, fullgraph=True, backend=told),
        }.items():
            given = inputs(torch.bfloat16, seed, kind)
            errors[name] += sum(
                float((x.double() - y).square().sum())
                for x, y in ((call(*given), want), (given[5], exact[5]))
            )
    assert said(told) == {"norms and rotation"}
    assert errors["fused"] <= errors["own"]


ALONE = {"rotation"}
FORCED_WRITE = {"not fused, a kernel of write_kv is forced"}


@pytest.mark.parametrize(
    ("policy", "want"),
    [
        ({"kernel": {"write_kv": "reference"}}, FORCED_WRITE),
        ({"kernel": "scatter"}, FORCED_WRITE),
        ({"kernel": {"varlen_attention": "reference"}}, ALONE),
        ({"kernel": {"rotate_and_write_kv": "reference"}}, ALONE),
        ({"deny": ("write_kv:triton",)}, ALONE),
    ],
)
def test_a_forced_kernel_of_a_prompts_write(policy, want):
    told, step = Passing(fuse_rotated_write_pass), Prompt()
    mine, plain = (list(inputs(step=Prompt)) for _ in range(2))
    with attnops.use(**policy):
        got = torch.compile(step, fullgraph=True, backend=told)(*mine)
    torch.testing.assert_close((got, mine[5]), (step(*plain), plain[5]))
    assert said(told) == want


class Late(Prompt):
    """The query is turned behind the write. before: of the query. written, attended: make the value
    of each, of key and value."""

    def __init__(self, before=lambda qkv, q: q, written=lambda k, v: v, attended=lambda k, v: v):
        self.before = before
        self.written = written
        self.attended = attended

    def __call__(self, qkv, cos, sin, q_norm, k_norm, k_pages, v_pages, starts, lengths, slots):
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q, k, v = (
            x.view(1, B, -1, D).transpose(1, 2) for x in qkv.split([HQ * D, HKV * D, HKV * D], -1)
        )
        key = turned(k, cos, sin)
        rows = tokens(key, v)
        write_kv(rows[0], self.written(*rows), k_pages, v_pages, slots)
        rows = tokens(turned(self.before(qkv, q), cos, sin), key, v)
        lengths = {"max_seqlen_q": B, "max_seqlen_k": B, "causal": True, "padded": False}
        rows[2] = self.attended(*rows[1:])
        return varlen_attention(*rows, starts, starts, **lengths, kernel="reference")


def doubled(qkv, q):
    qkv.mul_(2)
    return q


ROTATED_VALUE = "not fused, a value is rotated, too"
LATE = {
    "as it is": (Late(), "rotation"),
    "written": (Late(doubled), "not fused, .. writes one of its inputs in between"),
    "made late": (Late(lambda qkv, q: q * 2), "not fused, .. is made after .."),
    "key is written twice": (Late(written=lambda k, v: k), ROTATED_VALUE),
    "key is the value": (Late(attended=lambda k, v: k), ROTATED_VALUE),
    "wide value": (
        Late(written=lambda k, v: v.double()),
        "not fused, key and value have different dtypes",
    ),
}


@pytest.mark.parametrize("name", LATE)
def test_a_query_behind_the_write(name):
    step, want = LATE[name]
    told = Passing(fuse_rotated_write_pass)
    mine, plain = (inputs(step=Prompt) for _ in range(2))
    got = torch.compile(step, fullgraph=True, backend=told)(*mine)
    torch.testing.assert_close((got, mine[5]), (step(*plain), plain[5]))
    [found] = said(told)
    assert re.fullmatch(re.escape(want).replace(r"\.\.", ".*"), found), found


def test_prompts_that_are_left(monkeypatch):
    """They round to other numbers than attention takes, record gradients, or would run in plain
    torch on a GPU."""
    told, step = Passing(fuse_rotated_write_pass), Prompt()
    step.scales = {name: torch.ones(1) for name in ("k_scale", "v_scale")}
    mine, plain = (list(inputs(step=Prompt)) for _ in range(2))
    for given in (mine, plain):
        given[5:7] = [torch.zeros_like(x, dtype=torch.int8) for x in given[5:7]]
    got = torch.compile(step, fullgraph=True, backend=told)(*mine)
    torch.testing.assert_close((got, mine[5]), (step(*plain), plain[5]))
    with torch.enable_grad():
        torch.compile(Prompt(), fullgraph=True, backend=told)(*inputs(step=Prompt))
    assert said(told) == set()


# Where the op is taken ----------------------------------------------------------------------------

LLAMA = paged_layers(32, 8, 128, 0, torch.bfloat16)
NARROW_VALUES = paged_layers(32, 8, 128, 0, torch.bfloat16, v_head_dim=64)
MANY_HEADS_A_GROUP = paged_layers(32, 1, 128, 0, torch.bfloat16)


def pages(spec, kernel=None):
    return ModelPages(Sizes(2, 256, (spec,), torch.device("cpu"), kernel), 64)


def test_it_is_taken_where_it_costs_less():
    with pretend(Target.parse("h200", ("triton",))):
        made = pages(LLAMA)
        assert made.one_launch() == (True,) and made.workspace.numel() >= COUNTERS
        made.workspace[:4] = 1
        made.clear()
        assert not made.workspace.any()
        for policy, taken in (
            ({"kernel": {"paged_attention": "triton"}}, False),
            ({"deterministic": True}, True),
            ({"deny": ("decode_attention:triton",)}, False),
            ({}, True),
        ):
            with attnops.use(**policy):
                assert made.one_launch() == (taken,), policy
        assert not any(pages(LLAMA, "triton").one_launch())
        for spec in (NARROW_VALUES, MANY_HEADS_A_GROUP, latent_layers(16, 0, torch.bfloat16)):
            assert not any(pages(spec).one_launch())
    assert not any(pages(LLAMA).one_launch()), "a CPU has the plain body alone"
    with attnops.use(kernel=FORCED):
        assert all(pages(LLAMA).one_launch())
