"""Prompts of mode "auto" before capture(): recorded layers in graphs from the second of a size on,
and no compiler."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import DynamicCache, LogitsProcessor
from transformers.models.llama.modeling_llama import LlamaMLP

import attnops
from attnops.core.errors import InvalidInput
from attnops.graphs.compile_pieces import Program
from attnops.graphs.per_layer import NotRegional, Regions
from attnops.hf import tiny
from attnops.hf.cache.names import named
from attnops.hf.models import methods
from attnops.hf.steps import model_state, prompt
from attnops.hf.steps.captures import TRIES, Over
from attnops.hf.steps.chunk_step import ChunkStep
from attnops.hf.steps.chunks import packed
from tests.graphs.standin import StandIn
from tests.hf.decoding import Failing, first, generated, logits, turns
from tests.hf.helpers import relative, tokens

SIZES = (32, 64)


@pytest.fixture(autouse=True)
def bounds(monkeypatch):
    """Sizes of chunks in graphs, and no compiler of layers."""
    monkeypatch.setattr(prompt, "CAPTURED", SIZES)

    def compiles(regions, *args, **kwargs):
        raise AssertionError("layers are compiled")

    monkeypatch.setattr(Regions, "_traced", compiles)


def ways(pair, calls):
    """How each prompt ran, the tokens being the twin's."""
    return [pair.same(*call).prompt for call in calls]


def second_is_captured(pair):
    assert ways(pair, [(2, 14, 2)] * 2) == ["", "captured"]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["gpt_oss", "mixtral", "qwen3_moe", "deepseek_v3"])
def test_mixtures(name):
    """In bfloat16, for torch's grouped products have no fake result in float32. The first logits
    are those of the model's own layers in the call before."""
    with first(tiny.model(name).to(torch.bfloat16)) as pair:
        own, captured = (logits(pair.model, 2, 14, 1) for _ in range(2))
        assert pair.took.prompt == "captured"
        assert relative(captured, own) < 0.02


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "glm4", "olmo2"])
def test_norms_after_attention_and_mlp_are_calls_with_their_residual(name):
    """Alone are those before linears, which are torch's own here, or of all queries and keys."""
    with attnops.use(kernel={"rms_norm": "reference"}), first(name) as pair:
        assert ways(pair, [(3, 20, 1)] * 3) == ["", "captured", "captured"], pair.handle.report()
        [note] = [note for note in pair.handle.report().notes if note.startswith("norms")]
    assert "2 norm by reference, 2 norm + residual by reference" in note, note


def test_prompts_that_are_not_captured_run_the_layers_of_the_model():
    with first() as pair:
        assert ways(pair, [(2, 40, 2)] * 3) == [""] * 3
        assert "it has more than 64 tokens" in str(pair.handle.report())


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", ["llama", "qwen3", "olmo2", "granite", "minicpm3"])
@pytest.mark.parametrize("pad", [0, 4])
def test_turns_of_a_conversation_are_captured(name, pad):
    """Also those of one new token, the last one of the answer before it."""
    ids, lengths = tokens(2, 60), [14, 9, 11, 0, 7, 25]
    with first(name) as pair:
        want = [*turns(pair.twin, DynamicCache(config=pair.twin.config), ids, lengths, pad)]
        for took in (["", "", *["captured"] * 3, ""], ["captured"] * 6):
            cache, ran = pair.handle.new_cache(2, 90), []
            for got, right in zip(turns(pair.model, cache, ids, lengths, pad), want, strict=True):
                assert torch.equal(got, right)
                ran.append(pair.took.prompt)
            assert ran == took, pair.handle.report()
            del cache  # the next one is of its pages


