"""`patch(model)` without options: pages and graphs where the device and the call allow,
transformers' own way with a reason elsewhere."""

import copy
import functools
import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache

import attnops
from attnops.core.errors import NotFast, PatchError
from attnops.core.select import active_policy
from attnops.hf import Took, page_model as paged, tiny
from attnops.hf.cache import idle_pages as pool, to_dynamic_cache
from attnops.hf.cache.names import NAME, cache_of, named
from attnops.hf.steps import captures as states, graphed_steps as steps
from tests.hf.decoding import asked, auto, beside, first, generated
from tests.hf.helpers import LIMIT, relative

CALL = (2, 9, 6)
CAPTURED = Took("paged", "breakable")


def test_on_a_cpu_nothing_but_attention_changes():
    model = tiny.model("llama")
    want = generated(model, *CALL)
    with attnops.patch(model) as handle:
        assert handle.took is None and "the first generate() chooses" in str(handle.report())
        assert torch.equal(generated(model, *CALL), want)
        assert handle.took == Took(
            "hf", "hf", "the model is on cpu: pages and graphs are for a GPU"
        )
        assert "the model is on cpu" in str(handle.report()) and "forward" not in vars(model)
        for use in (
            lambda: handle.new_cache(1, 8),
            lambda: handle.step(torch.zeros(1, 1, dtype=torch.int64), None),
        ):
            with pytest.raises(PatchError, match="the model is on cpu"):
                use()


def spoilt(**more):
    ids, given = asked(*CALL)
    return ids, {**given, **more}


def holes():
    ids, given = asked(*CALL)
    given["attention_mask"][1, 4] = 0
    return ids, given


def of_two_dtypes(model):
    """A layer in float64, whose keys pages of float32 do not hold."""
    layer = model.model.layers[1].self_attn.double()

    own = layer.forward

    def widened(hidden_states, position_embeddings, **more):
        out = own(
            hidden_states.double(),
            position_embeddings=[x.double() for x in position_embeddings],
            **more,
        )
        return out[0].float(), *out[1:]

    layer.forward = widened
    return asked(*CALL)


def in_training(model):
    model.train()
    return asked(*CALL)


def preparing(model):
    """As PEFT does for prompts that are learnt, which brings more positions."""
    model.prepare_inputs_for_generation = model.prepare_inputs_for_generation
    return asked(*CALL)


def dropping(part):
    """A sampled call of a model. One part of it is in training mode, with dropout."""

    def spoil(model):
        layer = model.model.layers[1]
        layer.self_attn.attention_dropout = 0.4
        layer.mlp.act_fn = torch.nn.Sequential(layer.mlp.act_fn, torch.nn.Dropout(0.4)).eval()
        layer.get_submodule(part).train()
        torch.manual_seed(3)
        return spoilt(do_sample=True)

    return spoil


