"""Why a call of `generate()` gets no pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from attnops.core.kernel import kernels_of
from attnops.core.record import need
from attnops.core.select import key_for, parse_policy
from attnops.hf.cache import names as cache_names
from attnops.hf.cache.names import cache_in
from attnops.hf.cache.page_sizes import ALL, DRAFTS
from attnops.hf.cache.support import has_blocks, is_latent
from attnops.hf.generation import on_host, running_generation
from attnops.hf.models.methods import Method, is_compiled, is_replaced
from attnops.hf.steps.around import global_hooks

# Words in the names of fractions by which modules of transformers draw in training mode:
# attention_dropout, resid_pdrop, layerdrop, router_jitter_noise.
_DRAWN = ("drop", "jitter", "noise")
# As PEFT does for prompts that are learnt.
PREPARES = "prepare_inputs_for_generation was replaced, and may bring positions of its own"
REPLACED = "the model's forward was replaced or compiled, and its steps are left to it"

LATE = (
    "the padding of a row is longer than a chunk (prefill_chunk_size), and the kernel needs a plan "
    "of the host, which has no such rows"
)
HOOKED = "hooks of the caller on {} run at every step"


def callers_choice(owner: Any, mask: str) -> str:
    """Why the caller's changes to a model, or the masks asked for, leave no place for pages and
    graphs; "" where they do."""
    if mask == "additive":
        return "additive masks were asked for, and pages take none"
    if split := split_over(owner):
        return split
    if is_replaced(owner):
        return REPLACED
    others = sorted({type(p).__name__ for p in owner.parameters()} - {"Parameter"})
    return (
        f"weights are {', '.join(others)}, whose products are not captured"
        if "DTensor" in others
        else ""
    )


def split_over(owner: Any) -> str:
    """The reason against graphs of a model on several devices, as accelerate splits it, with their
    names; "" for one device."""
    devices = sorted({str(p.device) for p in owner.parameters() if p.device.type != "meta"})
    return (
        f"the model is split over several devices: {', '.join(devices)}" if len(devices) > 1 else ""
    )


class Reason(NamedTuple):
    """A reason against pages for one call.

    told: a caller who asked for pages is warned of it.
    chosen: the caller chose it. Of other reasons a caller who did not ask for pages is warned.
    """

    why: str
    told: bool = False
    chosen: bool = True


class Call(NamedTuple):
    """A call of `generate()`, as the model is asked for its cache.

    owner: the model. config, mode, given: transformers' generation_config, generation_mode and
    model_kwargs.
    elsewhere: an attention to which a layer was switched. blocks: may tokens of an image see each
    other both ways?
    hooks: of `callers_hooks`. training: modules in training mode.
    """

    owner: Any
    config: Any
    mode: Any
    given: dict[str, Any]
    elsewhere: str | None
    blocks: bool
    hooks: list[tuple[Any, Any]]
    training: list[Any]

    @property
    def beams(self) -> int:
        """Of beam search; 1 without."""
        return int(self.config.num_beams or 1)

    @property
    def copies(self) -> int:
        """Rows of the cache for each row of the batch."""
        return max(self.beams, self.config.num_return_sequences or 1)

    @property
    def assisted(self) -> bool:
        """Does another model, or a look at the prompt, draft its tokens?"""
        return bool(getattr(self.mode, "value", self.mode) == "assisted_generation")

    def asks(self, output: str) -> bool:
        """Does it, or the model's config, ask for this output?"""
        return any(getattr(config, output, None) for config in (self.config, self.owner.config))


def why_unpaged(call: Call, kernel: str | None) -> Iterator[Reason]:
    """Each reason against pages of any call. kernel: that the pages are for, or None."""
    config = call.config
    if cache_in(call.given) is not None:
        yield Reason("the caller passed a cache")
    if config.use_cache is False:
        yield Reason("use_cache is False")
    if config.cache_implementation is not None:
        yield _of_named_cache(call)
    if call.elsewhere is not None:
        yield Reason(f"a layer was switched to the attention {call.elsewhere!r}")
    # An assistant is called again and again with one cache, for a few tokens more each time.
    if getattr(config, "is_assistant", False):
        yield Reason("the model is an assistant")
    if call.beams > 1:
        yield Reason("beam search reorders its cache", told=True)
    if call.asks("output_attentions"):
        yield Reason("output_attentions=True wants keys at hand", told=True)
    if call.blocks and has_blocks(call.given):
        yield Reason("tokens of an image see each other both ways", told=True, chosen=False)
    if longer_than_chunks(call) and needs_plan(kernel) and not _has_latents(call.owner):
        yield Reason(LATE, told=True, chosen=False)
    if prepares(call.owner):
        yield Reason(PREPARES, told=True)
    if by_row := hooked_by_row(call.hooks):
        yield Reason(
            f"hooks on {by_row} hand each row an argument of its own, as PEFT's adapter_names",
            told=True,
        )


