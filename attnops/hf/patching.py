"""`patch(model)`: switch a model's attention to attnops, and back."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from attnops.adapters.handle import MARK, PATCHING, Handle, refuse_nothing, refuse_other_options
from attnops.adapters.replicas import place, take_back
from attnops.adapters.report import PATCHED, Row, Verification
from attnops.core import builds
from attnops.core.errors import PatchError, UnknownKernel, fail, one_line
from attnops.core.record import need
from attnops.graphs import Graphed, Report as GraphReport
from attnops.graphs.graphed import Progress
from attnops.hf import batching, not_fast
from attnops.hf.attention.config_weights import let_configs_ask
from attnops.hf.attention.mask import Mode
from attnops.hf.cache import support as paged_models
from attnops.hf.cache.paged_cache import PagedModelCache
from attnops.hf.generate import NO_CACHE, generate
from attnops.hf.generation import Generation, is_generating, note, watch
from attnops.hf.interface import Kept, Options, implementation
from attnops.hf.mask_trials import served
from attnops.hf.models.attention_modules import Match, match
from attnops.hf.models.experts import Experts
from attnops.hf.models.methods import Method
from attnops.hf.models.recurrent import Recurrent
from attnops.hf.models.rotations import Rotations
from attnops.hf.models.routers import Routers
from attnops.hf.models.rows import Rows
from attnops.hf.page_model import PagedMode
from attnops.hf.report import UNSETTLED, Report, Took, attending, notes_of, said, switch
from attnops.hf.steps import mtp
from attnops.hf.steps.decode import Decoder
from attnops.hf.steps.options import Decode
from attnops.hf.steps.reasons import callers_choice
from attnops.hf.steps.speculate import Speculate, resolved
from attnops.nn import MTPLayer
from attnops.tried import warn_if_newer

_SETTLING = threading.Lock()
_OPTIONS = "_attnops_options"


class Patched(Handle):
    """A patched model, and the way back. Made by `patch`; also a context manager that unpatches at
    its end.

    It holds data only, so a deep copy of a patched model is patched and has a handle of its own.
    """

    def __init__(
        self, model: nn.Module, owner: Any, asked: Options, decode: Decode, found: Match
    ) -> None:
        self._options, self._proof = served(owner, found, asked)
        self._held, self.asked, self.decode = model, asked, decode
        self.implementation, self._found = implementation(self._options), found
        self._owner: Any = owner  # None after `unpatch()`
        self._paged: PagedMode | None = None
        self._settled: tuple[bool, str] | None = None
        self._took: Took | None = None
        self._why = UNSETTLED
        self._lost: not_fast.Loss | None = None
        self._last: Report | None = None
        if _forced(asked, decode):
            self._settle()
        self._switched = [
            (config, config._attn_implementation_internal) for config in found.configs
        ]
        switch(found.configs, self.implementation)
        let_configs_ask(found.configs)
        ahead = decode.speculate
        self._ahead = ahead if isinstance(ahead, MTPLayer) else None
        self._parts = _parts_of(model, self._ahead)
        # Each module may be pickled without the rest of the model, and options register themselves
        # where they are loaded.
        switched = {id(config) for config in found.configs}
        self._marked = [
            module for module in owner.modules() if id(getattr(module, "config", None)) in switched
        ]
        for module in self._marked:
            module.__dict__[_OPTIONS] = self._options
        place(owner, MARK, self)
        self._watching: list[Method | RemovableHandle] = [
            owner.register_forward_pre_hook(note, with_kwargs=True)
        ]
        # The masks of generate() only grow, so that most of its steps need no check.
        if hasattr(owner, "generate"):
            self._watching += [Method(owner, "generate", generate), *watch(owner)]
        if hasattr(owner, batching.ENTRY):
            self._watching.append(Method(owner, batching.ENTRY, batching.begin))
        self.active = True
        self._tell()

    def _settle(self) -> None:
        """Take the pages and graphs that the options and the device of the weights allow. Raises
        PatchError if pages are asked for."""
        how, forced = self.decode, _forced(self.asked, self.decode)
        device = self._owner.device.type
        fast = how.graphs is not None or device == "cuda"
        mode = how.mode if fast or how.mode != "auto" else "hf"
        pages = forced or (self.asked.cache == "auto" and mode == "auto")
        with _SETTLING:
            if (pages, mode) == self._settled:
                return
            if self._paged is not None:
                self._paged.undo()
            self._paged, self._settled, self._why, self._lost = None, (pages, mode), "", None
            if pages:
                self._take(replace(how, mode=mode), forced)
            elif self.asked.cache == "auto" and how.mode == "auto":
                self._why = f"the model is on {device}: pages and graphs are for a GPU"

    def _take(self, how: Decode, forced: bool) -> None:
        """Take pages and graphs, or note why the model has none. Raises PatchError and others if
        they are asked for."""
        if not forced and (why := callers_choice(self._owner, self.asked.mask)):
            self._why = why
            return
        try:
            self._page(how)
        except (PatchError, UnknownKernel, torch.OutOfMemoryError) as error:
            if forced and how.mode != "auto":
                raise
            why = one_line(error).removeprefix("PatchError: ").removeprefix("patch: ")
            self._why = why
            if forced:
                self._page(replace(how, mode="hf"))
            # The caller chose the kernel.
            if not isinstance(error, UnknownKernel):
                self._lost = not_fast.GRAPHS if forced else not_fast.PAGES

    def _tell(self) -> None:
        """Warn of what the model does not get."""
        if self._lost is not None:
            not_fast.warn(self._owner, self._lost, self._why)

    def _page(self, how: Decode) -> None:
        chosen = not _forced(self.asked, self.decode)
        if chosen and self._options.mask == "additive":
            fail(PatchError, "the model needs additive masks, and pages take none")
        paged = PagedMode(
            self._owner, self._found, self._options.kernel, self.implementation, how, chosen
        )
        paged.apply()
        self._paged = paged

    def unpatch(self) -> None:
        """Give the model back as it was. A config that was switched to something else since then is
        left at that. Idempotent.

        Caches of `new_cache` are of no more use. Raises PatchError within a `generate()` of the
        model, as in a streamer.
        """
        with PATCHING:
            if not self.active:
                return
            if is_generating(self._owner):
                got = (
                    f"{type(self._owner).__name__} within a call of its generate(), as in a "
                    "streamer or a logits processor"
                )
                fail(
                    PatchError, f"unpatch: got {got}; want unpatch() after generate() has returned"
                )
            self._undo()

    def _layer_ahead(self) -> MTPLayer:
        """The layer of the model that drafts: that of its checkpoint, loaded at the first call,
        where `speculate=` named none. Raises PatchError."""
        with PATCHING:
            if self._ahead is None:
                ahead = resolved(mtp.OPTION, self._owner)
                for part in self._parts:
                    part.undo()
                self._ahead, self._parts = ahead, _parts_of(self.model, ahead)
            return self._ahead

    def _undo(self) -> None:
        for config, before in self._switched:
            if config._attn_implementation_internal in batching.names_of(self):
                switch((config,), before)
        for module in self._marked:
            module.__dict__.pop(_OPTIONS, None)
        take_back(self._owner, MARK, self)
        for part in self._parts:
            part.undo()
        if self._ahead is not None:
            mtp.take_back(self._ahead)
        if self._paged is not None:
            self._paged.undo()
        for each in self._watching:
            each.remove()
        self.active = False
        self._last = self._report()
        self._let_go()

    def _let_go(self) -> None:
        super()._let_go()
        self._owner, self._paged, self._parts, self._marked = None, None, (), []
        self._ahead = None
        self._found = replace(self._found, sites=[], configs=[])
        self._watching.clear()
        self._switched.clear()

    def report(self) -> Report:
        """Every attention module with its status, and how `generate()` runs. `print` it, give it to
        rich, or take `Report.to_dict()`.

        After `unpatch()` it is that of the moment of `unpatch()`.
        """
        return self._last or self._report()

    def _report(self) -> Report:
        options = self._options
        rows = list[Row]()
        others = {id(config): name for config, name in self._others()}
        for site in self._found.sites:
            phases = paged_models.phases(
                site.module, None if self._paged is None else self._paged.windows.get(site.module)
            )
            other = others.get(id(getattr(site.module, "config", None)))
            reason = site.reason or (other and f"its attention was set to {other!r} after patch()")
            told = (f"skipped: {reason}", "") if reason else (PATCHED, phases)
            rows.append(Row(site.path, type(site.module).__name__, *told))
        notes = notes_of(options, self._found, self._paged, self._proof, self._why)
        notes += tuple(note for part in self._parts if self.active for note in part.notes())
        notes += builds.notes()
        return Report(
            type(self.model).__name__,
            options.kernel,
            tuple(rows),
            notes,
            self.implementation,
            options.mask,
            options.cache,
        )

    def _others(self) -> list[tuple[Any, str]]:
        """Configs whose attention the caller has set to another since, and its name."""
        named = [
            (config, config._attn_implementation_internal)
            for config, _ in self._switched
            if self.active
        ]
        return [(config, name) for config, name in named if name not in batching.names_of(self)]

    @property
    def took(self) -> Took | None:
        """How the last `generate()` ran, and why it was not faster. None before the first."""
        return self._took

    def release(self) -> None:
        """Free the pages that `generate()` and dropped caches have left for later calls, and every
        graph: of steps, of prompts and of the choice of tokens, over pages that a cache uses, too.
        The next call captures anew what it needs, after any change of the model. It also tries
        graphs again that could not be made, as when memory was short."""
        if self._paged is not None:
            self._paged.release()

    def new_cache(
        self, max_batch: int, max_length: int, *, page_size: int | None = None
    ) -> PagedModelCache:
        """A cache of pages to pass to the model or to `generate()`, for a model patched with
        `cache="paged"`.

        `generate()` makes its own where it is given none. Before the first cache of a model without
        latents the model runs for one token, to find the sizes of its keys.

        Args:
            max_batch: rows.
            max_length: positions of each, padding and tokens to come included.
            page_size: tokens a page; None: negotiated, see `attnops.cache.page_size`.

        Raises PatchError: the model is patched otherwise, or not any more; InvalidInput: a number
        is no size; PageSizeConflict: the forced kernel does not take such pages.
        """
        self._settle_active("new_cache")
        if self._paged is None:
            why = self._why or "cache='hf'"
            fail(PatchError, f'new_cache: got a model without pages ({why}); want cache="paged"')
        return self._paged.new_cache(max_batch, max_length, page_size)

    def step(
        self, input_ids: Tensor, cache: PagedModelCache, position_ids: Tensor | None = None
    ) -> Tensor:
        """One token more for each row of a cache, from graphs: for a model on a GPU, or patched
        with graphs for another device.

        It is the step of `generate()`: call the model on the prompt, and this on every token after
        it.

        Args:
            input_ids: int64 `[B, 1]`, for the rows of the step before. cache: from `new_cache`,
                with the prompt in it.
            position_ids: int64 `[B, 1]`; None: tokens so far, without padding.

        Returns:
            Logits `[B, 1, V]`.

        Raises:
            PatchError: the model is patched otherwise, or not any more.
            InvalidInput: another shape or dtype, an empty cache, or one whose last step failed;
                offloaded weights.
            StaleGraph: policy or autocast are others than after the prompt. One token too many is
                an assertion on the device.
        """
        return self._decoder("step").step(input_ids, cache, position_ids)

    def capture(self, cache: PagedModelCache, progress: Progress | None = None) -> GraphReport:
        """Compile and capture decode steps of every number of rows up to the cache's now, so that
        none of it happens at a first request.

        Args:
            cache: from `new_cache`; its tokens stay.
            progress: called after every bucket; `attnops.graphs.bar()` draws a bar.

        Raises PatchError, InvalidInput: as `step`; OverBudget, NotCapturable: as
        `attnops.graphs.piecewise`.
        """
        return self._decoder("capture").capture(cache, progress)

    def _decoder(self, method: str) -> Decoder:
        self._settle_active(method)
        if self._paged is None or self._paged.decode.mode == "hf":
            why = f"got none ({self._why}); " if self._why else ""
            fail(
                PatchError,
                f"{method}: {why}want a model patched with graphs: on a GPU, or with "
                "decode='piecewise' or 'breakable'",
            )
        return self._paged.decoder()

    def _settle_active(self, method: str) -> None:
        if not self.active:
            fail(
                PatchError, f"{method}: got a model that is not patched any more; want patch(model)"
            )
        self._settle()

    @property
    def _begun(self) -> Decoder | None:
        """What decodes over pages, once it has begun."""
        return None if self._paged is None else self._paged._decoder

    @property
    def graphs(self) -> Graphed | None:
        """The graphs of decode steps, whose `report()` lists the captures; None before the
        first."""
        return None if self._begun is None else self._begun.graphed

    @property
    def plain_steps(self) -> int:
        """Steps of one token that ran without graphs, because the step asked for more than logits,
        or because graphs could not be made, or not yet."""
        return 0 if self._begun is None else self._begun.plain_steps

    def _taken(self, generation: Generation) -> Took:
        paged = self._paged
        if paged is None or generation.why != "":
            no_cache = "" if paged is None else NO_CACHE
            return Took("hf", "hf", generation.why or self._why or no_cache)
        mode = generation.graphs or "hf"
        why = self._why or ("" if self._begun is None else self._begun.why)
        why = why or ("" if generation.graphs else generation.waits)
        if why:
            return Took("paged", mode, why, "", generation.layers)
        if not generation.graphs and paged.decode.mode != "hf":
            if not generation.stepped:
                return Took("paged", "", "", generation.loop, generation.layers)
            why = "it had no step of one token that asks for logits only"
        return Took("paged", mode, why, generation.loop, generation.layers)

    def verify(
        self,
        input_ids: Tensor | None = None,
        *,
        tolerance: float | None = None,
        strict: bool = True,
        **inputs: Any,
    ) -> Verification:
        """Run the model on these inputs as patched and with transformers' eager attention, and
        compare.

        Args:
            input_ids: int64 `[B, S]`, or leave it out and pass the model's own inputs by name
                (attention_mask, pixel_values, ...), but no cache, which both runs would fill.
            tolerance: on the largest difference over the largest eager value; default by dtype
                (float32: 2e-5, bfloat16: 0.1).
            strict: raise when the figures are worse than that.

        Raises PatchError when the model is not patched, when the output is missing, or (strict)
        when the comparison fails.
        """
        if others := self._others():
            fail(
                PatchError,
                f"verify: got a model whose attention was set to {others[0][1]!r} after patch(); "
                "call unpatch(), then patch()",
            )
        if input_ids is not None:
            inputs["input_ids"] = input_ids
        visible = (
            inputs.get("decoder_attention_mask")
            if "decoder_input_ids" in inputs
            else inputs.get("attention_mask")
        )
        return self._verified(((), inputs), tolerance, strict, "eager", visible)

    def _stock(self) -> AbstractContextManager[None]:
        return attending([config for config, _ in self._switched], "eager")


_Part = Experts | Routers | Recurrent | Rotations | Rows


def _parts_of(model: nn.Module, ahead: MTPLayer | None) -> tuple[_Part, ...]:
    """What is taken over in a model, and in a layer that drafts, which has experts and routers like
    the model's."""
    whole = nn.ModuleList([model] if ahead is None else [model, ahead])
    return Experts(whole), Routers(whole), Recurrent(whole), Rotations(whole), Rows(whole)