def test_padding_of_a_chunk_is_a_request_over_the_null_page():
    """No kernel meets more new tokens than tokens of a request."""
    with first() as pair:
        pages = pair.handle.new_cache(2, 24).state.pages
        batch = packed(pages, torch.tensor([3, 2]), torch.tensor([4, 0]), 8)
        assert batch.seq_lens.tolist() == [7, 2, 3]
        assert batch.cu_seqlens_q.tolist() == [0, 3, 5, 8]
        assert batch.slots[5:].tolist() == [-1] * 3 and not batch.page_table[2].any()
        room = pages.tables[0].shape[1] * pages.page_size
        longer = packed(pages, torch.tensor([3, 2]), torch.tensor([4, 0]), room + 9)
        assert longer.seq_lens[2] == room


def test_a_long_prompt_is_captured_in_chunks(monkeypatch):
    """One row takes several, and the next begins one of its own."""
    monkeypatch.setattr(prompt, "CHUNK", 64)
    with first() as pair:
        assert ways(pair, [(2, 150, 2)] * 3) == ["", "captured", "captured"]
        assert len(pair.decoder._kept.over) == 3, "of steps, of first chunks and of later ones"


@pytest.mark.parametrize("far", [("cuda",), ("cuda", "cpu")])
@pytest.mark.parametrize(("length", "chunk"), [(17, 8), (9, 1)])
def test_chunks_of_one_token(length, chunk, far, monkeypatch):
    """The last one, or each. On a GPU the host reads no mask of one token."""
    monkeypatch.setattr("attnops.hf.attention.descriptor._FAR", far)
    with first() as pair:
        for _ in range(3):
            pair.same(2, length, 3, prefill_chunk_size=chunk)


@pytest.mark.filterwarnings("ignore::attnops.core.errors.NotFast")
@pytest.mark.parametrize(
    ("error", "tries"),
    [(NotRegional("no way"), 1), (torch.OutOfMemoryError("out of memory"), 1 + TRIES)],
)
def test_later_chunks_that_cannot_be_captured_cost_first_ones_nothing(error, tries, monkeypatch):
    """And are tried no more often because first ones could be."""
    step, failed = ChunkStep.__call__, []

    def fails(prompts, tokens, positions, counts, before, last, fresh, *more):
        if not fresh:
            failed.append(fresh)
            raise error
        return step(prompts, tokens, positions, counts, before, last, fresh, *more)

    monkeypatch.setattr(ChunkStep, "__call__", fails)
    monkeypatch.setattr(Over, "begin_chunk", lambda *_: None)
    monkeypatch.setattr(prompt, "CHUNK", 64)
    with first() as pair:
        assert not any(ways(pair, [(2, 150, 2)] * 8))
        assert len(failed) == tries
        second_is_captured(pair)
        told = f"some are not captured: {type(error).__name__}: {error}"
        assert told in str(pair.handle.report())


def test_latents_that_a_wrapped_linear_unfolds():
    """Layers keep its weights, and the model's own prompts make them anew."""

    def wrap(model):
        for layer in model.model.layers:
            layer.self_attn.kv_b_proj = nn.Sequential(layer.self_attn.kv_b_proj)

    with first("minicpm3") as pair:
        second_is_captured(pair)
        pair.change(wrap)
        assert ways(pair, [(2, 14, 2)] * 2) == ["", ""]
        assert "kv_b_proj is wrapped" in pair.decoder.prompts.why


def test_prompts_over_latents_after_capture(monkeypatch):
    """Compiled layers take none."""
    monkeypatch.undo()
    monkeypatch.setattr(prompt, "CAPTURED", SIZES)
    with first("minicpm3") as pair:
        pair.handle.capture(pair.handle.new_cache(2, 24))
        assert ways(pair, [(2, 14, 2)] * 3)[1:] == ["captured"] * 2


def test_one_graph_of_a_size_serves_other_weights_after_a_change():
    with first() as pair:
        second_is_captured(pair)
        pair.change(lambda model: setattr(model.model.layers[1].mlp, "act_fn", nn.GELU()))
        second_is_captured(pair)


def calls_of(monkeypatch, of, name):
    """The calls of a method from now on."""
    calls, method = [], getattr(of, name)

    def called(*args, **more):
        calls.append(args)
        return method(*args, **more)

    monkeypatch.setattr(of, name, called)
    return calls


