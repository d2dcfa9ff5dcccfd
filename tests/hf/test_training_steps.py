"""Fifty training steps of a patched model lose what they lose with transformers' own attention: documents in one row, and padded."""

import contextlib
import functools
import itertools
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

import attnops
from attnops.hf import tiny
from tests.hf.helpers import LIMIT, Counter, relative, tokens, watched
from tests.hf.test_training import compare
from tests.lowering.models import kernel_calls

# Sliding windows: mistral, gemma2, gemma3, gpt_oss. A soft cap: gemma2. Sinks: gpt_oss. A value of another size than the key: deepseek_v3.
FAMILIES = ("llama", "mistral", "gemma2", "gpt_oss", "qwen3", "deepseek_v3", "gemma3", "phi3")
PACKED, PADDED = ("positions", "lengths", "rows"), ("left", "right", "both")
STEPS = 50

# After fifty steps of AdamW the losses of two orders of summation differ by up to 8e-6. A token of another document changes them by 5e-2.
DRIFT = 3e-5


def documents(step):
    """Four documents of 3 to 23 tokens, others at each step."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(3, 24, (4,), generator=generator, device="cpu").tolist()
    return [torch.randint(2, 100, (n,), generator=generator, device="cpu") for n in lengths]


def row_of(texts):
    """The texts one after the other: tokens, positions that begin at 0 in each, and labels without those of first tokens."""
    ids, where = torch.cat(texts), torch.cat([torch.arange(len(text)) for text in texts])
    return {"input_ids": ids, "position_ids": where, "labels": ids.masked_fill(where == 0, -100)}


def batch(form, texts) -> dict[str, Any]:
    """The texts as a model takes them, each with the same loss.

    form: "positions" is one row, whose texts position_ids tell apart; "lengths" the same with cumulative lengths; "rows" two rows of one
    length, which end in a document without labels. "left", "right" and "both" say where padding is.
    """
    if form == "rows":
        rows = [row_of(texts[:2]), row_of(texts[2:])]
        width = max(len(row["labels"]) for row in rows) + 1
        for row in rows:
            filler = torch.arange(width - len(row["labels"]))
            for name, more in (("input_ids", filler + 2), ("position_ids", filler), ("labels", torch.full_like(filler, -100))):
                row[name] = torch.cat([row[name], more])
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    if form in PACKED:
        made = {name: x[None] for name, x in row_of(texts).items()}
        if form == "lengths":
            cu, longest = torch.tensor([0, *itertools.accumulate(map(len, texts))], dtype=torch.int32), max(map(len, texts))
            made |= {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": longest, "max_length_k": longest}
        return made
    width = max(map(len, texts)) + (form == "both")
    ids, mask = torch.zeros(len(texts), width, dtype=torch.int64), torch.zeros(len(texts), width, dtype=torch.int64)
    for row, text in enumerate(texts):
        room = width - len(text)
        begin = {"left": room, "right": 0, "both": room // 2}[form]
        ids[row, begin : begin + len(text)], mask[row, begin : begin + len(text)] = text, 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill((mask == 0) | (mask.cumsum(-1) == 1), -100)}


def train(model, form, dtype=torch.float32, steps=STEPS):
    """`[steps]` losses. dtype: of autocast; float16 with a scaler of gradients."""
    model.train()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    losses = []
    for step in range(steps):
        given = {name: x.to(model.device) if isinstance(x, torch.Tensor) else x for name, x in batch(form, documents(step)).items()}
        with torch.autocast("cpu", dtype) if dtype != torch.float32 else contextlib.nullcontext():
            loss = model(**given, use_cache=False).loss
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach().float())
    return torch.stack(losses)


@functools.cache
def eager_losses(name):
    """With transformers' eager attention and padding on the right."""
    return train(tiny.model(name), "right")


def only_packed(calls):
    return bool(calls) and all(call["op"] == "varlen_attention" and call["mask"] is None for call in calls)


# Padded batches train in test_lora, too.
@pytest.mark.sweep(48)
@pytest.mark.parametrize("form", [*PACKED, *PADDED])
@pytest.mark.parametrize("name", FAMILIES)
def test_fifty_steps(name, form):
    if name == "gpt_oss" and form in ("positions", "rows"):
        pytest.skip("transformers makes gpt-oss' masks without position_ids: only lengths tell its documents apart")
    model = tiny.model(name)
    # On a CPU dense masks of padded batches are as fast, and "auto" takes them.
    with attnops.patch(model, mask="compact" if form in PADDED else "auto"), watched() as calls:
        ours = train(model, form)
    assert only_packed(calls)
    assert ((ours - eager_losses(name)).abs() <= DRIFT * eager_losses(name)).all()


def test_positions_alone_do_not_tell_documents_of_gpt_oss_apart():
    """As in transformers, whose masks of that model know no positions. Its documents need cumulative lengths."""
    one, eager = batch("positions", documents(0)), tiny.model("gpt_oss")
    model = tiny.model("gpt_oss")
    with attnops.patch(model), torch.no_grad():
        assert relative(model(**one, use_cache=False).loss, eager(**one, use_cache=False).loss) < LIMIT