def why_unpaged_unasked(call: Call, forward: Method | None) -> Iterator[Reason]:
    """Further reasons against pages that were not asked for: a call that they would not make
    faster, or might change.

    forward: the method by which graphs serve the model's steps, or None.
    """
    owner, generation = call.owner, running_generation()
    if generation is not None and generation.custom:
        yield Reason("a loop of the caller's (custom_generate) may change its cache")
    if hooked := hooks_of_the_caller(call.hooks):
        yield Reason(HOOKED.format(hooked))
    if is_compiled(owner) or (forward is not None and vars(owner).get("forward") is not forward):
        yield Reason(split_over(owner) or REPLACED)
    if call.asks("output_hidden_states"):
        yield Reason("output_hidden_states=True")
    yield from _why_random(call)
    if call.assisted:
        yield Reason("assisted generation has steps of several tokens")
    if not _left_padded(call.given.get("attention_mask")):
        yield Reason("the attention_mask has zeros between or behind ones, which pages do not hold")


def _why_random(call: Call) -> Iterator[Reason]:
    """Training mode, of the model or of a part of it that draws random numbers there."""
    if call.owner.training:
        yield Reason("the model is in training mode")
    elif dropping := drawing(call.training):
        yield Reason(f"dropout is on in {dropping}, which is in training mode")


def refuse_given(call: Call, given: Any, sizes: tuple[int, int], graphed: bool) -> None:
    """Raise InvalidInput unless `generate()` can go on with a cache of pages that the caller
    passed.

    sizes: the rows and the length that the call asks for. graphed: are graphs asked for?
    """
    kind, elsewhere = type(given).__name__, call.elsewhere
    want = (
        "another cache: the attention of this model, or of one that holds the same config, "
        "was switched in the meantime"
    )
    need(elsewhere is None, cache_names.NAME, f"{kind} with attention {elsewhere!r}", want)
    for field, got, most in (
        ("rows", sizes[0], given.max_batch),
        ("length", sizes[1], given.max_length),
    ):
        need(
            got <= most,
            f"{cache_names.NAME}, {field}",
            got,
            f"at most {most}, the size of this cache",
        )
    own = "transformers' own cache, or none"
    need(not prepares(call.owner), cache_names.NAME, f"{kind} where {PREPARES}", own)
    by_row = hooked_by_row(call.hooks)
    beside = (
        f"{kind} where hooks on {by_row} hand each row an argument of its own, and graphs add rows"
    )
    need(
        not by_row or not graphed,
        cache_names.NAME,
        beside,
        f"{own}, or a model patched with decode='hf'",
    )
    first = not (given.latent or given.state.filled) and longer_than_chunks(call)
    refused = first and needs_plan(given.state.pages.sizes.kernel)
    need(not refused, cache_names.NAME, f"{kind} where {LATE}", own)
    need(call.beams <= 1, "num_beams", call.beams, "1 with a paged cache: rows keep their pages")


def longer_than_chunks(call: Call) -> bool:
    """Is the padding of a row longer than a chunk of the prompt? The row then has no tokens in the
    first chunk, and may have fewer than new positions in a later one."""
    mask = call.given.get("attention_mask")
    chunk = getattr(call.config, "prefill_chunk_size", None)
    if chunk is None or mask is None or mask.dim() != 2 or mask.shape[1] <= chunk:
        return False
    return not on_host(mask)[:, : chunk + 1].any(1).all()


def needs_plan(kernel: str | None) -> bool:
    """Is the kernel of attention over pages forced, and planned by the host?"""
    op = "paged_attention"
    if kernel is not None and kernel not in kernels_of(op):
        return False  # it is one of latents
    forced = parse_policy(key_for(op, kernel)).forced(op)
    planning = kernels_of(f"plan_{op}").get(forced or "")
    return planning is not None and planning.plan.sizes is not None