def test_a_captured_prompt_looks_at_the_model_once_and_reads_its_mask_once(monkeypatch):
    """Once transformers has prepared its call. Before it starts it asks where the weights are."""
    with first() as pair:
        assert ways(pair, [(2, 14, 1)] * 3) == ["", "captured", "captured"]
        places = calls_of(monkeypatch, model_state.Glance, "in_place")
        looks = calls_of(monkeypatch, model_state.Glance, "same")
        walks = calls_of(monkeypatch, methods.Tree, "walk")
        moved = calls_of(monkeypatch, torch.Tensor, "to")
        for module in (methods, model_state):
            monkeypatch.delattr(module, "modules_in")
        generated(pair.model, 2, 14, 1)
        reads = [args for args in moved if args[1:] == ("cpu", torch.bool)]
        assert pair.took.prompt == "captured"
        assert [*map(len, (places, looks, walks, reads))] == [1, 1, 0, 1]


def test_each_chunk_of_a_prompt_looks_at_the_model(monkeypatch):
    """The model's own code runs in between."""
    with first() as pair:
        chunks = {"prefill_chunk_size": 7}
        assert ways(pair, [(2, 14, 1)] * 3) == ["", "captured", "captured"]
        looks = calls_of(monkeypatch, model_state.Glance, "same")
        pair.same(2, 14, 1, **chunks)
        assert len(looks) == 2


class Unchanged(LogitsProcessor):
    """Code of the caller's own: its call is not in a loop of ours."""

    def __call__(self, input_ids, scores):
        return scores


def test_a_loop_of_transformers_own_looks_again_before_its_prompt(monkeypatch):
    with first() as pair:
        assert ways(pair, [(2, 14, 1)] * 3) == ["", "captured", "captured"]
        looks = calls_of(monkeypatch, model_state.Glance, "same")
        generated(pair.model, 2, 14, 1, logits_processor=[Unchanged()])
        assert pair.took.prompt == "captured" and len(looks) == 2


def test_a_hook_that_changes_the_model_between_the_choice_of_its_cache_and_its_prompt():
    def replace(module, args):
        norm = module.model.norm
        norm.weight = nn.Parameter(-norm.weight.detach())

    with first() as pair:
        assert ways(pair, [(2, 14, 1)] * 3) == ["", "captured", "captured"]
        for model in (pair.model, pair.twin):
            model.register_forward_pre_hook(replace)
        for _ in range(3):
            assert torch.equal(*(generated(each, 2, 14, 1) for each in (pair.model, pair.twin)))


def test_facts_follow_the_model():
    """What a call asks about its model is kept as long as the model is as it was."""

    def train(model):
        model.model.layers[1].mlp.train()

    def switch(model):
        model.config._attn_implementation = "eager"

    with first() as pair:
        assert ways(pair, [(2, 14, 1)] * 3) == ["", "captured", "captured"]
        paged = pair.handle._paged
        before = paged._facts()
        assert paged._facts() is before and not before.training and not before.hooks
        hook = pair.model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
        assert [type(module).__name__ for module, _ in paged._facts().hooks] == ["LlamaMLP"]
        hook.remove()
        train(pair.model)
        assert pair.model.model.layers[1].mlp in paged._facts().training
        pair.model.eval()
        switch(pair.model)
        assert paged._facts().elsewhere == "eager"
        layers = pair.model.model.layers
        del layers[-1]
        assert "layers has" in paged._facts().relisted


def test_a_mask_that_a_hook_changes_is_read_again():
    """The host has read it when pages were chosen."""

    def spoil(module, args, given):
        given["attention_mask"][1, 6] = 0

    with first() as pair:
        assert ways(pair, [(2, 14, 1)] * 2) == ["", "captured"]
        changes = pair.model.register_forward_pre_hook(spoil, with_kwargs=True)
        with changes, pytest.raises(InvalidInput, match="zeros on the left"):
            generated(pair.model, 2, 14, 1)
        pair.same(2, 14, 1)


