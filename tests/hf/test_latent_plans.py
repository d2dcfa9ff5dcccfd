"""Kernels of latents that the host plans for in decode steps of patched models, over stand-ins of
FlashInfer and of graphs. `test_host_plans` has those of keys and values."""

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import attnops
from attnops.core.kernel import fits_a_graph, kernels_of, replanned
from attnops.hf.cache import model_pages
from attnops.hf.cache.model_pages import ModelPages
from attnops.hf.cache.step_plans import mean_plan_us
from attnops.ops import latent_layers
from tests.hf.decoding import logits
from tests.hf.helpers import relative
from tests.hf.test_host_plans import CALLS, LIMIT, MODES, Forced, patched, serves_under
from tests.standins import flashinfer_mla

FA2, FA3 = "flashinfer_mla_fa2", "flashinfer_mla_fa3"


def deepseek(heads=4):
    """Latents of the sizes that FlashInfer compiles."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        first_k_dense_replace=3,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        kv_lora_rank=512,
        q_lora_rank=24,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    return DeepseekV3ForCausalLM(config).to(torch.bfloat16).eval()


def served(mode, kernel=FA3, heads=4, **more):
    """A patched model of latents beside its twin."""
    return patched(deepseek(heads), mode, kernel, vendor=flashinfer_mla, **more)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("mode", MODES)
def test_steps_of_changing_batches(mode):
    """Left padding, rows that come and go, pages that fill up. A plan has no lengths that can be
    changed by themselves, so that each step has one."""
    with served(mode) as pair:
        for call in CALLS:
            pair.same(*call)
        steps = sum(new - 1 for *_, new in CALLS)
        assert pair.ran["fa3.run"] >= 3 * steps, "three layers a step"
        assert pair.ran["fa3.plan"] >= steps


@pytest.mark.parametrize(("heads", "kernel", "arch"), [(4, FA2, 80), (128, FA3, 90)])
def test_other_kernels_and_heads(heads, kernel, arch):
    """Of 128 heads two tiles work together."""
    with served("breakable", kernel, heads, arch=arch) as pair:
        pair.same(*CALLS[0])
        assert pair.ran[f"{kernel[-3:]}.run"]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("mode", ["breakable", "piecewise"])
def test_the_graph_is_whole(mode):
    with served(mode) as pair:
        pair.same(*CALLS[0])
        [row] = pair.handle.graphs.report().rows
        assert (row.graphs, row.breaks, row.replays) == (1, (), CALLS[0][2] - 1)
        assert str(pair.handle.took).startswith(f"cache=paged, decode={mode}")


@pytest.mark.sweep(3)
@pytest.mark.parametrize("mode", ["hf", "breakable", "auto"])
@pytest.mark.parametrize("policy", [{"kernel": FA3}, {"prefer": (FA3,)}])
def test_a_policy_asks_for_it(policy, mode):
    with served(mode, kernel=None) as pair:
        serves_under(pair, policy, "fa3.run")


@pytest.mark.parametrize(("us", "taken"), [(0.0, True), (1e9, False)])
def test_a_kernel_that_nobody_asks_for(monkeypatch, us, taken):
    monkeypatch.setattr(model_pages, "mean_plan_us", lambda *_: us)
    with attnops.use(allow=(FA3, "reference")), served("breakable", kernel=None) as pair:
        pair.same(*CALLS[0])
        assert bool(pair.ran["fa3.run"]) == taken


@pytest.mark.sweep(2)
@pytest.mark.parametrize("mode", ["breakable", "piecewise"])
def test_a_graph_of_host_plans_makes_none_on_the_device(monkeypatch, mode):
    """No layer would read it."""
    made, device_plan = [], model_pages.device_plan

    def counted(*given):
        made.append(1)
        return device_plan(*given)

    monkeypatch.setattr(model_pages, "mean_plan_us", lambda *_: 0.0)
    monkeypatch.setattr(model_pages, "device_plan", counted)
    with attnops.use(allow=(FA3, "reference")), served(mode, kernel=None) as pair:
        pair.same(*CALLS[0])
        assert pair.ran["fa3.run"] and not made


def test_each_step_is_planned():
    planning = kernels_of("plan_mla_attention")[FA3]
    problem = latent_layers(16, 64, torch.bfloat16)
    assert mean_plan_us(planning, problem, 1) == mean_plan_us(planning, problem, 99) > 0


def test_no_step_waits(monkeypatch):
    """But the first after a prompt, for its lengths."""
    known, plan_step = [], ModelPages.plan_step

    def watched(self, plans, rows, live):
        known.append(self.lengths is not None and live > 0)
        with monkeypatch.context() as patch:
            for name in ("cpu", "item") if known[-1] else ():
                patch.setattr(torch.Tensor, name, None)
            plan_step(self, plans, rows, live)

    monkeypatch.setattr(ModelPages, "plan_step", watched)
    with served("breakable") as pair:
        pair.same(2, 14, 60)
        assert known.count(True) == 58 and pair.ran["fa3.plan"] >= 58


def test_more_tokens_over_a_cache():
    """As a second turn of a chat, or a prompt in chunks; so is one of padding longer than a
    chunk."""
    with served("breakable") as pair:
        pair.same(2, 30, 6, prefill_chunk_size=9)
        assert pair.ran["fa3.plan"]
        ids = torch.randint(3, 90, (2, 30))
        mask = torch.ones_like(ids)
        mask[0, :14] = 0
        given = {"attention_mask": mask, "max_new_tokens": 4, "min_new_tokens": 4}
        asks = {"output_logits": True, "return_dict_in_generate": True, "do_sample": False}
        got, want = (
            model.generate(
                ids, **given, **asks, logits_processor=[Forced()], prefill_chunk_size=9
            ).logits
            for model in (pair.model, pair.twin)
        )
        assert relative(torch.stack(got).float(), torch.stack(want).float()) < LIMIT


def test_later_chunks_have_no_plan():
    """The model's own layers run them."""
    with served("auto") as pair, torch.no_grad():
        ids, cache = torch.randint(3, 90, (1, 140)), pair.handle.new_cache(1, 200)
        for stop in (70, 140):
            pair.model.generate(ids[:, :stop], max_new_tokens=1, past_key_values=cache)
        assert "needs a plan of the host" in pair.decoder.prompts.why


def test_graphs_of_more_tokens_leave_it_outside():
    """How a plan divides the work of those follows from the lengths."""
    kernel = kernels_of("mla_attention")[FA3]
    for queries, fits in ((0, False), (1, True), (2, False)):
        with replanned(queries):
            assert fits_a_graph(kernel) == fits


def test_bits_of_graphs_are_those_without():
    found = []
    for mode in ("hf", "breakable"):
        with served(mode) as pair:
            found.append(logits(pair.model, *CALLS[0], logits_processor=[Forced()]))
            assert pair.ran["fa3.run"]
    assert torch.equal(*found)


def test_explain():
    with served("breakable") as pair, torch.no_grad():
        ids, cache = torch.randint(3, 90, (2, 12)), pair.handle.new_cache(2, 64)
        pair.model(ids[:, :9], past_key_values=cache, use_cache=True)
        for tokens in (1, 3):
            told = str(attnops.explain(pair.model, ids[:, :tokens], past_key_values=cache))
            assert FA3 in told and "plan=host" in told.partition("mla_attention on")[2], tokens
