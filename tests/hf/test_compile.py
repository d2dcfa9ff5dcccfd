"""Patched models under torch.compile: one graph, no breaks, and no recompiles once the warm-up is
over.

Warm-up, for every test that counts recompiles: one conversation of 20 tokens with batch size 1, and
one with batch size 2. The first compiles for the shapes at hand, the second once more with a
symbolic batch, because the compiler specialises on a batch of 1 and because a length becomes
symbolic when it first changes. Models with a sliding window and a static cache compile one more
graph when the window has filled, which happens inside those 20 tokens. After that: batch sizes 1, 2
and 4, 20 tokens each, 0 graphs.

`fullgraph=True` makes a graph break an error, so a test that passes had none.
"""

from contextlib import contextmanager

import pytest
import torch

import attnops
from attnops.hf import tiny
from tests.hf.helpers import (
    Counter,
    by_hand,
    in_generate,
    left_padded,
    logits,
    make_cache,
    near,
    tokens,
)
from tests.hf.test_parity import CALLED, INPUTS

# The caches and masks of the others are llama's, gemma3's, or deepseek_v3's.
KINDS = ("llama", "mistral", "gemma3", "deepseek_v3", "qwen3_next", "gpt2")
FAMILIES = (
    *KINDS,
    "qwen3",
    "gemma2",
    "gpt_oss",
    "deepseek_v2",
    "mixtral",
    "qwen3_moe",
    "phi3",
    "opt",
    "cohere2",
    "qwen2_moe",
    "olmo2",
)
WARM_UP, AFTER = (1, 2), (1, 2, 4)
NEW = 20


def attending(counter):
    """The calls of the op."""
    return [
        node
        for g in counter.graphs
        for node in g.graph.nodes
        if str(node.target).startswith("attnops.attention")
    ]


def skip_unless_it_compiles_as_it_is(model, inputs):
    """Dynamo of torch 2.11 has no copy.deepcopy of a config, and counts llava's masked_scatter
    wrong: a patch mends neither."""
    try:
        torch.compile(model, fullgraph=True, backend="eager")(**inputs)
    except (torch._dynamo.exc.Unsupported, torch._dynamo.exc.InternalTorchDynamoError) as error:
        pytest.skip(
            f"torch {torch.__version__} cannot compile the model before it is patched: "
            f"{str(error).splitlines()[0]}"
        )
    torch._dynamo.reset()


@pytest.mark.sweep(17)
@pytest.mark.parametrize("name", [*FAMILIES, *INPUTS])
def test_one_graph(name):
    """A whole prefill, masks included, is one graph that calls the op once a layer. Of decoders it
    is padded."""
    model, ids, mask, counter = tiny.model(name), tokens(), left_padded(), Counter()

    @torch.no_grad()
    def called(model):
        return model(**INPUTS[name]).logits if name in INPUTS else logits(model, None, ids, mask)

    want = called(model)
    if name in INPUTS and torch.__version__ < "2.12":
        skip_unless_it_compiles_as_it_is(model, INPUTS[name])
    handle = attnops.patch(model)
    ours = called(torch.compile(model, fullgraph=True, backend=counter))
    least = CALLED.get(name, len(handle.report().patched))
    assert len(counter) == 1 and len(attending(counter)) >= least
    assert name in INPUTS or len(attending(counter)) == least
    near(ours, want)


