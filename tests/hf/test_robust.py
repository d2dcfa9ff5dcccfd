"""What people do to models, before and after patching them: adapters, offloading, quantisation,
copies, files, threads."""

import textwrap
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers

import attnops
from attnops.hf import tiny
from tests.helpers import ready_process
from tests.hf.helpers import (
    copies,
    eager_tokens,
    generated,
    gives_eagers_tokens,
    left_padded,
    near,
    tokens,
    watched,
)
from tests.hf.kinds import attending

DENSE: tuple[str, dict[str, Any]] = ("llama", {})
COMPACT: tuple[str, dict[str, Any]] = ("gemma3", {"mask": "compact"})
KEYS: tuple[str, dict[str, Any]] = ("gpt_oss", {"cache": "paged"})
LATENTS: tuple[str, dict[str, Any]] = ("deepseek_v3", {"cache": "paged"})
each = pytest.mark.parametrize(
    ("name", "options"),
    [DENSE, COMPACT, KEYS, LATENTS],
    ids=["dense", "compact", "keys", "latents"],
)


@contextmanager
def served(name, options):
    """Within the block attnops must serve a call."""
    if "cache" in options:
        with attending(name) as calls:
            yield
        assert calls.later
    else:
        with watched() as calls:
            yield
        assert calls


def lora(model, *names):
    """names: of the linears. The random numbers of adapters are those of a seed."""
    peft = pytest.importorskip("peft", reason="the package peft (extra dev) is not installed")
    torch.manual_seed(5)
    config = peft.LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj", "kv_b_proj", *names],
        lora_alpha=16,
        init_lora_weights=False,
    )
    return peft.get_peft_model(model, config).eval()


def by_name(model):
    """PEFT takes inputs by name only."""
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    return model.generate(
        input_ids=tokens()[:, :14], attention_mask=left_padded()[:, :14], **options
    )


@each
@pytest.mark.parametrize("order", ["before", "after"])
def test_adapters(name, options, order):
    """LoRA also on what makes keys, values and absorbed weights. They follow when the adapter is
    switched off."""
    want, plain = by_name(lora(tiny.model(name))), by_name(tiny.model(name))
    assert not torch.equal(want, plain)
    model = tiny.model(name)
    if order == "before":
        model = lora(model)
    handle = attnops.patch(model, **options)
    wrapped = model if order == "before" else lora(model)
    assert (
        attnops.patch(wrapped, **options)
        is handle
        is attnops.patch(wrapped.get_base_model(), **options)
    )
    with served(name, options):
        assert torch.equal(by_name(wrapped), want)
        with wrapped.disable_adapter():
            assert torch.equal(by_name(wrapped), plain)
        assert torch.equal(by_name(wrapped), want)
    handle.unpatch()
    assert torch.equal(by_name(wrapped), want) and wrapped.config._attn_implementation == "eager"
    assert not any("_attnops" in name for m in wrapped.modules() for name in vars(m))


@each
@pytest.mark.parametrize("order", ["before", "after"])
def test_offloading(name, options, order):
    accelerate = pytest.importorskip(
        "accelerate", reason="the package accelerate (extra dev) is not installed"
    )
    model = tiny.model(name)
    if order == "before":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    handle = attnops.patch(model, **options)
    if order == "after":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.model.layers[0].self_attn.o_proj.weight.device.type == "meta"
    with served(name, options):
        gives_eagers_tokens(model, name)
    accelerate.hooks.remove_hook_from_submodules(model)
    gives_eagers_tokens(model, name)
    handle.unpatch()
    gives_eagers_tokens(model, name)


@each
@pytest.mark.parametrize("order", ["before", "after"])
def test_quantised_weights(name, options, order):
    quantization = pytest.importorskip(
        "torchao.quantization", reason="the package torchao (extra dev) is not installed"
    )
    stock, model = tiny.model(name), tiny.model(name)
    quantization.quantize_(stock, quantization.Int8WeightOnlyConfig())
    if order == "before":
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    with attnops.patch(model, **options), served(name, options):
        if order == "after":
            quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
        assert torch.equal(generated(model), generated(stock))


@each
def test_copies_and_pickles(name, options):
    """A patched model each, with a handle of its own and nothing of the first."""
    model = tiny.model(name)
    handle = attnops.patch(model, **options)
    generated(model, new=2)
    others = copies(model)
    handle.unpatch()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    for other in others:
        with served(name, options):
            gives_eagers_tokens(other, name)
        again = attnops.patch(other, **options)
        assert again is not handle and again.model is other
        again.unpatch()
        assert other.config._attn_implementation == "eager"
        assert not {"expand_kv", "_attnops", "generate"} & {
            n for m in other.modules() for n in vars(m)
        }
        assert not other.model.layers[0].self_attn._forward_pre_hooks
        gives_eagers_tokens(other, name)


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_threads_over_pages(name):
    model = tiny.model(name)
    with attnops.patch(model, cache="paged"), ThreadPoolExecutor(2) as pool:
        found = [pool.submit(generated, model) for _ in range(6)]
        assert all(torch.equal(one.result(), eager_tokens(name)) for one in found)


def test_saved_files_know_nothing_of_it(tmp_path):
    model = tiny.model("llama")
    keys = set(model.state_dict())
    attnops.patch(model, kernel="reference", mask="compact")
    assert set(model.state_dict()) == keys
    model.save_pretrained(tmp_path)
    assert "attnops" not in (tmp_path / "config.json").read_text()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config._attn_implementation in ("sdpa", "eager")
    with torch.no_grad():
        near(again(tokens()).logits, model(tokens()).logits)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"mask": "explicit", "kernel": "reference"},
    {"cache": "paged", "mask": "compact"},
]


def test_a_fresh_process_loads_patched_models(tmp_path):
    for i, options in enumerate(OPTIONS):
        model = tiny.model("llama")
        attnops.patch(model, **options)
        torch.save(model, tmp_path / f"{i}.pt")
    # A part of a model has no handle of its own. These options are of no whole model.
    attnops.patch(part := tiny.model("llama"), mask="explicit", kernel="sdpa")
    torch.save(part.model, tmp_path / "part.pt")
    code = f"""
        import torch
        part = torch.load(r"{tmp_path}/part.pt", weights_only=False)
        with torch.no_grad():
            assert torch.isfinite(part(torch.arange(2, 9)[None]).last_hidden_state).all()
        for i in range({len(OPTIONS)}):
            model = torch.load(r"{tmp_path}/" + f"{{i}}.pt", weights_only=False)
            from tests.hf.helpers import generated
            torch.save(generated(model), r"{tmp_path}/" + f"{{i}}.out")
    """
    ready_process(textwrap.dedent(code))
    for i, options in enumerate(OPTIONS):
        assert torch.equal(torch.load(tmp_path / f"{i}.out"), eager_tokens("llama")), options


def test_a_compiled_wrapper_can_be_patched():
    model = tiny.model("llama")
    handle = attnops.patch(torch.compile(model, backend="eager"))
    assert attnops.patch(model) is handle
    handle.unpatch()
    assert model.config._attn_implementation == "eager"


def test_a_generate_of_somebody_else():
    """An instance that carries its own generate keeps it, patched and unpatched."""
    model = tiny.model("llama")
    own, used = model.generate, []

    def mine(*args, **kwargs):
        used.append(1)
        return own(*args, **kwargs)

    model.generate = mine
    with attnops.patch(model):
        gives_eagers_tokens(model, "llama")
    assert len(used) == 1 and model.generate is mine
