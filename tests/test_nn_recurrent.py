"""GatedDeltaNet and Mamba2: the layers of transformers whose weights they load, and texts in every
form a batch may have."""

from itertools import pairwise
from math import inf

import pytest
import torch
from torch import nn

from attnops.nn import GatedDeltaNet, Mamba2, RecurrentState, recurrent
from tests.modules import close, cu, refused

transformers = pytest.importorskip("transformers")
E, F32 = 48, torch.float32
DELTA = {"num_v_heads": 4, "num_k_heads": 2, "head_dim": 8, "v_head_dim": 6}
SCAN = {"num_heads": 6, "head_dim": 16, "state_size": 8, "num_groups": 2}
OURS = {
    "qwen3_next": (GatedDeltaNet, DELTA),
    "bamba": (Mamba2, SCAN),
    "mamba2": (Mamba2, SCAN | {"dt_limit": (0.2, 0.6), "bias": True}),
}
LENGTHS = (5, 0, 1, 70)


def stock(name):
    """A layer of transformers, in float32."""
    if name == "qwen3_next":
        from transformers.models.qwen3_next import modeling_qwen3_next as file

        heads = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
        sizes = {"linear_key_head_dim": 8, "linear_value_head_dim": 6}
        config = transformers.Qwen3NextConfig(hidden_size=E, num_hidden_layers=1, **heads, **sizes)
        return file.Qwen3NextGatedDeltaNet(config, 0)
    if name == "bamba":
        from transformers.models.bamba import modeling_bamba as file

        sizes = {"n_heads": 6, "d_head": 16, "n_groups": 2, "d_state": 8, "chunk_size": 16}
        sizes = {f"mamba_{n}": size for n, size in sizes.items()}
        config = transformers.BambaConfig(hidden_size=E, num_hidden_layers=1, **sizes)
        return file.BambaMixer(config, 0)
    from transformers.models.mamba2 import modeling_mamba2 as file

    sizes = {"num_heads": 6, "head_dim": 16, "n_groups": 2, "state_size": 8, "chunk_size": 16}
    more = {"use_bias": True, "time_step_limit": (0.2, 0.6), "num_hidden_layers": 1}
    return file.Mamba2Mixer(transformers.Mamba2Config(hidden_size=E, **sizes, **more), 0)


def layer(name, dtype=F32, **more):
    cls, sizes = OURS[name]
    torch.manual_seed(3)
    return cls(E, **sizes | {"dtype": dtype} | more)


def pair(name):
    """A layer of transformers and ours with its weights, none of them 1."""
    torch.manual_seed(4)
    theirs = stock(name)
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(0.3 * torch.randn_like(p))
    more = {"norm_eps": theirs.norm.variance_epsilon}
    if hasattr(theirs.norm, "group_size"):
        more["norm_groups"] = SCAN["num_groups"]
    ours = layer(name, **more)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def gradients(module, hidden, run):
    """The output of `run(hidden)`, and the gradients of it of tokens and weights."""
    hidden = hidden.clone().requires_grad_()
    output = run(hidden)
    weights = torch.arange(output.numel(), dtype=output.dtype).cos().view(output.shape)
    found = torch.autograd.grad((output * weights).sum(), [hidden, *module.parameters()])
    return output, dict(zip(["hidden", *dict(module.named_parameters())], found, strict=True))


@pytest.mark.parametrize("name", OURS)
def test_outputs_and_gradients_are_those_of_transformers(name):
    theirs, ours = pair(name)
    hidden = torch.randn(2, 70, E)
    want, got = gradients(theirs, hidden, theirs), gradients(ours, hidden, ours)
    for of, x in {"output": want[0], **want[1]}.items():
        found = got[0] if of == "output" else got[1][of]
        assert (found - x).norm() <= 3e-5 * x.norm(), of


@pytest.mark.parametrize("name", OURS)
def test_calls_with_a_state_go_on(name):
    """A prompt, steps of one token and of several: as all at once in transformers."""
    theirs, ours = pair(name)
    hidden, state = torch.randn(3, 24, E), ours.new_state(3)
    with torch.no_grad():
        got = [ours(x, state=state) for x in hidden.split([17, 1, 1, 1, 4], 1)]
        close(torch.cat(got, 1), theirs(hidden), 2e-5)


@pytest.mark.parametrize("name", ["qwen3_next", "bamba"])
@pytest.mark.parametrize("goes_on", [False, True])
def test_packed_texts_are_those_alone(name, goes_on):
    """Rows of nobody follow. Texts of no token keep their state."""
    module, starts = layer(name, torch.float64), cu(LENGTHS)
    hidden = torch.randn(sum(LENGTHS) + 3, E, dtype=torch.float64)
    made = module.new_state(len(LENGTHS))
    before = RecurrentState(torch.randn_like(made.conv), torch.randn_like(made.state))

    def state_of(rows):
        if not goes_on:
            return None
        return RecurrentState(before.conv[rows].clone(), before.state[rows].clone())

    def packed(x):
        return module(x, state=whole, cu_seqlens=starts, max_seqlen=80)[: sum(LENGTHS)]

    def each(x):
        texts = [x[begin:end][None] for begin, end in pairwise(starts)]
        return torch.cat([module(t, state=s)[0] for t, s in zip(texts, alone, strict=True)])

    whole, alone = state_of(slice(None)), [state_of(slice(b, b + 1)) for b in range(len(LENGTHS))]
    want, got = gradients(module, hidden, each), gradients(module, hidden, packed)
    close(got[0], want[0])
    for name_of, x in got[1].items():
        # Their sums have orders of their own, and states are float32.
        rows = slice(sum(LENGTHS)) if name_of == "hidden" else ...
        close(x[rows], want[1][name_of][rows], 1e-5)
    if goes_on:
        close(whole.conv, torch.cat([s.conv for s in alone]))
        close(whole.state, torch.cat([s.state for s in alone]))


