"""Patched models under torch.compile: one graph, no breaks, and no recompiles once the warm-up is over.

Warm-up, for every test that counts recompiles: one conversation of 20 tokens with batch size 1, and one with batch size 2. The
first compiles for the shapes at hand, the second once more with a symbolic batch, because the compiler specialises on a batch of 1
and because a length becomes symbolic when it first changes. Models with a sliding window and a static cache compile one more graph
when the window has filled, which happens inside those 20 tokens. After that: batch sizes 1, 2 and 4, 20 tokens each, 0 graphs.

`fullgraph=True` makes a graph break an error, so a test that passes had none.
"""

import pytest
import torch

import attnops
from attnops.hf import tiny
from tests.hf.helpers import LIMIT, Counter, in_generate, left_padded, logits, relative, tokens

WHOLE = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "deepseek_v2", "deepseek_v3")
MORE = ("mixtral", "qwen3_moe", "qwen3_next", "phi3", "gpt2", "opt", "cohere2", "qwen2_moe", "olmo2")
FAMILIES = (*WHOLE, *MORE)
# Their caches and masks are llama's, gemma3's, or deepseek_v3's.
LIKE_ANOTHER = (
    "qwen3", "mixtral", "qwen3_moe", "phi3", "opt", "olmo2", "gpt_oss", "cohere2", "gemma2", "qwen2_moe", "deepseek_v2",
)  # fmt: skip
WARM_UP, AFTER = (1, 2), (1, 2, 4)
NEW = 20


def called(counter):
    return sum(target.startswith("attnops.attention") for target in counter.targets())


@pytest.mark.sweep(24)
@pytest.mark.parametrize("name", FAMILIES)
def test_one_graph(name):
    """A whole padded prefill, masks included, is one graph that calls the op once a layer."""
    model, ids, mask = tiny.model(name), tokens(), left_padded()
    want = logits(model, None, ids, mask)
    handle = attnops.patch(model)
    counter = Counter()
    ours = logits(torch.compile(model, fullgraph=True, backend=counter), None, ids, mask)
    assert len(counter) == 1 and called(counter) == len(handle.report().patched)
    assert relative(ours, want) < LIMIT


def static_in_generate(model, batch, counter):
    """With the static cache whose one-token step generate() compiles."""
    more = {} if counter is None else {"cache_implementation": "static"}
    return in_generate(model, batch, 9, NEW, counter, **more)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in LIKE_ANOTHER])
def test_generate_does_not_recompile(name):
    model = tiny.model(name)
    want = {batch: static_in_generate(model, batch, None) for batch in AFTER}
    counter = Counter()
    with attnops.patch(model):
        for batch in WARM_UP:
            assert torch.equal(static_in_generate(model, batch, counter), want[batch])
        warm = len(counter)
        assert 0 < warm <= 3
        for batch in AFTER:
            assert torch.equal(static_in_generate(model, batch, counter), want[batch])
    assert len(counter) == warm


@pytest.mark.full
def test_generate_with_lengths_does_not_recompile():
    """As above with compact masks: what a step is given has one shape, however long the context, and padding does not matter."""
    model = tiny.model("gemma3")
    want = {batch: static_in_generate(model, batch, None) for batch in AFTER}
    counter = Counter()
    with attnops.patch(model, mask="compact"):
        for batch in WARM_UP:
            assert torch.equal(static_in_generate(model, batch, counter), want[batch])
        warm = len(counter)
        for batch in AFTER:
            assert torch.equal(static_in_generate(model, batch, counter), want[batch])
    assert len(counter) == warm > 0
    masks = [node.meta["example_value"] for g in counter.graphs for node in g.graph.nodes if node.op == "placeholder"]
    assert not [m for m in masks if isinstance(m, torch.Tensor) and m.dtype == torch.bool], "no written-out mask enters the graph"


def conversation(call, model, batch, cache, first=None):
    ids, mask = tokens(batch, 9 + NEW), left_padded(batch, 9 + NEW, (0, 3, 0, 1))
    steps = [(0, 9), *((9 + i, 10 + i) for i in range(NEW))]
    return logits(Both(call, model), cache, ids, mask, steps, first)


class Both:
    """A compiled callable with the config of its model."""

    def __init__(self, call, model):
        self.call, self.config = call, model.config

    def __call__(self, *args, **kwargs):
        return self.call(*args, **kwargs)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "cache", "mode"), [("llama", "dynamic", "dense"), ("mistral", "dynamic", "compact"), ("mistral", "static", "dense")]
)
def test_a_loop_by_hand_does_not_recompile(name, cache, mode):
    """The model is compiled whole. The prefill of a static cache runs eager, as in generate(): transformers allocates there."""
    model = tiny.model(name, num_hidden_layers=1)
    want = {batch: conversation(model, model, batch, cache) for batch in AFTER}
    counter = Counter()
    first = model if cache == "static" else None
    with attnops.patch(model, mask=mode):
        compiled = torch.compile(model, fullgraph=True, backend=counter)
        for batch in WARM_UP:
            assert relative(conversation(compiled, model, batch, cache, first), want[batch]) < LIMIT
        warm = len(counter)
        for batch in AFTER:
            assert relative(conversation(compiled, model, batch, cache, first), want[batch]) < LIMIT
    assert len(counter) == warm > 0