@pytest.mark.sweep(20)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["positions", "left", "right"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_half_precision(name, form, dtype):
    """As far from eager's losses as those of transformers' sdpa are, on average. float16 has a scaler."""
    model = tiny.model(name)
    eager, sdpa = (train(m, form, dtype, steps=20) for m in (model, tiny.model(name, attn_implementation="sdpa")))
    model = tiny.model(name)
    with attnops.patch(model, mask="compact"), watched() as calls:
        ours = train(model, form, dtype, steps=20)
    assert only_packed(calls) and {call["query"].dtype for call in calls} == {dtype}
    # All three differ by rounding alone, so that any two are about as far apart.
    assert (ours - eager).abs().mean() <= 2 * (sdpa - eager).abs().mean()


@pytest.mark.sweep(9)
@pytest.mark.parametrize("form", ["positions", "left", "lengths"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma2"])
def test_whole_models_in_bfloat16(name, form):
    """Weights in bfloat16, without autocast."""
    form = "lengths" if name == "gpt_oss" and form == "positions" else form
    eager = train(tiny.model(name).bfloat16(), "right", steps=10)
    model = tiny.model(name).bfloat16()
    with attnops.patch(model, mask="compact"), watched() as calls:
        ours = train(model, form, steps=10)
    assert only_packed(calls)
    assert ((ours - eager).abs() <= 2e-2 * eager).all()


def step(model, given, call=None):
    model.train()
    model.zero_grad()
    loss = (model if call is None else call)(**given, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def gradients(model, form, call=None):
    return step(model, batch(form, documents(0)), call)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("name", "form"), [("llama", "rows"), ("gemma3", "left"), ("gpt_oss", "lengths"), ("mistral", "positions")])
def test_gradient_checkpointing(name, form, reentrant):
    eager, model = gradients(tiny.model(name), "right"), tiny.model(name)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with attnops.patch(model, mask="compact"), watched() as calls:
        compare(gradients(model, form), eager)
    assert only_packed(calls) and len(calls) == 2 * model.config.num_hidden_layers, "each layer's attention is computed again"


def adapted(name):
    peft = pytest.importorskip("peft", reason="the extra for LoRA is not installed")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(tiny.model(name), config)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("form", ["positions", "left", "lengths"])
@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_lora(name, form):
    want, model = train(adapted(name), "right", steps=20), adapted(name)
    with attnops.patch(model, mask="compact"), watched() as calls:
        ours = train(model, form, steps=20)
    assert only_packed(calls)
    assert ((ours - want).abs() <= DRIFT * want).all()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("lengths", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_trainer(name, lengths, tmp_path):
    """The Trainer with the collator that lays documents in one row."""
    data = [{"input_ids": text.tolist()} for step in range(6) for text in documents(step)]

    def run(model):
        options = TrainingArguments(
            str(tmp_path), max_steps=6, per_device_train_batch_size=4, logging_steps=1, report_to=[], save_strategy="no", use_cpu=True,
            learning_rate=1e-3, disable_tqdm=True, remove_unused_columns=False,
        )  # fmt: skip
        collator = DataCollatorWithFlattening(return_flash_attn_kwargs=lengths)
        trainer = Trainer(model, options, train_dataset=data, data_collator=collator)
        trainer.train()
        return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])

    want, model = run(tiny.model(name)), tiny.model(name)
    with attnops.patch(model), watched() as calls:
        ours = run(model)
    assert only_packed(calls) and len(ours) == 6
    torch.testing.assert_close(ours, want, rtol=DRIFT, atol=2e-4)  # the log is rounded


@pytest.mark.sweep(15)
@pytest.mark.parametrize("form", ["lengths", "positions", "left", "right"])
@pytest.mark.parametrize("name", ["mistral", "llama", "gemma2"])
def test_compiled_steps(name, form):
    """One graph, and eager's gradients. Documents are packed requests in it; padding is a mask, as in transformers."""
    eager, model, counter = gradients(tiny.model(name), form), tiny.model(name), Counter()
    with attnops.patch(model):
        compare(gradients(model, form, torch.compile(model, fullgraph=True, backend=counter)), eager)
    ops = [target.split(".")[1] for target in counter.targets() if target.startswith("attnops.")]
    ops = [op for op in ops if op != "request_starts"]
    assert len(counter) == 1 and ops == ["varlen_attention" if form in PACKED else "attention"] * model.config.num_hidden_layers


@pytest.mark.sweep(2)
@pytest.mark.parametrize("form", ["lengths", "positions"])
def test_compiled_steps_of_other_documents(form):
    """Sizes become symbolic when they first change: no number of documents, tokens, or length of one compiles a third graph."""
    model, counter = tiny.model("mistral", num_hidden_layers=1), Counter()
    with attnops.patch(model):
        compiled = torch.compile(model, fullgraph=True, backend=counter)
        for count, step in ((4, 0), (3, 1), (2, 2), (4, 3), *([(1, 4)] if form == "positions" else [])):
            made = batch(form, documents(step)[:count])
            want = tiny.model("mistral", num_hidden_layers=1)(**made, use_cache=False).loss
            assert relative(compiled(**made, use_cache=False).loss, want) < LIMIT
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
        *(pytest.param(name, on, marks=pytest.mark.sweep(5)) for name, on in (("llama", True), ("gemma2", False), ("gemma3", True))),
    ],
)
def test_inductor_counts_documents(name, checkpointing):
    """One graph for any number of documents in a row. It counts them once for each kind of layer, not again where activations are computed
    again, has eager's gradients, and holds no mask of all pairs."""
    model, row = tiny.model(name), batch("positions", documents(0))
    if checkpointing:
        model.gradient_checkpointing_enable()
    size = row["position_ids"].shape[1]
    rows = [cut(row, *lengths) for lengths in ((3, 20), (9,), (), (1,) * (size - 2), (1,) * (size - 1))]
    with attnops.patch(model), torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(model, fullgraph=True)
        ours, codes = run_and_get_code(lambda: [step(model, one, compiled) for one in rows])
    for found, one in zip(ours, rows, strict=True):
        compare(found, step(tiny.model(name), one))
    text = "\n".join(codes)
    ops = [call.partition(".")[0] for call in kernel_calls(text)]
    kinds, layers = len(set(getattr(model.config, "layer_types", None) or ["full_attention"])), model.config.num_hidden_layers
    assert len(codes) == 2, "a forward and a backward"
    assert ops.count("request_starts") == kinds and ops.count("varlen_attention_backward") == layers
    assert ops.count("varlen_attention") == layers * (1 + checkpointing)
    assert f"{size}, {size})" not in text


