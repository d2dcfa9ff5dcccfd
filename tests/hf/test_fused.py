"""Which linears of Hugging Face models become one, and that the models answer as before."""

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from transformers import AutoModelForCausalLM, StaticCache

import attnops
from attnops.hf import tiny
from attnops.hf.cache_names import named
from attnops.lowering import merge_linears_pass
from attnops.nn import pack_linears

IDS = torch.arange(12)[None]


def short(fused):
    """One line a group: modules and rows."""
    # Dynamo names the model `self`, or `args[0]` where a decorator is around its forward, as transformers 5.24 has one.
    paths = [w.replace("_modules_", ".").removesuffix("_parameters_weight_").partition(".layers.")[2] for w in fused.weights]
    names = [path for path in paths if path]
    assert len(names) == len(paths)
    lines = " + ".join(f"{n}[{rows}]" for n, rows in zip(names, fused.rows, strict=True))
    return f"{lines}: {fused.refusal}" if fused.refusal else lines


def fused_groups(family, layers=2):
    torch.manual_seed(0)
    model = tiny.model(family, num_hidden_layers=layers).eval()
    attnops.patch(model)
    told = []

    def backend(gm, inputs):
        told.extend(merge_linears_pass(gm))
        return gm.forward

    with torch.no_grad():
        want = model(IDS).logits
        pack_linears(model)
        torch.testing.assert_close(model(IDS).logits, want, rtol=0, atol=0)
        got = torch.compile(model, backend=backend)(IDS).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    return "\n".join(map(short, told))


def test_groups_of_llama():
    assert_expected_inline(
        fused_groups("llama"),
        """\
0.self_attn.q_proj[64] + 0.self_attn.k_proj[32] + 0.self_attn.v_proj[32]
0.mlp.gate_proj[96] + 0.mlp.up_proj[96]
1.self_attn.q_proj[64] + 1.self_attn.k_proj[32] + 1.self_attn.v_proj[32]
1.mlp.gate_proj[96] + 1.mlp.up_proj[96]""",
    )


@pytest.mark.full  # llama's are the same, and test_generation_over_pages_gives_the_same_tokens has this model
def test_groups_of_qwen3():
    assert_expected_inline(
        fused_groups("qwen3", 1),
        """\
0.self_attn.q_proj[64] + 0.self_attn.k_proj[32] + 0.self_attn.v_proj[32]
0.mlp.gate_proj[96] + 0.mlp.up_proj[96]""",
    )


def test_groups_of_gpt_oss():
    assert_expected_inline(
        fused_groups("gpt-oss-small", 1),
        """0.self_attn.q_proj[256] + 0.self_attn.k_proj[128] + 0.self_attn.v_proj[128]""",
    )


def test_groups_of_deepseek():
    assert_expected_inline(
        fused_groups("deepseek_v3", 1),
        """\
0.self_attn.q_a_proj[24] + 0.self_attn.kv_a_proj_with_mqa[40]
0.mlp.gate_proj[96] + 0.mlp.up_proj[96]""",
    )


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_packed_model_is_saved_and_loaded(family, tmp_path):
    model = tiny.model(family, num_hidden_layers=1)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    assert pack_linears(model).groups
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert list(loaded) == list(before) and all(torch.equal(loaded[n], before[n]) for n in before)


def test_tied_embeddings_stay_tied():
    model = tiny.model("llama", num_hidden_layers=1, tie_word_embeddings=True)
    head: nn.Linear = model.lm_head
    pack_linears(model)
    assert head.weight is model.model.embed_tokens.weight


FLASH = "_scaled_dot_product_flash_attention_for_cpu.default("


@pytest.mark.full
def test_a_decode_step_copies_no_slice():
    """One kernel rotates queries and keys and stores them and the values, which are read where the product left them."""
    from torch._inductor.utils import run_and_get_code

    model = tiny.model("llama", num_hidden_layers=1).eval()
    attnops.patch(model)
    pack_linears(model)
    cache = StaticCache(config=model.config, max_cache_len=32)
    with torch.no_grad(), torch._inductor.config.patch(fx_graph_cache=False):
        model(IDS, **named(cache))
        compiled = torch.compile(model, options={"pre_grad_custom_pass": merge_linears_pass})
        _, code = run_and_get_code(compiled, IDS[:, :1], **named(cache))
    body = "\n".join(code).partition("def call(")[2]
    calls = [line.strip().partition("(")[0].rpartition(".")[2] for line in body.splitlines() if FLASH in line or "mm(" in line
             or line.strip().startswith("cpp_fused")]  # fmt: skip
    kinds = ["kernel" if c.startswith("cpp_fused") else c for c in calls]
    assert kinds == ["kernel", "mm", "kernel", "default", "mm", "kernel", "mm", "kernel", "mm", "kernel", "mm", "kernel"]


def test_generation_over_pages_gives_the_same_tokens():
    model = tiny.model("qwen3", num_hidden_layers=1).eval()
    attnops.patch(model, cache="paged")
    ids, told = torch.arange(10, 20).view(2, 5), []
    more = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}

    def backend(gm, inputs):
        told.append([f.refusal for f in merge_linears_pass(gm)])
        return gm.forward

    with torch.no_grad():
        want = model.generate(ids, **more)
        pack_linears(model)
        model.forward = torch.compile(model.forward, backend=backend)
        assert torch.equal(model.generate(ids, **more), want)
    assert told == [["", ""]] * len(told) and told
