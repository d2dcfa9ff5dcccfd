"""`patch(model, cache="paged")`: its changes to a model, besides the attention function, and the
caches it makes.

Either every attention module that transformers' interface reaches caches latents, or none does and
those with a cache keep keys and values. Other layers may keep states of linear attention, but no
keys. Each module with pages gets a hook, and those with latents a method of the instance; the model
gets the method by which `generate()` makes its cache. `undo` removes all of them.
"""

from __future__ import annotations

import gc
import inspect
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers.modeling_outputs import CausalLMOutputWithPast

from attnops.adapters.replicas import place, take_back
from attnops.core.errors import AttnopsError, one_line
from attnops.core.kernel import check_kernel
from attnops.core.precompile import start
from attnops.core.problem import Problem
from attnops.core.record import need
from attnops.hf import not_fast
from attnops.hf.attention.over_pages import hand_over
from attnops.hf.cache import support as paged_models
from attnops.hf.cache.idle_pages import MOST_IDLE, Pool, give_back
from attnops.hf.cache.model_pages import ModelPages
from attnops.hf.cache.names import argument_of, cache_in, named, renamed
from attnops.hf.cache.other_layers import check_others, layers_with_states, layers_without_pages
from attnops.hf.cache.own_class import class_in_pages
from attnops.hf.cache.page_sizes import DRAFTS, Sizes
from attnops.hf.cache.paged_cache import PagedModelCache
from attnops.hf.cache.support import refuse_unless
from attnops.hf.cache.to_dynamic_cache import unpaged
from attnops.hf.generation import Generation, current_generation, running_generation
from attnops.hf.models.attention_modules import Match
from attnops.hf.models.latents import dims_of
from attnops.hf.models.methods import Method
from attnops.hf.models.states import StateSizes
from attnops.hf.private import PREPARE
from attnops.hf.steps import calls
from attnops.hf.steps.decode import Decoder
from attnops.hf.steps.decode_loop import Loop
from attnops.hf.steps.early import EarlyPrompts, lent
from attnops.hf.steps.hidden import noting
from attnops.hf.steps.model_facts import Facts, ModelFacts
from attnops.hf.steps.options import Decode, checked
from attnops.hf.steps.precompile import begin, under_way
from attnops.hf.steps.reasons import (
    Call,
    Reason,
    drafts,
    refuse_given,
    why_unpaged,
    why_unpaged_unasked,
)
from attnops.nn.absorb import HELD, expire
from attnops.nn.packed import Packed, pack_linears
from attnops.ops.pages.plan import latent_layers

# Not an attribute of a model, whose copies and pickles would hold it.
_MAKING = threading.Lock()


