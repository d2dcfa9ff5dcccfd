"""What people do to models, before and after patching them: adapters, offloading, quantisation, copies, files, threads."""

import copy
import io
import textwrap
import threading
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
import transformers

import attnops
from attnops.hf import tiny
from tests.helpers import ready, ready_process
from tests.hf.helpers import LIMIT, generated, left_padded, relative, tokens, watched


def lora(model):
    peft = pytest.importorskip("peft", reason="the package peft (extra dev) is not installed")
    torch.manual_seed(5)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "kv_b_proj"], lora_alpha=16, init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


def by_name(model):
    """PEFT takes inputs by name only."""
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    return model.generate(input_ids=tokens()[:, :14], attention_mask=left_padded()[:, :14], **options)


@pytest.mark.parametrize("mode", ["dense", "compact"])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_adapters(name, mode):
    want = by_name(lora(tiny.model(name)))
    assert not torch.equal(want, by_name(tiny.model(name)))

    outside = lora(tiny.model(name))
    with attnops.patch(outside, mask=mode) as handle, watched() as calls:
        assert torch.equal(by_name(outside), want)
        assert calls and attnops.patch(outside.get_base_model(), mask=mode) is handle
    assert torch.equal(by_name(outside), want)

    inside = tiny.model(name)
    handle = attnops.patch(inside, mask=mode)
    wrapped = lora(inside)
    assert attnops.patch(wrapped, mask=mode) is handle
    assert torch.equal(by_name(wrapped), want)
    handle.unpatch()
    assert torch.equal(by_name(wrapped), want) and wrapped.config._attn_implementation == "eager"


def test_training_an_adapter():
    model = lora(tiny.model("llama")).train()
    with attnops.patch(model), watched() as calls:
        model(input_ids=tokens(), labels=tokens()).loss.backward()
    assert calls
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert grads and all(grad is not None and torch.isfinite(grad).all() and grad.any() for grad in grads.values())


@pytest.mark.parametrize("order", ["before", "after"])
def test_offloading(order):
    accelerate = pytest.importorskip("accelerate", reason="the package accelerate (extra dev) is not installed")
    model = tiny.model("llama")
    want = generated(model)
    if order == "before":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    handle = attnops.patch(model)
    if order == "after":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.model.layers[0].self_attn.q_proj.weight.device.type == "meta"
    with watched() as calls:
        assert torch.equal(generated(model), want)
    assert calls
    accelerate.hooks.remove_hook_from_submodules(model)
    assert torch.equal(generated(model), want)
    handle.unpatch()
    assert torch.equal(generated(model), want)


def test_quantised_weights():
    quantization = pytest.importorskip("torchao.quantization", reason="the package torchao (extra dev) is not installed")
    model = tiny.model("llama")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    want = generated(model)
    with attnops.patch(model), watched() as calls:
        assert torch.equal(generated(model), want)
    assert calls
    patched_first = tiny.model("llama")
    attnops.patch(patched_first)
    quantization.quantize_(patched_first, quantization.Int8WeightOnlyConfig())
    assert torch.equal(generated(patched_first), want)


@pytest.mark.parametrize("mode", ["dense", "compact"])
def test_a_deep_copy_is_a_patched_model_of_its_own(mode):
    model = tiny.model("gemma3")
    want = generated(model)
    handle = attnops.patch(model, mask=mode)
    twin = copy.deepcopy(model)
    other = attnops.patch(twin, mask=mode)
    assert other is not handle and other.model is twin
    if mode == "compact":
        assert twin.generate.owner is twin
    handle.unpatch()
    assert model.config._attn_implementation == "eager" and twin.config._attn_implementation == other.implementation
    with watched() as calls:
        assert torch.equal(generated(twin), want)
    assert calls
    other.unpatch()
    assert twin.config._attn_implementation == "eager" and "_attnops" not in vars(twin) and "generate" not in vars(twin)
    assert torch.equal(generated(twin), want)


@pytest.mark.parametrize("options", [{}, {"kernel": "reference", "mask": "compact"}])
def test_saved_files_know_nothing_of_it(options, tmp_path):
    model = tiny.model("llama")
    keys = set(model.state_dict())
    attnops.patch(model, **options)
    assert set(model.state_dict()) == keys
    model.save_pretrained(tmp_path)
    assert "attnops" not in (tmp_path / "config.json").read_text()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config._attn_implementation in ("sdpa", "eager")
    with torch.no_grad():
        assert relative(again(tokens()).logits, model(tokens()).logits) < LIMIT
    by_name = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="attnops")
    with watched() as calls, torch.no_grad():
        by_name(tokens())
    assert calls


def test_a_pickled_model():
    model = tiny.model("llama")
    attnops.patch(model, mask="compact")
    written = io.BytesIO()
    torch.save(model, written)
    written.seek(0)
    again = torch.load(written, weights_only=False)
    assert torch.equal(generated(again), generated(model))
    attnops.patch(again, mask="compact").unpatch()
    assert again.config._attn_implementation == "eager"


OPTIONS = [
    {},
    {"mask": "compact"},
    {"mask": "explicit", "kernel": "reference"},
    {"cache": "paged"},
    {"cache": "paged", "mask": "compact"},
]


def test_a_fresh_process_loads_patched_models(tmp_path):
    want = generated(tiny.model("llama"))
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
    for i in range(len(OPTIONS)):
        assert torch.equal(torch.load(tmp_path / f"{i}.out"), want), OPTIONS[i]


def test_another_process_is_given_a_patched_model():
    model = tiny.model("llama")
    attnops.patch(model, mask="compact", kernel="reference")
    with ProcessPoolExecutor(1, mp_context=ready()) as pool:
        ours = pool.submit(generated, model).result()
    assert torch.equal(ours, generated(model))


def test_unpatched_modules_keep_no_options():
    model = tiny.model("llama")
    attnops.patch(model, mask="compact").unpatch()
    assert not [name for module in model.modules() for name in vars(module) if "attnops" in name]


def test_a_compiled_wrapper_can_be_patched():
    model = tiny.model("llama")
    wrapped = torch.compile(model, backend="eager")
    handle = attnops.patch(wrapped)
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
    want = generated(model)
    with attnops.patch(model):
        assert torch.equal(generated(model), want)
    assert len(used) == 2 and model.generate is mine


def test_threads():
    """Two conversations at once, one with holes in its mask: neither is told about the other's."""
    model = tiny.model("llama")
    masks = [left_padded()[:, :14], left_padded()[:, :14].clone()]
    masks[1][0, 6] = 0
    want = [generated(model, attention_mask=mask) for mask in masks]
    got: list[list[torch.Tensor]] = [[], []]

    def work(i):
        got[i] = [generated(model, attention_mask=masks[i]) for _ in range(3)]

    with attnops.patch(model, mask="compact"):
        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(len(got[i]) == 3 and all(torch.equal(one, want[i]) for one in got[i]) for i in range(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    model = tiny.model("llama").to(dtype)
    assert attnops.patch(model).verify(tokens(), attention_mask=left_padded()).passed