@pytest.mark.full
def test_cumulative_lengths_leave_nothing_to_count():
    """They take the place of documents by position, so that the host does not wait for their number."""
    model = tiny.model("llama")
    with attnops.patch(model):
        ours, codes = run_and_get_code(gradients, model, "lengths", torch.compile(model, fullgraph=True))
    compare(ours, gradients(tiny.model("llama"), "lengths"))
    assert [call for code in codes for call in kernel_calls(code) if call.startswith("request_starts")] == ["request_starts.unread"]


def test_compiled_dropout_of_documents():
    """No kernel of packed requests has it, so the mask is written out in the graph."""
    plain, model = (tiny.model("llama", attention_dropout=0.3, num_hidden_layers=1) for _ in range(2))
    counter = Counter()
    torch.manual_seed(0)
    eager = gradients(plain, "positions")
    with attnops.patch(model):
        torch.manual_seed(0)
        compare(gradients(model, "positions", torch.compile(model, fullgraph=True, backend=counter)), eager)
    assert len(counter) == 1


def test_explain_knows_documents():
    """Their number is a guess, and the row's length the bound on the longest."""
    model = tiny.model("llama").train()
    with attnops.patch(model):
        made = {name: x.repeat(1, 60) for name, x in batch("positions", documents(0)).items()}
        found = attnops.explain(model, **made, use_cache=False, target="h200", quiet=True)
    assert [name.partition(".")[0] for name in found.chosen()] == ["request_starts", "varlen_attention"]
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
    assert len(counter) == 1 and any("attnops.varlen_attention" in target for target in counter.targets())


def test_steps_without_gradients():
    """Packed documents are cumulative lengths in evaluation, too. Padded batches are ranges of the dense op there."""
    for form, op in (("positions", "varlen_attention"), ("right", "attention")):
        one, model = batch(form, documents(0)), tiny.model("llama")
        with torch.no_grad():
            want = model(**one, use_cache=False).loss
            with attnops.patch(model, mask="compact"), watched() as calls:
                ours = model(**one, use_cache=False).loss
        assert {call["op"] for call in calls} == {op} and all(call["mask"] is None for call in calls)
        assert relative(ours, want) < LIMIT


def test_a_batch_with_holes_is_a_mask():
    model, ids, mask = tiny.model("llama"), tokens(2, 12), torch.ones(2, 12, dtype=torch.int64)
    mask[0, 4] = 0
    want = model(ids, attention_mask=mask).logits
    with attnops.patch(model, mask="compact"), watched() as calls:
        ours = model(ids, attention_mask=mask).logits
    assert all(call["op"] == "attention" and call["mask"] is not None for call in calls)
    assert relative(ours[mask.bool()], want[mask.bool()]) < LIMIT


@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
def test_a_window_without_padding_has_no_mask(name):
    """Kernels with a gradient get a causal window, and neither a mask nor ranges of keys."""
    model, ids = tiny.model(name), tokens(2, 20)
    want = model(ids, labels=ids, use_cache=False).loss
    with attnops.patch(model), watched() as calls:
        ours = model(ids, labels=ids, use_cache=False).loss
    assert all(call["op"] == "attention" and call["causal"] for call in calls)
    assert all(call[name] is None for call in calls for name in ("mask", "kv_start", "kv_end"))
    assert {call["window"] for call in calls} == ({(7, -1)} if name == "mistral" else {(7, -1), (-1, -1)})
    assert relative(ours, want) < LIMIT