REASONS = {
    "the caller passed a cache": lambda model: spoilt(**named(DynamicCache(config=model.config))),
    "the model is in training mode": in_training,
    "dropout is on in LlamaAttention": dropping("self_attn"),
    "dropout is on in Dropout": dropping("mlp"),
    "the attention_mask has zeros": lambda model: holes(),
    "want one dtype and one device": of_two_dtypes,
    "positions of its own": preparing,
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("why", REASONS)
def test_calls_that_run_as_stock_say_why(why, recwarn):
    model = tiny.model("llama")
    ids, given = REASONS[why](model)
    want = model.generate(ids, **given)
    drawn = torch.get_rng_state()
    if NAME in given or given["do_sample"]:
        model = model if NAME in given else tiny.model("llama")
        ids, given = REASONS[why](model)
    recwarn.clear()
    with attnops.patch(model, decode=auto()) as handle:
        assert torch.equal(model.generate(ids, **given), want)
        assert handle.took.cache == handle.took.decode == "hf" and why in handle.took.why
        assert not given["do_sample"] or torch.equal(torch.get_rng_state(), drawn), (
            "as many random numbers as without attnops"
        )
        chosen = why != "want one dtype and one device"
        told = [w.category for w in recwarn if "attnops" in str(w.message)]
        assert told == ([] if chosen else [NotFast]), "the caller chose the rest"
        model.eval()
        if chosen and why != "positions of its own":  # which is the model's, and stays
            generated(model, *CALL)
            assert handle.took == CAPTURED


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("name", "spoil", "why", "chosen"),
    [
        ("t5", lambda model: None, "encoder-decoder", False),
        ("kimi_linear", lambda model: None, "which a cache of latents cannot have", False),
        (
            "llama",
            lambda model: setattr(model, "forward", model.forward),
            "forward was replaced or compiled",
            True,
        ),
        (
            "llama",
            lambda model: model.compile(backend="eager"),
            "forward was replaced or compiled",
            True,
        ),
    ],
)
def test_models_that_run_as_stock_say_why(name, spoil, why, chosen):
    model = tiny.model(name, **({"num_hidden_layers": 1} if name == "llama" else {}))
    spoil(model)
    ids = torch.full((1, 6), 5)
    told = (
        nullcontext()
        if chosen
        else pytest.warns(NotFast, match=f"{type(model).__name__} has no pages.*{why}")
    )
    # A compiled forward is told by its name; to trace it says no more.
    compiled = model._compiled_call_impl is not None
    eagerly = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
    with eagerly, attnops.patch(model, decode=auto()) as handle:
        with told:
            model.generate(ids, max_new_tokens=3, do_sample=False)
        model.generate(ids, max_new_tokens=3, do_sample=False)  # a second warning would be an error
        assert (
            (handle.took.cache, handle.took.decode) == ("hf", "hf")
            and why in handle.took.why
            and why in str(handle.report())
        )


@pytest.mark.usefixtures("own_prompts")
def test_a_forward_that_is_replaced_after_the_first_call():
    with first() as pair:
        pair.same(*CALL)
        calls, before = [], pair.model.forward
        pair.model.forward = lambda *given, **more: calls.append(1) or before(*given, **more)
        took = pair.same(*CALL)
        assert len(calls) == CALL[2] and (took.cache, took.decode) == ("hf", "hf")
        assert "forward was replaced" in took.why
        pair.model.forward = before
        assert pair.same(*CALL) == CAPTURED