def _has_latents(owner: Any) -> bool:
    """Do layers of the model attend to latents, whose plans take a row with fewer tokens than it
    brings?"""
    return any(map(is_latent, owner.modules()))


def drafts(call: Call) -> tuple[int, int]:
    """(positions that drafts may reach past the last token that will be kept, the most positions of
    a step that may be taken back)."""
    if not call.assisted:
        running = running_generation()
        own = 0 if running is None or running.owner is not call.owner else running.drafts
        return own, own
    config = call.config
    looked_up = getattr(config, "prompt_lookup_num_tokens", None) or 0
    asked = getattr(config, "num_assistant_tokens", None) or 0
    past = max(DRAFTS, 1 + max(looked_up, asked))
    # The number of tokens that an assistant drafts is in its own config, and may grow from step to
    # step.
    bounded = looked_up and getattr(config, "assistant_early_exit", None) is None
    return past, past if bounded else ALL


def _of_named_cache(call: Call) -> Reason:
    """Some checkpoints name a cache in their generation config, unnoticed by their user."""
    named = call.config.cache_implementation
    of_model = getattr(call.owner, "generation_config", None)
    own = named == getattr(of_model, "cache_implementation", None)
    unset = "; set model.generation_config.cache_implementation = None for pages" if own else ""
    return Reason(
        f"the generation config asks for the cache {named!r}{unset}", told=own, chosen=not own
    )


def prepares(owner: Any) -> bool:
    """Was its method that prepares the inputs of a step replaced by another than ours?"""
    inputs = vars(owner).get("prepare_inputs_for_generation")
    return inputs is not None and (not isinstance(inputs, Method) or inputs.own is not None)


def hooks_of_the_caller(hooks: list[tuple[Any, Any]]) -> str:
    """The class of a module of a model with hooks that are neither ours nor transformers', which no
    replay runs; "" without. hooks: of `callers_hooks`."""
    if global_hooks():
        return "every module"
    return type(hooks[0][0]).__name__ if hooks else ""


def hooked_by_row(hooks: list[tuple[Any, Any]]) -> str:
    """The class of a module of a model with hooks that hand it something for each row of one batch;
    "" without. hooks: of `callers_hooks`.

    They fit no batch of another size: the step by which the first cache of a model is measured, or
    a graph with rows of padding.
    """
    for module, hook in hooks:
        if any(
            isinstance(value, (list, tuple)) for value in getattr(hook, "keywords", {}).values()
        ):
            return type(module).__name__
    return ""


def hooks_on(module: Any, known: tuple[str, ...] = ("attnops.",)) -> list[Any]:
    """The hooks on this module alone that are of none of these packages: by default not ours."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith(known)]


def runs_hooks(model: Any) -> bool:
    """Does a call of the model itself run hooks of the caller's?"""
    return bool(hooks_on(model) or global_hooks())


def callers_hooks(hooked: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Each hook on these modules that is neither ours nor transformers', with its module."""
    return [
        (module, hook)
        for module in hooked
        for hook in hooks_on(module, ("attnops.", "transformers."))
    ]


def drawing(training: Iterable[Any]) -> str:
    """The class of a module that may draw random numbers in training mode, in which these modules
    are; "" without.

    Steps over pages have no dropout, and a capture draws numbers that no token is made of.
    """
    return next((type(module).__name__ for module in training if _draws(module)), "")


def _draws(module: Any) -> bool:
    """Has this module, or its config, a fraction above 0 of what training drops or shakes?"""
    if "Dropout" in type(module).__name__:
        return getattr(module, "p", 1.0) > 0.0
    config = getattr(module, "config", None)
    fields = [*vars(module).items(), *(vars(config).items() if hasattr(config, "__dict__") else ())]
    drawn = [value for name, value in fields if any(word in name for word in _DRAWN)]
    return any(
        isinstance(value, (int, float)) and value is not True and value > 0 for value in drawn
    )


def _left_padded(mask: Tensor | None) -> bool:
    """Does each row of a 2-D mask `[B, S]` end in its ones? The host reads it."""
    if mask is None:
        return True
    if mask.dim() != 2:
        return False
    seen = on_host(mask)
    return bool(seen.all() or (seen[:, 1:] >= seen[:, :-1]).all())