class PagedMode:
    """The changes of `cache="paged"` to a model. It holds data only, so that a deep copy of a
    patched model has one of its own.

    windows: the modules with pages, by layer, and for each the tokens that a query sees; 0: all.
    """

    def __init__(
        self,
        owner: Any,
        found: Match,
        kernel: str | None,
        implementation: str,
        decode: Decode,
        chosen: bool = False,
    ) -> None:
        """Inspect the modules, without changes. Raises PatchError, naming them, when the model
        cannot be served.

        chosen: pages were not asked for, and serve only calls that they make faster.
        """
        self._owner, self._config = owner, owner.config.get_text_config(decoder=True)
        self.kernel = kernel
        self.implementation = implementation
        self.decode = decode
        self.chosen = chosen
        self._graphed = decode.mode != "hf"
        modules = self._modules(found)
        if kernel is not None:
            check_kernel(kernel, ("mla_attention" if self.latents else "paged_attention",))
        self.layers: tuple[int, ...] = tuple(module.layer_idx for module in modules)
        refuse_unless(
            len({*self.layers}) == len(modules),
            f"got layers {list(self.layers)} of {type(owner).__name__}, want a layer_idx of its "
            "own in each module",
        )
        # Under the masks of some models blocks of tokens (of an image) see each other both ways.
        # Their code then names them.
        self.blocks = not self.latents and "block_sequence_ids" in inspect.getsource(
            sys.modules[type(owner).__module__]
        )
        windows = (
            (0,) * len(modules)
            if self.latents
            else paged_models.windows_of(owner, self._config, self.layers, self._graphed)
        )
        self.windows = dict(zip(modules, windows, strict=True))
        self._lists = paged_models.lists_of(owner, self.windows)
        check_others(owner, self._config, self.layers)
        if hasattr(owner, "generate"):
            paged_models.check_generate(owner)
        self.states: tuple[int, ...] = ()
        if self._graphed:
            device = paged_models.where(next(iter(self.windows)), owner)[0]
            self.states = layers_with_states(self._config)
            self.decode = checked(decode, owner, device, self.states, self.latents)
        self._decoder: Decoder | None = None
        self._forward: Method | None = None
        self.loop = Loop(decode.speculate, decode.pack)
        self.early = EarlyPrompts()
        self.packed: Packed | None = None
        self._changes: list[Method | RemovableHandle] = []
        self._pool: Pool | None = None
        self._looks: ModelFacts | None = None
        self._kept: tuple[tuple[Problem, ...], tuple[StateSizes, ...]] | None = None

    def _modules(self, found: Match) -> list[Any]:
        """The modules that have pages, by layer, of `latents` or of keys and values. Raises
        PatchError where one cannot be served."""
        sites = [site for site in found.sites if site.reason is None]
        self.latents = any(paged_models.is_latent(site.module) for site in sites)
        if not self.latents:
            sites = [site for site in sites if paged_models.takes_cache(site.module, causal=True)]
        reasons = paged_models.why_unsupported(
            self._owner, found, sites, self.latents, self._graphed
        )
        why = next(reasons, "")
        refuse_unless(not why, why)
        return sorted((site.module for site in sites), key=attrgetter("layer_idx"))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None, "_decoder": None, "_looks": None}

    def apply(self) -> None:
        """Set the hooks and the methods. Weights first, for whose copies there may be no memory."""
        owner, changes = self._owner, self._changes
        if paged_models.where(next(iter(self.windows)), owner)[0].type == "cuda":
            start()
        if self.decode.mode in ("auto", "piecewise") and self.decode.pack:
            self.packed = pack_linears(owner)
        if self.blocks:
            changes.append(
                owner.register_forward_pre_hook(paged_models.refuse_blocks, with_kwargs=True)
            )
        for module in self.windows:
            changes.append(module.register_forward_pre_hook(hand_over, with_kwargs=True))
            if self.latents:
                # A partial and not a bound method, which would be pickled as a name that the
                # module's class does not have.
                place(module, "expand_kv", partial(paged_models.let_through, module))
        if hasattr(owner, "generate"):
            changes.append(Method(owner, PREPARE, self.prepare))
        if self._graphed:
            self._forward = Method(owner, "forward", self.forward)
            changes.append(self._forward)

    def decoder(self) -> Decoder:
        """The graphs of decode steps, made at their first use."""
        with _MAKING:
            if self._decoder is None:
                assert self._forward is not None
                self._decoder = Decoder(
                    self._owner,
                    self.decode,
                    self._forward.original,
                    partial(self._over, filled=True),
                    self.loop.reads(self._owner),
                )
            return self._decoder

    @property
    def pool(self) -> Pool:
        """The pages that caches have left."""
        with _MAKING:
            if self._pool is None:
                self._pool = Pool(self._drop)
            return self._pool

    def _drop(self, pages: ModelPages) -> None:
        if self._decoder is not None:
            self._decoder.forget(pages)

    def notes(self) -> tuple[str, ...]:
        """The bytes of pages and graphs that later calls find, and notes on steps, for the
        report."""
        idle = 0 if self._pool is None else self._pool.idle_bytes
        graphs = 0
        of_steps = tuple[str, ...]()
        if self._decoder is not None:
            graphs = self._decoder.captures.nbytes + self.loop.nbytes
            of_steps = self._decoder.notes()
        return (
            f"{idle / 2**20:.1f} MiB of pages are kept for later calls, {graphs / 2**20:.1f} "
            f"MiB of graphs: at most {MOST_IDLE} sets of pages and an eighth of the GPU, until "
            "release()",
            *of_steps,
            *self.early.notes(),
        )

    def release(self) -> None:
        """Free idle pages, and every graph. Graphs that could not be made, as when memory was
        short, are tried again."""
        self.pool.clear()
        self.early.forget()
        self._free_graphs()

    def begin_anew(self) -> None:
        """Forget every graph, and the decoder that made them."""
        self._free_graphs()
        self._decoder = None

    def _free_graphs(self) -> None:
        if self._decoder is None:
            return self.loop.free()
        self._decoder.free()
        with self._decoder.turn:
            self.loop.free()

    def undo(self) -> None:
        """Take them away again."""
        for change in self._changes:
            change.remove()
        self._changes.clear()
        for module in self.windows:
            take_back(module, "expand_kv", vars(module).get("expand_kv"))
            for part in module.modules():
                part.__dict__.pop(HELD, None)
        compiled = self._decoder is not None and self._decoder.compiled
        self.begin_anew()
        if self._pool is not None:
            self._pool.end()
            self._pool = None
        if compiled:
            # A trace of Dynamo may leave cycles of objects behind, which hold the layers' weights.
            gc.collect()
        self.loop.undo()
        if self.packed is not None:
            self.packed.undo()
            self.packed = None

    def new_cache(self, rows: int, length: int, page_size: int | None = None) -> PagedModelCache:
        """A cache of exactly these sizes. Raises InvalidInput, PageSizeConflict,
        torch.OutOfMemoryError."""
        sizes = self._sizes(None, rows, length)
        return self.pool.lend(self._over, sizes, page_size, exact=True)

    def _over(self, pages: ModelPages, filled: bool = False) -> PagedModelCache:
        cache: PagedModelCache = class_in_pages(self._owner, self.latents)(
            pages,
            self.layers,
            partial(layers_without_pages, self._config, self.layers, self.states),
            filled,
            self.states,
        )
        if self._graphed:
            # transformers shall neither compile the step nor make the masks that a compiled one is
            # given.
            for layer in cache.layers:
                layer.is_compileable = False
        return cache

    def unpaged(self, cache: PagedModelCache) -> Any:
        """What `generate()` returns to a caller who did not ask for pages: transformers' own cache,
        or `cache` if memory is short."""
        try:
            made = unpaged(cache, self._config)
        except torch.OutOfMemoryError:
            return cache
        give_back(cache)
        return made

    def _model_facts(self) -> ModelFacts:
        if self._looks is None:
            self._looks = ModelFacts(self._owner, self.windows, self._lists, self.implementation)
        return self._looks

    def lend_early(self, rows: int, length: int, drafts: int) -> PagedModelCache:
        """A cache for a call that has yet to ask for it. Raises as `new_cache`."""
        return self.pool.lend(self._over, self._sizes(self._facts(), rows, length, drafts))

    def _facts(self) -> Facts:
        """What is true of the model now."""
        return self._model_facts().facts(None if self._decoder is None else self._decoder.glance)

    def _sizes(self, facts: Facts | None, rows: int, length: int, back: int = 0) -> Sizes:
        """back: positions of a step that may be taken back."""
        device, dtype = self._model_facts().place(facts)
        module = next(iter(self.windows))
        if self.latents:
            dims = dims_of(module)
            heads = getattr(module, "num_heads", None) or self._config.num_attention_heads
            layers = (latent_layers(heads, 0, dtype, dims.latent + dims.rope, dims.latent),) * len(
                self.layers
            )
            return Sizes(rows, length, layers, device, self.kernel, fixed=self._graphed)
        if self._kept is None or self._kept[0][0].dtype != dtype:
            self._kept = paged_models.probe(
                self._owner, self._config, self.windows, dtype, self.states
            )
        layers, states = self._kept
        back = max(DRAFTS, back)
        return Sizes(rows, length, layers, device, self.kernel, back, self._graphed, states)

    def forward(self, method: Method, *args: Any, **kwargs: Any) -> Any:
        """The forward of the model: graphs for the decode steps of its `generate()`, compiled
        layers for prompts, else the model's own."""
        if torch.compiler.is_compiling():
            return method.original(*args, **kwargs)
        kwargs = renamed(kwargs, argument_of(self._owner))
        decoder, cache = self.decoder(), cache_in(kwargs)
        if isinstance(cache, PagedModelCache):
            cache.state.use()
        generation = None if args or torch.is_grad_enabled() else current_generation()
        goes_on = generation is not None and generation.goes_on(kwargs.get("attention_mask"))
        if generation is not None and goes_on:
            generation.stepped = True
            logits = self._step(decoder, cache, generation, kwargs)
            if logits is not None:
                generation.graphs = decoder.last_mode
                return CausalLMOutputWithPast(logits=cast(Any, logits), **named(cache))
        given = {"input_ids": args[0], **kwargs} if len(args) == 1 else kwargs
        # Of one token a row, only the first call of a generate() is known to be a prompt.
        least = 1 if generation is not None and generation.checked is None else 2
        logits = decoder.try_prompt(given) if calls.is_prompt(given, least) else None
        if logits is None:
            decoder.look = True
            if isinstance(cache, PagedModelCache):
                cache.state.follow_early()
                may_have_graphs = decoder.how.mode == "auto" and not decoder.aside
                cache.state.waits = may_have_graphs and under_way()
            forward = method.original
            if generation is not None and generation.hidden is not None:
                forward = noting(decoder.forward, cache.state.pages, generation.hidden)
            out = forward(*args, **kwargs)
            decoder.prompts.begin(decoder.turn)
            return out
        if generation is not None:
            generation.layers = decoder.prompts.took
        return CausalLMOutputWithPast(logits=cast(Any, logits), **named(cache))

    def _step(
        self, decoder: Decoder, cache: Any, generation: Generation, kwargs: dict[str, Any]
    ) -> Tensor | None:
        """The logits of a step in graphs; None for another call, or where the model's own forward
        is to run it."""
        logits = None
        if calls.serves(kwargs, cache) and generation.checked is cache.state.pages.pad:
            asked = calls.StepInputs(kwargs["input_ids"], kwargs.get("position_ids"))
            out = decoder.try_step(asked, cache)
            logits = None if out is None else out.logits
        # Not a prompt of one token without padding, of which transformers 5.23 hands no mask on.
        if logits is None and generation.checked is not None and calls.could_serve(kwargs, cache):
            decoder.plain_steps += 1
            calls.warn_of(self._owner, calls.more(kwargs))
        return logits

    def prepare(
        self,
        method: Method,
        generation_config: Any,
        model_kwargs: Any,
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        """`_prepare_cache_for_generation` of the model: a paged cache, where transformers would
        have made one of its own choice."""
        given = cache_in(model_kwargs)
        generation = running_generation()
        mask = model_kwargs.get("attention_mask")
        if generation is not None and mask is not None:
            generation.prompt = mask.shape[1]
        facts = self._facts()
        call = Call(
            self._owner,
            generation_config,
            generation_mode,
            model_kwargs,
            facts.elsewhere,
            self.blocks,
            facts.hooks,
            facts.training,
        )
        rows, passed = batch_size * call.copies, isinstance(given, PagedModelCache)
        relisted = self._relisted(facts, passed)
        if passed:
            refuse_given(call, given, (rows, max_cache_length), self._graphed)
        self._expire()
        reasons = [Reason(relisted)] if relisted else [*self._reasons(call, rows)]
        cache = None if reasons else self._lent(call, facts, rows, max_cache_length, reasons)
        if generation is not None:
            generation.note_cache(
                cache, "" if passed else "; ".join(reason.why for reason in reasons)
            )
        if cache is None:
            if given is None:
                self._warn(reasons)
            return method.original(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
        model_kwargs.update(named(cache))
        prompt = 1 if mask is None else mask.shape[1]
        steps = self.decode.mode == "auto" and max_cache_length > prompt
        record = partial(self.decoder().begin, cache.state, rows) if steps else None
        begin(self._owner, cache.state.pages, self._over, rows, prompt, record)
        return None

    def _expire(self) -> None:
        """Forget absorbed weights: a prompt that goes on with a cache may be one token, which no
        layer can tell from a step."""
        if self.latents:
            for module in self.windows:
                expire(module.kv_b_proj)

    def _relisted(self, facts: Facts, passed: bool) -> str:
        """Which list of layers has others than at patch(); "" for none. Raises InvalidInput where
        pages were asked for or passed."""
        taken = passed or not self.chosen
        need(
            not (facts.relisted and taken),
            "layers",
            facts.relisted,
            "as many as the pages have; after a change call unpatch(), then patch()",
        )
        return facts.relisted

    def _lent(
        self, call: Call, facts: Facts, rows: int, length: int, reasons: list[Reason]
    ) -> PagedModelCache | None:
        """A cache for a call, of these sizes at least; None, and one reason more, where there is
        none.

        `give_back` takes its pages back, else they come back when the cache is dropped, as one is
        that `generate()` returned to its caller.
        """
        past, back = drafts(call)
        try:
            return lent(self._sizes(facts, rows, length + past, back), self.pool, self._over)
        except torch.OutOfMemoryError as error:
            why = f"there is no memory for pages ({one_line(error)})"
            reasons.append(Reason(why, told=True, chosen=False))
        except AttnopsError as error:
            if not self.chosen:
                raise
            reasons.append(Reason(f"pages cannot be made: {one_line(error)}", chosen=False))
        return None

    def _warn(self, reasons: Sequence[Reason]) -> None:
        """Warn of pages that a call does not get, where the caller may not know."""
        if self.chosen:
            if reasons and not any(reason.chosen for reason in reasons):
                not_fast.warn(
                    self._owner, not_fast.PAGES, "; ".join(reason.why for reason in reasons)
                )
            return
        for reason in reasons:
            if reason.told:
                text = (
                    f"attnops: {reason.why}, so generate() uses transformers' own cache and "
                    "not pages"
                )
                warnings.warn(text, stacklevel=5)

    def _reasons(self, call: Call, rows: int) -> Iterator[Reason]:
        """Why this `generate()`, of a batch of so many rows, gets no pages of ours."""
        yield from why_unpaged(call, self.kernel)
        if self.states and call.assisted:
            yield Reason("drafts are taken back, and states of linear attention cannot be")
        if self.chosen:
            yield from why_unpaged_unasked(call, self._forward)
            if self._decoder is not None and (failed := self._decoder.why_not(rows)):
                # The call whose graphs failed has warned.
                yield Reason(f"graphs cannot be made: {failed}")
