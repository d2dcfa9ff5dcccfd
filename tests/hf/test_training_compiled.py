"""Compiled training steps: one graph for any number of documents, with eager's gradients and
without a mask of all pairs."""

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import attnops
from attnops.hf import tiny
from tests.hf.helpers import Counter, near
from tests.hf.test_training_steps import PACKED, batch, compare, documents, gradients, step
from tests.lowering.models import kernel_calls


@pytest.mark.sweep(15)
@pytest.mark.parametrize("form", ["lengths", "positions", "left", "right"])
@pytest.mark.parametrize("name", ["mistral", "llama", "gemma2"])
def test_compiled_steps(name, form):
    """One graph, and eager's gradients. Documents are packed requests in it; padding is a mask, as
    in transformers."""
    eager, model, counter = gradients(tiny.model(name), form), tiny.model(name), Counter()
    with attnops.patch(model):
        compare(
            gradients(model, form, torch.compile(model, fullgraph=True, backend=counter)), eager
        )
    ops = [target.split(".")[1] for target in counter.targets() if target.startswith("attnops.")]
    ops = [op for op in ops if op != "request_starts"]
    assert (
        len(counter) == 1
        and ops
        == ["varlen_attention" if form in PACKED else "attention"] * model.config.num_hidden_layers
    )


@pytest.mark.sweep(2)
@pytest.mark.parametrize("form", ["lengths", "positions"])
def test_compiled_steps_of_other_documents(form):
    """Sizes become symbolic when they first change: no number of documents, tokens, or length of
    one compiles a third graph."""
    model, counter = tiny.model("mistral", num_hidden_layers=1), Counter()
    with attnops.patch(model):
        compiled = torch.compile(model, fullgraph=True, backend=counter)
        for count, step in (
            (4, 0),
            (3, 1),
            (2, 2),
            (4, 3),
            *([(1, 4)] if form == "positions" else []),
        ):
            made = batch(form, documents(step)[:count])
            want = tiny.model("mistral", num_hidden_layers=1)(**made, use_cache=False).loss
            near(compiled(**made, use_cache=False).loss, want)
    assert len(counter) <= 2


def cut(row, *lengths):
    """The row with its documents cut anew: the first ones have these lengths."""
    rest = row["position_ids"].shape[1] - sum(lengths)
    return row | {"position_ids": torch.cat([torch.arange(n) for n in (*lengths, rest)])[None]}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [
        ("llama", False),
        *(
            pytest.param(name, on, marks=pytest.mark.sweep(5))
            for name, on in (("llama", True), ("gemma2", False), ("gemma3", True))
        ),
    ],
)
def test_inductor_counts_documents(name, checkpointing):
    """One graph for any number of documents in a row. It counts them once for each kind of layer,
    not again where activations are computed again, has eager's gradients, and holds no mask of all
    pairs."""
    model, row = tiny.model(name), batch("positions", documents(0))
    if checkpointing:
        model.gradient_checkpointing_enable()
    size = row["position_ids"].shape[1]
    rows = [
        cut(row, *lengths) for lengths in ((3, 20), (9,), (), (1,) * (size - 2), (1,) * (size - 1))
    ]
    with attnops.patch(model), torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(model, fullgraph=True)
        ours, codes = run_and_get_code(lambda: [step(model, one, compiled) for one in rows])
    for found, one in zip(ours, rows, strict=True):
        compare(found, step(tiny.model(name), one))
    text = "\n".join(codes)
    ops = [call.partition(".")[0] for call in kernel_calls(text)]
    kinds = len(set(getattr(model.config, "layer_types", None) or ["full_attention"]))
    layers = model.config.num_hidden_layers
    assert len(codes) == 2, "a forward and a backward"
    assert ops.count("request_starts") == kinds and ops.count("varlen_attention_backward") == layers
    assert ops.count("varlen_attention") == layers * (1 + checkpointing)
    assert f"{size}, {size})" not in text


@pytest.mark.full
def test_cumulative_lengths_leave_nothing_to_count():
    """They take the place of documents by position, so that the host does not wait for their
    number."""
    model = tiny.model("llama")
    with attnops.patch(model):
        ours, codes = run_and_get_code(
            gradients, model, "lengths", torch.compile(model, fullgraph=True)
        )
    compare(ours, gradients(tiny.model("llama"), "lengths"))
    assert [
        call for code in codes for call in kernel_calls(code) if call.startswith("request_starts")
    ] == ["request_starts.unread"]


def test_compiled_dropout_of_documents():
    """No kernel of packed requests has it, so the mask is written out in the graph."""
    plain, model = (
        tiny.model("llama", attention_dropout=0.3, num_hidden_layers=1) for _ in range(2)
    )
    counter = Counter()
    torch.manual_seed(0)
    eager = gradients(plain, "positions")
    with attnops.patch(model):
        torch.manual_seed(0)
        compare(
            gradients(model, "positions", torch.compile(model, fullgraph=True, backend=counter)),
            eager,
        )
    assert len(counter) == 1


def test_explain_knows_documents():
    """Their number is a guess, and the row's length the bound on the longest."""
    model = tiny.model("llama").train()
    with attnops.patch(model):
        made = {name: x.repeat(1, 60) for name, x in batch("positions", documents(0)).items()}
        found = attnops.explain(model, **made, use_cache=False, target="h200", quiet=True)
    assert [name.partition(".")[0] for name in found.chosen()] == [
        "request_starts",
        "varlen_attention",
    ]
    sizes, tokens = found.sites[1].decision.problem.sizes, made["input_ids"].shape[1]
    assert sizes.batch.hint == 3 and tokens <= sizes.queries.hi < 2 * tokens


def test_compiled_layers_take_documents_by_position():
    """The masks are made outside of the graphs, so each layer is one of packed requests."""
    model, counter = tiny.model("llama"), Counter()
    eager = gradients(tiny.model("llama"), "rows")
    with attnops.patch(model):
        for layer in model.model.layers:
            layer.compile(backend=counter, fullgraph=True)
        compare(gradients(model, "rows"), eager)
    assert len(counter) == 1 and any(
        "attnops.varlen_attention" in target for target in counter.targets()
    )