class Counts(nn.Module):
    """Counts its calls, which no graph would."""

    def __init__(self, act):
        super().__init__()
        self.act, self.calls = act, [0]

    def forward(self, x):
        self.calls[0] += 1
        return self.act(x)


def test_layers_that_change_are_never_captured():
    with first() as pair:
        for model in (pair.model, pair.twin):
            mlp = model.model.layers[0].mlp
            mlp.act_fn = Counts(mlp.act_fn)
        generated(pair.model, 2, 14, 1)  # the first call also tries the model
        calls = pair.model.model.layers[0].mlp.act_fn.calls
        for count in range(calls[0] + 1, calls[0] + 5):
            assert pair.same(2, 14, 1).prompt == "" and calls == [count]


class Toggles(nn.Module):
    """Changes an object that it only refers to, which decides how it computes."""

    def __init__(self, act):
        super().__init__()
        self.act, self.o = act, SimpleNamespace(x=False)

    def forward(self, x):
        if x.shape[1] > 1:
            self.o.x = not self.o.x
        return self.act(x) * (2 if self.o.x else 1)


@pytest.mark.filterwarnings("ignore::attnops.core.errors.NotFast")
def test_layers_that_change_what_they_refer_to():
    with first() as pair:
        for model in (pair.model, pair.twin):
            mlp = model.model.layers[0].mlp
            mlp.act_fn = Toggles(mlp.act_fn)
        # A capture is tried at the second call of one state, and runs the layers more than once.
        for _ in range(4):
            generated(pair.model, 2, 14, 1)
        assert "writes" in pair.decoder.aside
        for _ in range(4):
            pair.wanted.clear()
            for model in (pair.model, pair.twin):
                model.model.layers[0].mlp.act_fn.o.x = False
            assert pair.same(2, 14, 1).prompt == ""


def test_other_forms_of_a_result():
    """They are the model's own, call after call."""
    with first() as pair, torch.no_grad():
        ids = tokens(2, 14)

        def called(**more):
            return pair.model(ids, **named(pair.handle.new_cache(2, 14)), logits_to_keep=1, **more)

        assert [pair.same(2, 14, 1).prompt for _ in range(2)] == ["", "captured"]
        for _ in range(3):
            assert isinstance(called(return_dict=False), tuple)
            called(use_cache=False)
            assert "another form" in pair.decoder.prompts.why
        pair.model.config.output_hidden_states = True
        for _ in range(3):
            assert len(called().hidden_states) == 3


@pytest.mark.parametrize("error", [RuntimeError, InvalidInput])
def test_an_error_of_a_first_run_is_left_to_the_model(monkeypatch, error):
    """Of a later size too, and not as a failure of the compiler."""
    fails, real = [False], Program.run

    def run(program, *given):
        if fails[0]:
            raise error(*["a test's"] * (3 if error is InvalidInput else 1))
        return real(program, *given)

    monkeypatch.setattr(Program, "run", run)
    with first() as pair:
        assert ways(pair, [(2, 14, 1)] * 2) == ["", "captured"]
        fails[0] = True
        assert ways(pair, [(3, 20, 1)] * 3) == [""] * 3
        assert "a test's" in str(pair.handle.report())
        assert "layers" not in pair.decoder.prompts.failures.lasting


def test_a_failure_is_of_one_state():
    with first() as pair:
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(3):
                generated(pair.model, 2, 14, 1)
            assert "autocast" in pair.decoder.prompts.why
        assert ways(pair, [(2, 14, 1)] * 2) == ["", "captured"]


