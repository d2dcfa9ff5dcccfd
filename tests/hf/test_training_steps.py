"""Fifty training steps of a patched model lose what they lose with transformers' own attention:
documents in one row, and padded."""

import contextlib
import functools
from typing import Any

import pytest
import torch
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

import attnops
from attnops.hf import tiny
from tests.hf.helpers import near, relative, tokens, watched

# Sliding windows: mistral, gemma2, gemma3, gpt_oss. A soft cap: gemma2. Sinks: gpt_oss. A value of
# another size than the key: deepseek_v3.
FAMILIES = ("llama", "mistral", "gemma2", "gpt_oss", "qwen3", "deepseek_v3", "gemma3", "phi3")
PACKED, PADDED = ("positions", "lengths", "rows"), ("left", "right", "both")
STEPS = 50

# After fifty steps of AdamW the losses of two orders of summation differ by up to 8e-6. A token of
# another document changes them by 5e-2.
DRIFT = 3e-5


def documents(step):
    """Four documents of 3 to 23 tokens, others at each step."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(3, 24, (4,), generator=generator, device="cpu").tolist()
    return [torch.randint(2, 100, (n,), generator=generator, device="cpu") for n in lengths]


def row_of(texts):
    """The texts one after the other: tokens, positions that begin at 0 in each, and labels without
    those of first tokens."""
    ids, where = torch.cat(texts), torch.cat([torch.arange(len(text)) for text in texts])
    return {"input_ids": ids, "position_ids": where, "labels": ids.masked_fill(where == 0, -100)}


def batch(form, texts) -> dict[str, Any]:
    """The texts as a model takes them, each with the same loss.

    form: "positions" is one row, whose texts position_ids tell apart; "lengths" the same with
    cumulative lengths; "rows" two rows of one length, which end in a document without labels.
    "left", "right" and "both" say where padding is.
    """
    if form == "rows":
        pairs, rows = (texts[:2], texts[2:]), []
        width = max(sum(map(len, pair)) for pair in pairs) + 1
        for pair in pairs:
            filler = torch.arange(width - sum(map(len, pair))) + 2
            rows.append(row_of([*pair, filler]))
            rows[-1]["labels"][-len(filler) :] = -100
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    if form in PACKED:
        collator = DataCollatorWithFlattening(return_flash_attn_kwargs=form == "lengths")
        return dict(collator([{"input_ids": text.tolist()} for text in texts]))
    width = max(map(len, texts)) + (form == "both")
    ids = torch.zeros(len(texts), width, dtype=torch.int64)
    mask = torch.zeros(len(texts), width, dtype=torch.int64)
    for row, text in enumerate(texts):
        room = width - len(text)
        begin = {"left": room, "right": 0, "both": room // 2}[form]
        ids[row, begin : begin + len(text)], mask[row, begin : begin + len(text)] = text, 1
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill((mask == 0) | (mask.cumsum(-1) == 1), -100),
    }


def train(model, form, dtype=torch.float32, steps=STEPS):
    """`[steps]` losses. dtype: of autocast; float16 with a scaler of gradients."""
    model.train()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    losses = []
    for step in range(steps):
        given = {
            name: x.to(model.device) if isinstance(x, torch.Tensor) else x
            for name, x in batch(form, documents(step)).items()
        }
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
    return bool(calls) and all(
        call["op"] == "varlen_attention" and call["mask"] is None for call in calls
    )


# Padded batches train in test_lora, too.
@pytest.mark.sweep(48)
@pytest.mark.parametrize("form", [*PACKED, *PADDED])
@pytest.mark.parametrize("name", FAMILIES)
def test_fifty_steps(name, form):
    if name == "gpt_oss" and form in ("positions", "rows"):
        pytest.skip(
            "transformers makes gpt-oss' masks without position_ids: only lengths tell its "
            "documents apart"
        )
    model = tiny.model(name)
    # On a CPU dense masks of padded batches are as fast, and "auto" takes them.
    with attnops.patch(model, mask="compact" if form in PADDED else "auto"), watched() as calls:
        ours = train(model, form)
    assert only_packed(calls)
    assert ((ours - eager_losses(name)).abs() <= DRIFT * eager_losses(name)).all()


@pytest.mark.sweep(20)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["positions", "left", "right"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_half_precision(name, form, dtype):
    """As far from eager's losses as those of transformers' sdpa are, on average. float16 has a
    scaler."""
    model = tiny.model(name)
    eager, sdpa = (
        train(m, form, dtype, steps=20)
        for m in (model, tiny.model(name, attn_implementation="sdpa"))
    )
    model = tiny.model(name)
    with attnops.patch(model, mask="compact"), watched() as calls:
        ours = train(model, form, dtype, steps=20)
    assert only_packed(calls) and {call["query"].dtype for call in calls} == {dtype}
    # All three differ by rounding alone, so that any two are about as far apart.
    assert (ours - eager).abs().mean() <= 2 * (sdpa - eager).abs().mean()


# The backward passes through every layer twice, and the gradients of small weights are sums of
# large terms.
OF_GRADIENTS = 256 * torch.finfo(torch.float32).eps


def compare(ours, eager, limit=OF_GRADIENTS):
    assert ours[1].keys() == eager[1].keys()
    assert abs(ours[0] - eager[0]) <= limit * abs(eager[0])
    top = max(grad.abs().max().item() for grad in eager[1].values())
    for name, grad in eager[1].items():
        assert torch.isfinite(ours[1][name]).all(), name
        assert (ours[1][name] - grad).abs().max() <= limit * max(
            grad.abs().max().item(), 1e-2 * top
        ), name


def step(model, given, call=None):
    """The loss and every gradient of one training step."""
    model.train()
    model.zero_grad()
    loss = (model if call is None else call)(**given, use_cache=False).loss
    loss.backward()
    return loss.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def gradients(model, form, call=None):
    return step(model, batch(form, documents(0)), call)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("mode", ["dense", "compact"])
@pytest.mark.parametrize("form", ["left", "right"])
@pytest.mark.parametrize(
    "name", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "qwen2_moe", "gpt2", "opt"]
)
def test_gradients(name, form, mode):
    eager = gradients(tiny.model(name, **no_dropout(name)), form)
    model = tiny.model(name, **no_dropout(name))
    with attnops.patch(model, mask=mode), watched() as calls:
        compare(gradients(model, form), eager)
    assert calls, "without dropout the op itself is differentiated"


def no_dropout(name) -> dict[str, Any]:
    return {
        "gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
        "opt": {"dropout": 0.0},
    }.get(name, {})


def blt():
    from transformers import BltConfig, BltForCausalLM

    layers = {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
    }
    part = {"hidden_size": 16, "max_position_embeddings": 32, "vocab_size": 128, **layers}
    parts = {
        "patcher_config": part,
        "encoder_config": part,
        "global_config": {**part, "hidden_size": 32},
    }
    parts["decoder_config"] = {**part, "hidden_size_global": 32}
    hashes = {
        "encoder_hash_byte_group_size": [2, 3],
        "encoder_hash_byte_group_vocab": 64,
        "encoder_hash_byte_group_nb_functions": 1,
    }
    torch.manual_seed(0)
    return BltForCausalLM(
        BltConfig(
            vocab_size=128,
            patch_in_forward=False,
            cross_attn_k=2,
            initializer_range=0.2,
            **parts,
            **hashes,
        )
    )


def test_text_that_reads_padding():
    """Patches of BLT hold the bytes of both, so what layers give for padding has to be what sdpa
    gives."""
    model = blt()
    model.set_attn_implementation("sdpa")
    sdpa = gradients(model, "left")
    with attnops.patch(model, mask="compact") as handle:
        assert (
            "masks are always written out: BltModel pools padding with text"
            in handle.report().notes
        )
        compare(gradients(model, "left"), sdpa)


@pytest.mark.parametrize("mode", ["dense", "compact"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "mistral"])
def test_dropout(name, mode):
    """The same seed drops the same weights as eager attention does, so loss and gradients agree;
    another seed drops others."""

    def run(model, seed):
        torch.manual_seed(seed)
        with watched() as calls:
            found = gradients(model, "left")
        assert not calls, "the op has no dropout"
        return found

    eager = run(tiny.model(name, attention_dropout=0.3), 1)
    model = tiny.model(name, attention_dropout=0.3)
    with attnops.patch(model, mask=mode) as handle:
        compare(run(model, 1), eager)
        assert relative(run(model, 2)[0], eager[0]) > OF_GRADIENTS
        assert any("dropout" in note for note in handle.report().notes)
        with watched() as calls, torch.no_grad():
            model.eval()(**batch("left", documents(0)))
        assert calls, "in eval mode nothing is dropped"


@pytest.mark.sweep(3)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    ("name", "form"),
    [("llama", "rows"), ("gemma3", "left"), ("gpt_oss", "lengths"), ("mistral", "positions")],
)
def test_gradient_checkpointing(name, form, reentrant):
    eager, model = gradients(tiny.model(name), "right"), tiny.model(name)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with attnops.patch(model, mask="compact"), watched() as calls:
        compare(gradients(model, form), eager)
    assert only_packed(calls) and len(calls) == 2 * model.config.num_hidden_layers, (
        "each layer's attention is computed again"
    )


def adapted(name):
    peft = pytest.importorskip("peft", reason="the extra for LoRA is not installed")
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False
    )
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
            str(tmp_path),
            max_steps=6,
            per_device_train_batch_size=4,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            learning_rate=1e-3,
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        collator = DataCollatorWithFlattening(return_flash_attn_kwargs=lengths)
        trainer = Trainer(model, options, train_dataset=data, data_collator=collator)
        trainer.train()
        return torch.tensor(
            [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        )

    want, model = run(tiny.model(name)), tiny.model(name)
    with attnops.patch(model), watched() as calls:
        ours = run(model)
    assert only_packed(calls) and len(ours) == 6
    torch.testing.assert_close(ours, want, rtol=DRIFT, atol=2e-4)  # the log is rounded


def test_steps_without_gradients():
    """Packed documents are cumulative lengths in evaluation, too. Padded batches are ranges of the
    dense op there."""
    for form, op in (("positions", "varlen_attention"), ("right", "attention")):
        one, model = batch(form, documents(0)), tiny.model("llama")
        with torch.no_grad():
            want = model(**one, use_cache=False).loss
            with attnops.patch(model, mask="compact"), watched() as calls:
                ours = model(**one, use_cache=False).loss
        assert {call["op"] for call in calls} == {op} and all(
            call["mask"] is None for call in calls
        )
        near(ours, want)


@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
def test_a_window_without_padding_has_no_mask(name):
    """Kernels with a gradient get a causal window, and neither a mask nor ranges of keys."""
    model, ids = tiny.model(name), tokens(2, 20)
    want = model(ids, labels=ids, use_cache=False).loss
    with attnops.patch(model), watched() as calls:
        ours = model(ids, labels=ids, use_cache=False).loss
    assert all(call["op"] == "attention" and call["causal"] for call in calls)
    assert all(call[name] is None for call in calls for name in ("mask", "kv_start", "kv_end"))
    assert {call["window"] for call in calls} == (
        {(7, -1)} if name == "mistral" else {(7, -1), (-1, -1)}
    )
    near(ours, want)