@contextmanager
def without_recompiles(model, call, **options):
    """Patches the model; call: returns what a batch gives, by a compiler where there is a counter.
    Yields that."""
    want = {batch: call(batch, None) for batch in AFTER}
    counter = Counter()
    with attnops.patch(model, **options):
        for batches in (WARM_UP, AFTER):
            warm = len(counter)
            for batch in batches:
                near(call(batch, counter).float(), want[batch].float())
        assert len(counter) == warm > 0
        yield counter


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    ("name", "mask"),
    [
        *((name, "auto") for name in KINDS),
        pytest.param("gemma3", "compact", marks=pytest.mark.full),
    ],
)
def test_generate_does_not_recompile(name, mask):
    """With compact masks, what a step is given has one shape, however long the context, and padding
    does not matter."""
    model = tiny.model(name)

    def call(batch, counter):
        more = {} if counter is None else {"cache_implementation": "static"}
        return in_generate(model, batch, 9, NEW, counter, **more)

    with without_recompiles(model, call, mask=mask) as counter:
        assert len(counter) <= 3
    if mask == "compact":
        masks = [
            node.meta["example_value"]
            for g in counter.graphs
            for node in g.graph.nodes
            if node.op == "placeholder"
        ]
        assert not [m for m in masks if isinstance(m, torch.Tensor) and m.dtype == torch.bool], (
            "no written-out mask enters the graph"
        )


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "cache", "mode"),
    [
        ("llama", "dynamic", "dense"),
        ("mistral", "dynamic", "compact"),
        ("mistral", "static", "dense"),
    ],
)
def test_a_loop_by_hand_does_not_recompile(name, cache, mode):
    """The model is compiled whole. The prefill of a static cache runs eager, as in generate():
    transformers allocates there."""
    model, compiled = tiny.model(name, num_hidden_layers=1), []
    steps = [(0, 9), *((9 + i, 10 + i) for i in range(NEW))]

    def call(batch, counter):
        if counter is not None and not compiled:
            compiled.append(torch.compile(model, fullgraph=True, backend=counter))
        ids, mask = tokens(batch, 9 + NEW), left_padded(batch, 9 + NEW, (0, 3, 0, 1))
        run = model if counter is None else compiled[0]
        return by_hand(
            run, make_cache(cache, model), ids, mask, steps, model if cache == "static" else None
        )

    with without_recompiles(model, call, mask=mode):
        pass


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
    near(ours, want)
    nodes = attending(counter)
    assert nodes and (
        mode == "dense" or not any(node.args[3] for node in nodes if len(node.args) > 3)
    )


@pytest.mark.parametrize("kernel", ["reference", pytest.param("sdpa", marks=pytest.mark.full)])
def test_layers_share_one_graph(kernel):
    """Compiled layer by layer, four layers are one graph: nothing that belongs to one layer is in
    it. The forced kernel is."""
    model, ids, counter = tiny.model("llama", num_hidden_layers=4), tokens(), Counter()
    with torch.no_grad():
        want = model(ids).logits
        attnops.patch(model, kernel=kernel)
        for layer in model.model.layers:
            layer.compile(backend=counter, fullgraph=True)
        near(model(ids, use_cache=False).logits, want)
    assert len(counter) == 1
    assert [node.kwargs["policy"] for node in attending(counter)] == [f"kernel=attention:{kernel}"]


def test_unpatching_is_seen_by_compiled_code():
    model, ids = tiny.model("llama"), tokens()
    counter = Counter()
    compiled = torch.compile(model, backend=counter)
    with torch.no_grad():
        with attnops.patch(model):
            compiled(ids, use_cache=False)
        assert len(attending(counter)) == 2
        compiled(ids, use_cache=False)
    assert len(counter) == 2 and len(attending(counter)) == 2


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, starts=None):
        longest = ids.shape[1]
        packed = {
            "cu_seq_lens_q": starts,
            "cu_seq_lens_k": starts,
            "max_length_q": longest,
            "max_length_k": longest,
        }
        return self.model(ids, use_cache=False, **({} if starts is None else packed)).logits


@pytest.mark.sweep(4)
@pytest.mark.parametrize("lengths", [False, True], ids=["rows", "lengths"])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "grad"])
def test_an_exported_program_counts_no_documents(grad, lengths):
    """transformers tells every tracer of packed documents. In a program for any length they are a
    mask, or the lengths that are given."""
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
        assert {str(n.target) for n in program.graph.nodes if "attnops" in str(n.target)} == {
            f"attnops.{op}.default"
        }
        torch.testing.assert_close(program.module()(*longer), module(*longer), rtol=1e-5, atol=1e-5)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("lengths", [False, True], ids=["positions", "lengths"])
def test_documents_without_gradients(lengths):
    """A compiled pass that trains nothing does not wait for their number: positions are a mask, and
    lengths are used as they are."""
    model, ids, counter = tiny.model("llama").eval(), tokens()[:1], Counter()
    ends = torch.tensor([0, 4, ids.shape[1]], dtype=torch.int32)
    given = {
        "position_ids": torch.cat([torch.arange(int(n)) for n in ends.diff()])[None],
        "use_cache": False,
    }
    if lengths:
        given |= {
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": 64,
            "max_length_k": 64,
        }
    with torch.no_grad():
        want = model(ids, position_ids=given["position_ids"], use_cache=False).logits
        with attnops.patch(model):
            got = torch.compile(model, fullgraph=True, backend=counter)(ids, **given).logits
    near(got, want)
    op = "varlen_attention" if lengths else "attention"
    assert {target for target in counter.targets() if target.startswith("attnops.")} == {
        f"attnops.{op}.default"
    }