def test_packed_rows_may_be_of_nobody(monkeypatch):
    """The ops clear the output of such rows, which a dense batch does not have."""
    padded, run = [], recurrent.causal_conv1d

    def recorded(*args, **more):
        padded.append(more["padded"])
        return run(*args, **more)

    monkeypatch.setattr(recurrent, "causal_conv1d", recorded)
    module = layer("bamba")
    module(torch.randn(1, 3, E))
    module(torch.randn(3, E), cu_seqlens=cu((2,)), max_seqlen=2)
    assert padded == [False, True]


@pytest.mark.parametrize("name", ["qwen3_next", "bamba"])
def test_jagged_texts_are_packed_ones(name):
    module, starts = layer(name), cu(LENGTHS)
    hidden = torch.randn(sum(LENGTHS), E)
    jagged = torch.nested.nested_tensor_from_jagged(hidden, starts.long())
    want = module(hidden, cu_seqlens=starts, max_seqlen=70)
    close(module(jagged).values(), want)
    refused(lambda: module(jagged, cu_seqlens=starts), "cu_seqlens: got shape (5,), want None with")


@pytest.mark.parametrize("name", ["qwen3_next", "bamba"])
def test_compiled_in_one_graph(name):
    module, hidden = layer(name), torch.randn(2, 9, E)
    compiled = torch.compile(module, fullgraph=True)
    torch.testing.assert_close(
        gradients(module, hidden, compiled), gradients(module, hidden, module)
    )
    states = [module.new_state(2) for _ in range(2)]
    with torch.no_grad():
        for x in hidden.split([7, 1, 1], 1):
            close(compiled(x, state=states[0]), module(x, state=states[1]))
    close(states[0].conv, states[1].conv)
    close(states[0].state, states[1].state)
    assert states[0].state.any()


@pytest.mark.parametrize("name", ["qwen3_next", "bamba"])
def test_autocast_and_narrow_weights(name):
    """bfloat16 tokens, float32 states."""
    wide, hidden = layer(name), torch.randn(2, 9, E)
    narrow = layer(name, torch.bfloat16)
    narrow.load_state_dict(wide.state_dict())
    want = wide(hidden)
    with torch.autocast("cpu", torch.bfloat16):
        got = wide(hidden, state=wide.new_state(2, torch.bfloat16))
    close(got.float(), want, 3e-2)
    state = narrow.new_state(2)
    assert (state.conv.dtype, state.state.dtype) == (torch.bfloat16, F32)
    close(narrow(hidden.bfloat16(), state=state).float(), want, 3e-2)


def bad_states(module):
    good = module.new_state(2)
    leaf = good.state.clone().requires_grad_()
    return {
        "state: got tuple": (good.conv, good.state),
        "state.conv: got shape (2,": RecurrentState(good.conv[..., :-1], good.state),
        "state.state: got shape (1,": RecurrentState(good.conv, good.state[:1]),
        "state.state: got (torch.bfloat16": RecurrentState(good.conv, good.state.bfloat16()),
        "state.state: got a leaf": RecurrentState(good.conv, leaf),
    }


@pytest.mark.parametrize("name", ["qwen3_next", "bamba"])
def test_a_bad_state_is_refused_before_anything_is_written(name):
    module = layer(name)
    for text, state in bad_states(module).items():
        refused(lambda given=state: module(torch.ones(2, 3, E), state=given), text)
        conv = state[0] if isinstance(state, tuple) else state.conv
        assert not conv.any()


REFUSED = {
    "num_k_heads: got 3": lambda: GatedDeltaNet(E, 4, 3),
    "num_groups: got 4": lambda: Mamba2(E, 6, num_groups=4),
    "norm_groups: got 5": lambda: Mamba2(E, 6, norm_groups=5),
    "dt_limit: got (0.5, 0.1)": lambda: Mamba2(E, 6, dt_limit=(0.5, 0.1)),
    "dt_limit: got (0.0, 0.0)": lambda: Mamba2(E, 6, dt_limit=(0.0, 0.0)),
    "dt_limit: got (inf, inf)": lambda: Mamba2(E, 6, dt_limit=(inf, inf)),
    "hidden.shape[2]: got 5": lambda: layer("bamba")(torch.ones(1, 2, 5)),
    "max_seqlen: got None": lambda: layer("bamba")(torch.ones(2, E), cu_seqlens=cu((2,))),
    "max_seqlen: got 2": lambda: layer("bamba")(torch.ones(1, 2, E), max_seqlen=2),
    "requests: got 0": lambda: layer("bamba").new_state(0),
}


@pytest.mark.parametrize("text", REFUSED)
def test_bad_arguments(text):
    refused(REFUSED[text], text)


def test_a_new_layer_has_short_steps_and_heads_that_forget_at_rates_of_their_own():
    for name in ("qwen3_next", "bamba"):
        module = layer(name)
        step = nn.functional.softplus(module.dt_bias)
        assert step.min() > 0.99e-3 and step.max() < 0.101
        assert module.A_log.min() >= 0 and module.A_log.max() < 2.8
        assert len(module.A_log.unique()) == len(step.unique()) == len(step)
        assert torch.isfinite(module(torch.randn(1, 3, E))).all()