def test_what_no_pages_or_graphs_had_a_part_in():
    """A generate() that another model's answers, and one without a step after the prompt."""
    model = tiny.model("llama")

    class Around(type(model)):
        def generate(self, *given, **more):
            return model.generate(*given, **more)

    around = Around(model.config).eval()
    want = generated(model, *CALL)
    with attnops.patch(around, decode=auto()) as handle:
        with pytest.warns(NotFast, match="Around has no pages.*made no cache"):
            assert torch.equal(generated(around, *CALL), want)
        assert handle.took == Took("hf", "hf", "generate() made no cache for this model")
    with attnops.patch(model, decode=auto()) as handle:
        generated(model, 2, 9, 1)
        assert handle.took == Took("paged", "") and str(handle.took) == "cache=paged"
        generated(model, 2, 9, 3, output_hidden_states=True, return_dict_in_generate=True)
        assert handle.took.decode == "hf" and "output_hidden_states" in handle.took.why


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("name", "length"), [("llama", 9), ("gemma3", 9), ("deepseek_v3", 9), ("mimo_v2_flash", 70)]
)
def test_a_returned_cache_is_transformers_own(name, length, small_pages, monkeypatch):
    """Padding on the left, texts longer than windows, and than their pages, whose first one is then
    in the middle of the window; a second turn, which is longer than the first one's pages."""
    model = tiny.model(name)
    if name == "gemma3":
        monkeypatch.setattr(to_dynamic_cache, "TOGETHER", 1)

    def turns():
        ids, given = asked(3, length, 9)
        first = model.generate(ids, return_dict_in_generate=True, **given)
        kept = copy.deepcopy(cache_of(first))
        text = torch.cat([first.sequences, ids], 1)
        given["attention_mask"] = torch.cat(
            [given["attention_mask"], torch.ones(3, length + 9, dtype=torch.int64)], 1
        )
        return (
            kept,
            given["attention_mask"],
            model.generate(text, **named(cache_of(first)), **given),
        )

    want, mask, tokens = turns()
    with attnops.patch(model, decode=auto()) as handle:
        if length > 9:
            generated(model, 3, length + 35, 9)
        got, _, ours = turns()
        assert torch.equal(ours, tokens) and handle.took == Took(
            "hf", "hf", "the caller passed a cache"
        )
        assert len(handle._paged.pool._idle) == 1, "its pages serve the next call"
    assert type(got) is type(want) and got.get_seq_length() == want.get_seq_length()
    for mine, theirs in zip(got.layers, want.layers, strict=True):
        assert type(mine) is type(theirs) and mine.get_seq_length() == theirs.get_seq_length()
        seen = mask[
            :, theirs.get_seq_length() - theirs.keys.shape[2] : theirs.get_seq_length(), None
        ].bool()
        for x, y in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            assert (
                x.shape == y.shape
                and relative(*(z.transpose(1, 2).flatten(2) * seen for z in (x, y))) < LIMIT
            )
            assert not (x.transpose(1, 2).flatten(2) * ~seen).any(), "padding is zero"