@pytest.mark.sweep(6)
@pytest.mark.parametrize("mode", ["dense", "compact"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_no_mask_at_all(name, mode):
    """Nothing is padded: under a tracer, too, compact needs no written-out mask for a cache."""
    model, ids = tiny.model(name), tokens(2, 12)
    with torch.no_grad():
        want = model(ids, use_cache=True).logits
        with attnops.patch(model, mask=mode):
            counter = Counter()
            ours = torch.compile(model, fullgraph=True, backend=counter)(ids, use_cache=True).logits
    assert relative(ours, want) < LIMIT
    nodes = [node for g in counter.graphs for node in g.graph.nodes if "attnops.attention" in str(node.target)]
    assert nodes and (mode == "dense" or not any(node.args[3] for node in nodes if len(node.args) > 3))


def test_layers_share_one_graph():
    """Compiled layer by layer, four layers are one graph: nothing that belongs to one layer is in it."""
    model = tiny.model("llama", num_hidden_layers=4)
    ids = tokens()
    with torch.no_grad():
        want = model(ids).logits
        attnops.patch(model, kernel="reference")
        counter = Counter()
        for layer in model.model.layers:
            layer.compile(backend=counter, fullgraph=True)
        ours = model(ids, use_cache=False).logits
    assert len(counter) == 1 and called(counter) == 1
    assert relative(ours, want) < LIMIT


@pytest.mark.full
def test_a_forced_kernel_is_in_the_graph():
    model, ids = tiny.model("llama"), tokens()
    policies = []
    for kernel in ("reference", "sdpa"):
        counter = Counter()
        with attnops.patch(model, kernel=kernel), torch.no_grad():
            torch.compile(model, fullgraph=True, backend=counter)(ids, use_cache=False)
        nodes = [node for g in counter.graphs for node in g.graph.nodes if "attnops.attention" in str(node.target)]
        policies.append({node.kwargs["policy"] for node in nodes})
    assert policies == [{"kernel=attention:reference"}, {"kernel=attention:sdpa"}]


def test_unpatching_is_seen_by_compiled_code():
    model, ids = tiny.model("llama"), tokens()
    counter = Counter()
    compiled = torch.compile(model, backend=counter)
    with torch.no_grad():
        with attnops.patch(model):
            compiled(ids, use_cache=False)
        assert called(counter) == 2
        compiled(ids, use_cache=False)
    assert len(counter) == 2 and called(counter) == 2


@pytest.mark.full  # test_compiled_steps of test_training_steps.py has gradients of compiled models, padded ones among them
def test_a_compiled_training_step():
    model, ids, mask = tiny.model("llama"), tokens(), left_padded()
    model.train()
    inputs = {"attention_mask": mask, "labels": ids.masked_fill((mask == 0) | (mask.cumsum(-1) == 1), -100), "use_cache": False}
    model(ids, **inputs).loss.backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    attnops.patch(model)
    torch.compile(model, fullgraph=True, backend="aot_eager")(ids, **inputs).loss.backward()
    for name, p in model.named_parameters():
        assert (p.grad - want[name]).abs().max() <= 2 * LIMIT * max(1.0, want[name].abs().max().item()), name


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, starts=None):
        longest = ids.shape[1]
        packed = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}
        return self.model(ids, use_cache=False, **({} if starts is None else packed)).logits


@pytest.mark.sweep(4)
@pytest.mark.parametrize("lengths", [False, True], ids=["rows", "lengths"])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "grad"])
def test_an_exported_program_counts_no_documents(grad, lengths):
    """transformers tells every tracer of packed documents. In a program for any length they are a mask, or the lengths that are given."""
    model, sizes = tiny.model("llama").eval(), [{1: torch.export.Dim("S", min=2, max=64)}]
    given, longer = ([tokens()[:1].repeat(1, n)] for n in (1, 2))
    if lengths:
        sizes.append({0: torch.export.Dim("N", min=2, max=64)})
        for inputs, cut in ((given, (4,)), (longer, (3, 8))):
            inputs.append(torch.tensor([0, *cut, inputs[0].shape[1]], dtype=torch.int32))
    with attnops.patch(model), torch.set_grad_enabled(grad):
        module = Logits(model)
        program = torch.export.export(module, tuple(given), dynamic_shapes=tuple(sizes))
        op = "varlen_attention" if lengths else "attention"
        assert {str(n.target) for n in program.graph.nodes if "attnops" in str(n.target)} == {f"attnops.{op}.default"}
        torch.testing.assert_close(program.module()(*longer), module(*longer), rtol=1e-5, atol=1e-5)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("lengths", [False, True], ids=["positions", "lengths"])
def test_documents_without_gradients(lengths):
    """A compiled pass that trains nothing does not wait for their number: positions are a mask, and lengths are used as they are."""
    model, ids, counter = tiny.model("llama").eval(), tokens()[:1], Counter()
    ends = torch.tensor([0, 4, ids.shape[1]], dtype=torch.int32)
    given = {"position_ids": torch.cat([torch.arange(int(n)) for n in ends.diff()])[None], "use_cache": False}
    if lengths:
        given |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 64, "max_length_k": 64}
    with torch.no_grad():
        want = model(ids, position_ids=given["position_ids"], use_cache=False).logits
        with attnops.patch(model):
            got = torch.compile(model, fullgraph=True, backend=counter)(ids, **given).logits
    assert relative(got, want) < LIMIT
    op = "varlen_attention" if lengths else "attention"
    assert {target for target in counter.targets() if target.startswith("attnops.")} == {f"attnops.{op}.default"}