def test_a_budget_without_room():
    with first(budget_bytes=10, graphs=StandIn(need=lambda: 1000)) as pair:
        assert ways(pair, [(2, length, 1) for length in (14, 14, 13, 12, 11)]) == [""] * 5
        assert "budget" in pair.decoder.prompts.why
        recorded = len(pair.decoder._recorded.kinds)
        assert ways(pair, [(2, length, 1) for length in (10, 9)]) == [""] * 2
        assert len(pair.decoder._recorded.kinds) == recorded


class Numbered(LlamaMLP):
    def forward(self, x):
        return super().forward(x) * (1 + self.layer_idx)


def test_layers_that_cannot_be_recorded():
    """The model runs its prompts, and steps are captured as they are. The reason stands in the
    report."""
    model = tiny.model("llama")
    for number, layer in enumerate(model.model.layers):
        layer.mlp.layer_idx, layer.mlp.__class__ = number, Numbered
    with first(model) as pair:
        assert ways(pair, [(2, 14, 2)] * 3) == [""] * 3
        assert "LlamaDecoderLayer cannot be recorded" in str(pair.handle.report())
        assert str(pair.took) == "cache=paged, decode=breakable"
        found = pair.handle.graphs.report()
        assert "LlamaDecoderLayer cannot be recorded" in found.not_recorded and not found.recorded
        assert "runs as it is: LlamaDecoderLayer" in str(found)


@pytest.mark.filterwarnings("ignore::attnops.core.errors.NotFast")
def test_a_capture_that_fails_costs_one_prompt_its_graph():
    device = Failing(lambda: torch.OutOfMemoryError("CUDA out of memory"), 2)
    with first(graphs=device) as pair:
        assert ways(pair, [(2, 14, 1)] * 4) == ["", "", "captured", "captured"]
        assert device.tried == 2, "that of the sampler, and that of the second prompt"


def test_bits_that_follow_from_no_other_call():
    with first() as pair, attnops.use(deterministic=True):
        for _ in range(3):
            generated(pair.model, 2, 14, 1)
            assert "deterministic policy" in pair.decoder.prompts.why


def test_compiled_layers_take_over_after_capture(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(prompt, "CAPTURED", SIZES)
    with first() as pair:
        second_is_captured(pair)
        held = {mode for _, mode in pair.decoder._kept.over if "chunks" in mode}
        assert held == {"first chunks, recorded"}
        pair.handle.capture(pair.handle.new_cache(2, 24))
        assert pair.same(2, 40, 2).prompt == "compiled"
        pair.same(2, 14, 2)
        held = {mode for _, mode in pair.decoder._kept.over if "chunks" in mode}
        assert held == {"first chunks, compiled"}


def test_release_gives_graphs_back_and_forgets_why():
    with first() as pair:
        assert ways(pair, [(2, 14, 1)] * 2) == ["", "captured"]
        prompts = pair.decoder.prompts
        prompts.failures.note(prompts._failed_of(fresh=True), NotRegional("no reason"))
        assert pair.same(2, 14, 1).prompt == ""
        pair.handle.release()
        assert pair.decoder.captures.nbytes == 0
        assert ways(pair, [(2, 14, 1)] * 2) == ["", "captured"]


def test_a_change_while_another_thread_has_the_turn():
    """The call has looked at the model when its cache was chosen."""
    with first() as pair, ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            pair.same(2, 14, 6)
        began = threading.Event()
        real = pair.decoder.turn

        class Turn:
            """Says that a thread waits for it. A prompt that would start early does not wait."""

            def acquire(self, blocking=True):
                if blocking:
                    began.set()
                return real.acquire(blocking)

            def __getattr__(self, name):
                return getattr(real, name)

            def __enter__(self):
                return self.acquire()

            def __exit__(self, *_):
                real.release()

        real.acquire()
        pair.decoder.turn = Turn()
        call = pool.submit(generated, pair.model, 2, 14, 6)
        assert began.wait(60)
        for model in (pair.model, pair.twin):
            model.lm_head.weight = nn.Parameter(-model.lm_head.weight.detach())
        real.release()
        assert torch.equal(call.result(60), generated(pair.twin, 2, 14, 6))