def _forced(asked: Options, how: Decode) -> bool:
    """Do the options ask for pages?"""
    return asked.cache == "paged" or how.mode not in ("auto", "hf")


def patch(
    model: Any,
    *,
    kernel: str | None = None,
    mask: Mode = "auto",
    cache: Kept = "auto",
    decode: Literal["auto", "hf", "piecewise", "breakable"] | Decode = "auto",
    speculate: Speculate = None,
) -> Patched:
    """Route the attention of a transformers model through `attnops.attention`. In place, and
    reversible.

        handle = attnops.patch(model)
        model = torch.compile(model)

    A module is patched when its code asks transformers' attention interface for the function to
    call. The model's state_dict, hooks and saved config stay as they are, and so do its weights,
    which piecewise graphs give other addresses until `unpatch()` (docs/linear.md). Experts that ask
    transformers' experts interface go to `attnops.ops.experts` where a kernel of attnops serves
    them: a few tokens on a GPU, without gradients. So do routers to `attnops.ops.route` where the
    op chooses as they do, and linear attention of the kind of Qwen3-Next to
    `attnops.ops.gated_delta_rule` and `attnops.ops.causal_conv1d`. The device chooses the
    frequencies of LongRoPE. Modules that hold the same config object switch together, those of
    other models included (the report says so). In training mode a layer whose attention dropout is
    above 0 is computed in plain torch.

    Args:
        model: a PreTrainedModel, or a module around one (PEFT, `torch.compile`).
        kernel: force this kernel on every call, eager and compiled; None chooses per call.
        mask: "auto": lengths instead of masks on CUDA where that is exact, and for packed
            documents; bool masks elsewhere. "dense": bool masks, or none where the call is plainly
            causal. "explicit": as dense, and never none; the default for a model whose code
            computes with its masks. "additive": floats, as eager attention is given them; the
            default for a model that transformers does not route through its sdpa, unless a small
            twin of it gives eager's numbers with other masks. "compact": lengths on every device;
            the host may wait for the device at each step to check the mask.
        cache: "auto": `generate()` on a GPU keeps its cache in pages where that makes it faster,
            and transformers' cache elsewhere: `Patched.took` says which it was, and why. "hf":
            transformers' caches. "paged": `generate()` keeps its cache in pages that attnops owns,
            and so does a call with a cache made by the handle; other caches work as before. The
            pages hold keys and values (of a sliding window no more than the window), or the latents
            of Multi-head Latent Attention (DeepSeek-V2, V3 and their kin), to which decode attends
            without unfolding. They are allocated for the whole length, as a static cache, and a few
            sets are kept for later calls until `Patched.release()`. Masks may have padding on the
            left only.
        decode: how the steps of `generate()` after the prompt run: "piecewise" or "breakable" CUDA
            graphs (docs/graphs.md) over pages, captured when a bucket of rows is first met; "hf",
            as transformers does it; "auto": on a GPU graphs that need no compiler, and
            piecewise ones after `Patched.capture`. A `Decode` has more to set.
        speculate: what drafts tokens that a step of `generate()` then verifies at once
            (docs/speculation.md): "lookup": the row's own text; the folder of an EAGLE-3 or DFlash
            checkpoint, or its `attnops.nn.Eagle3Head` or `attnops.nn.DFlashHead`; an
            `attnops.nn.DraftTree` of an EAGLE-3 head; "mtp": the layer in the model's checkpoint
            that predicts one token more, or such an `attnops.nn.MTPLayer`; a patched transformers
            model with the same words; an object with `propose`, see `attnops.nn.Draft`. None:
            nothing, but where a call has transformers' `prompt_lookup_num_tokens=`,
            `assistant_model=` or `use_mtp=`. Greedy tokens are those of plain decoding, and samples
            have its distribution.

    Returns:
        The handle. A second call on the same model returns the same handle.

    Raises:
        PatchError: no module can be patched (the text has every reason), or the model is patched
            with other options.
        UnknownKernel: no kernel has that name.
        InvalidInput: no such mask mode, cache or way to decode.
    """
    if not isinstance(model, nn.Module):
        fail(PatchError, f"patch: got {type(model).__name__}, want a transformers model")
    warn_if_newer("torch", "transformers")
    asked = Options(kernel, mask, cache)
    implementation(asked)
    how = decode if isinstance(decode, Decode) else Decode(decode)
    if speculate is not None:
        how = replace(how, speculate=speculate)
    paged = _forced(asked, how)
    need(
        not paged or mask != "additive",
        "mask",
        repr(mask),
        "another with cache='paged': pages take no additive masks",
    )
    need(
        not paged or cache != "hf",
        "decode",
        repr(how.mode),
        "'hf' or 'auto' with cache='hf': caches of transformers' own move",
    )
    owner = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    if owner is None:
        fail(PatchError, f"patch: {type(model).__name__} holds no transformers.PreTrainedModel")
    with PATCHING:
        how = replace(how, speculate=resolved(how.speculate, owner))
        return _patched(model, owner, asked, how)


def _patched(model: nn.Module, owner: Any, asked: Options, how: Decode) -> Patched:
    there: Patched | None = owner.__dict__.get(MARK)
    if there is not None:
        refuse_other_options(said(asked, how), said(there.asked, there.decode))
        return there
    found = match(model)
    if all(site.reason is not None for site in found.sites):
        refuse_nothing(type(owner).__name__, ((site.module, site.reason) for site in found.sites))
    return Patched(model, owner, asked, how, found)