class Calls(TorchFunctionMode):
    """Notes the functions of torch that are called within the block."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


def test_more_layers_are_returned_by_as_many_calls():
    """But for one copy more of the keys, and of the values."""

    def calls(layers):
        model = tiny.model("llama", num_hidden_layers=layers)
        with torch.no_grad(), attnops.patch(model, cache="paged") as handle:
            cache = handle.new_cache(2, 20)
            model(torch.full((2, 9), 5), **named(cache))
            with Calls() as found:
                to_dynamic_cache.unpaged(cache, model.config)
        return [name for name in found.names if name != "__get__"]  # no attributes

    few, many = calls(2), calls(6)
    assert many.count("clone") == few.count("clone") + 2 * 4
    assert [name for name in many if name != "clone"] == [name for name in few if name != "clone"]


def test_a_write_to_a_returned_layer_spoils_no_gradient():
    """Layers are filled together, and are tensors of their own to autograd."""
    model = tiny.model("llama")
    with attnops.patch(model, decode=auto()):
        found = generated(model, *CALL, return_dict_in_generate=True)
    first, second = cache_of(found).layers
    scale = torch.ones(second.keys.shape[-1], requires_grad=True)
    loss = (second.keys * scale).sum()
    first.keys.zero_()
    first.values.mul_(scale)
    loss.backward()


def test_another_default_device():
    model = tiny.model("llama")
    with attnops.patch(model, decode=auto()) as handle, torch.device("meta"):
        generated_on = model.generate(
            torch.full((2, 9), 5, device="cpu"), max_new_tokens=3, do_sample=False
        )
        assert handle.took.cache == "paged"
    assert torch.equal(
        generated_on, model.generate(torch.full((2, 9), 5), max_new_tokens=3, do_sample=False)
    )


def test_graphs_that_cannot_be_made(monkeypatch):
    """Compiled ones leave breakable ones; without any, the call ends without graphs, and the next
    one is stock."""
    broken, why = {"piecewise"}, "RuntimeError: no breakable here"
    for mode, name in (("piecewise", "PerLayer"), ("breakable", "breakable")):
        real = getattr(steps, name)

        def failing(*given, mode=mode, real=real, **more):
            if mode in broken:
                raise RuntimeError(f"no {mode} here")
            return real(*given, **more)

        monkeypatch.setattr(steps, name, failing)
    with beside(mode="auto", compile_after=4) as pair:
        with pytest.warns(
            NotFast, match="LlamaForCausalLM has no compiled CUDA graphs.*no piecewise here"
        ):
            assert pair.same(*CALL) == Took("paged", "breakable", "RuntimeError: no piecewise here")
        assert pair.handle.plain_steps == 0
    broken.add("breakable")
    with beside(mode="auto", compile_after=8) as pair:
        with pytest.warns(
            NotFast, match="LlamaForCausalLM has no CUDA graphs.*no breakable here"
        ) as told:
            assert pair.same(*CALL) == Took("paged", "hf", why)
        assert [w.filename for w in told] == [generated.__code__.co_filename], (
            "the place is the caller's"
        )
        assert pair.handle.plain_steps == CALL[2] - 1
        assert pair.same(*CALL) == Took("hf", "hf", f"graphs cannot be made: {why}")
        broken.clear()
        pair.handle.release()
        assert pair.same(*CALL) == CAPTURED
        broken.add("breakable")
    with beside(compile_after=8) as pair, pytest.raises(RuntimeError, match="no breakable"):
        pair.same(*CALL)


def test_memory_that_is_short(monkeypatch):
    monkeypatch.setattr(
        paged,
        "pack_linears",
        lambda model: (_ for _ in ()).throw(torch.OutOfMemoryError("a test's")),
    )
    with beside(mode="auto") as pair:
        with pytest.warns(NotFast, match="no pages.*a test's"):
            took = pair.same(*CALL)
        assert took.cache == "hf" and "a test's" in took.why


def test_idle_pages_are_bounded(monkeypatch):
    """By their bytes, and after an error for which memory was short none is left."""
    bound = [float("inf")]
    monkeypatch.setattr(pool, "most_idle_bytes", lambda device: bound[0])
    with first() as pair:
        model, handle = pair.model, pair.handle
        generated(model, *CALL)
        held = handle._paged.pool.idle_bytes
        assert held > 0
        bound[0] = held - 1
        generated(model, *CALL)
        assert handle._paged.pool.idle_bytes == 0 and not handle._paged.decoder()._kept.over
        bound[0] = held
        generated(model, *CALL)
        assert handle._paged.pool.idle_bytes == held

        def short(input_ids, scores):
            raise torch.OutOfMemoryError("a test's")

        with pytest.raises(torch.OutOfMemoryError):
            generated(model, 20, 9, 4, logits_processor=[short])
        assert handle._paged.pool.idle_bytes <= 0
        pair.same(*CALL)


def test_options_narrow_and_force():
    model = tiny.model("llama")
    for given, took in (
        ({"cache": "hf"}, Took("hf", "hf")),
        ({"decode": "hf"}, Took("hf", "hf")),
        ({"cache": "paged"}, Took("paged", "hf")),
        ({"cache": "paged", "decode": auto()}, CAPTURED),
        ({"decode": auto(mode="breakable")}, CAPTURED),
        ({"cache": "hf", "decode": auto()}, Took("hf", "hf")),
    ):
        with attnops.patch(model, **given) as handle:
            generated(model, 2, 9, 3)
            assert handle.took == took, given


@pytest.mark.sweep(3)
@pytest.mark.parametrize("mode", ["breakable", "piecewise"])
@pytest.mark.parametrize("way", ["unpatched", "released", "deleted"])
def test_memory_is_given_back(way, mode):
    model = tiny.model("llama")
    handle = attnops.patch(model, decode=auto(compile_after=0 if mode == "piecewise" else 99))
    generated(model, *CALL)
    generated(model, *CALL)
    assert handle.took == Took("paged", mode, prompt="captured")
    every = handle._paged.decoder()._kept.over.values()
    assert len(every) == 2, "of steps and of prompts"
    held = [
        weakref.ref(t)
        for over in every
        for t in (over, *over.cache.state.pages.pools, over.cache.state.pages)
    ]
    graphs = handle.decode.graphs.graphs
    assert all(ref() is not None for ref in held) and any(graph.alive for graph in graphs)
    assert "MiB of pages are kept" in str(handle.report())
    del every
    if way == "unpatched":
        handle.unpatch()
    elif way == "released":
        handle.release()
    else:
        del model, handle
    gc.collect()
    assert not any(ref() is not None for ref in held)
    assert way == "deleted" or not any(graph.alive for graph in graphs)


@pytest.mark.usefixtures("own_prompts")
def test_each_kind_of_step_begins_without_a_compiler():
    """One row and several share no compiled code, nor do policies: a change costs a capture, and
    compilation comes after as many steps."""
    one, four, modes = (1, 9, 6), (4, 9, 6), []
    with beside(mode="auto", compile_after=8) as pair:
        for call in (
            four,
            four,
            four,
            one,
            four,
            one,
            one,
            four,
        ):  # five steps each, all over the pages of four rows
            modes.append(pair.same(*call).decode[0])
            told = str(pair.handle.report())
            if len(modes) == 1:
                assert "steps of more rows run without a compiler, 5 so far; they are" in told
                assert "compiled after 8, or by capture()" in told and "one row" not in told
        assert "".join(modes) == "bppbpppp"
        assert "steps of more rows are compiled" in told and "steps of one row are compiled" in told
        kept = pair.decoder._kept.over
        with attnops.use(deterministic=True):
            assert pair.same(*four).decode == "breakable"
        assert pair.same(*four).decode == "piecewise"
        assert pair.decoder._kept.over is kept, "the graphs from before are replayed"
        assert {mode for _, mode in kept} == {"piecewise"}, (
            "breakable ones are freed when no kind of step needs them"
        )


def test_steps_of_many_states_in_turn_are_compiled(monkeypatch):
    """Graphs of one state are kept, and the numbers of steps of more."""
    monkeypatch.setattr(states, "most_graph_bytes", lambda device: 0)
    model, modes = tiny.model("llama"), []
    with attnops.patch(model, decode=auto()) as handle:
        for policy in (None, "reference", {"paged_attention": "reference"}) * 3:  # five steps each
            with attnops.use(policy):
                generated(model, 2, 9, 6)
            modes.append(handle.took.decode[0])
    assert "".join(modes) == "bbbpppppp"


@pytest.mark.usefixtures("own_prompts")
def test_graphs_of_one_kind_of_step_that_cannot_be_made(monkeypatch):
    """Steps of several rows, and those of another policy, have graphs all the same."""
    why = "RuntimeError: no graph of one row"
    real, in_layers = steps.breakable, steps.layered

    def failing(step):
        @functools.wraps(step)
        def checked(input_ids, *args, **kwargs):
            if input_ids.shape[0] == 1 and not active_policy():
                raise RuntimeError("no graph of one row")
            return step(input_ids, *args, **kwargs)

        return checked

    monkeypatch.setattr(
        steps, "breakable", lambda step, *a, **more: real(failing(step), *a, **more)
    )
    monkeypatch.setattr(steps, "layered", lambda *given: failing(in_layers(*given)))
    one, two = (1, 9, 3), (2, 9, 3)
    with beside(mode="auto", compile_after=8) as pair:
        with pytest.warns(NotFast, match="no graph of one row"):
            assert pair.same(*one) == Took("paged", "hf", why)
        assert pair.same(*two) == CAPTURED
        assert pair.same(*one) == Took("hf", "hf", f"graphs cannot be made: {why}")
        assert pair.same(*two) == CAPTURED
        assert (
            f"decode steps of one row have no breakable graphs until release(): {why}"
            in pair.handle.report().notes
        )
        with attnops.use(deny=("flex",)):
            assert pair.same(*one) == CAPTURED
        assert pair.handle.plain_steps == one[2] - 1
