"""What drafts the tokens of a call of `generate()`: the model's own option, or transformers'
arguments of the call, which win."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import nn

from attnops.adapters.handle import MARK
from attnops.core.errors import InvalidInput, PatchError, fail, one_line
from attnops.core.record import need
from attnops.hf.cache.page_sizes import DRAFTS
from attnops.hf.steps.assistant import Assistant
from attnops.hf.steps.dflash import DFlash
from attnops.hf.steps.eagle import Eagle
from attnops.hf.steps.eligibility import Asked
from attnops.hf.steps.heads import Head, weights_of
from attnops.hf.steps.mtp import OPTION as MTP, Mtp, lend, loaded
from attnops.hf.steps.reasons import REPLACED
from attnops.hf.steps.round_kinds import Form
from attnops.nn import DFlashHead, Draft, DraftTree, Eagle3Head, MTPLayer
from attnops.nn.heads import config_of
from attnops.ops.speculation.record import LONGEST

LOOKUP, ASSISTANT, USE_MTP = "prompt_lookup_num_tokens", "assistant_model", "use_mtp"
"""transformers' arguments of `generate()`."""

Speculate = Literal["lookup", "mtp"] | str | PathLike[str] | nn.Module | DraftTree | Draft | None
"""The option of `patch`. Another text than these is the folder of a draft head's checkpoint."""

_WANT = (
    "None, 'lookup', 'mtp', the folder of a draft head, an attnops.nn.Eagle3Head, DraftTree, "
    "DFlashHead or MTPLayer, a transformers model that drafts, or an object with propose(state)"
)

MOST_DRAFTS = 63
"""Tokens that an object may draft for a row."""

_NGRAM = "max_matching_ngram_size"


class Plan(NamedTuple):
    """How the rounds of a call draft.

    form: of their graphs. draft: proposes the tokens. assistant: the model that does. Neither: they
    are looked up in the text of their row.
    """

    form: Form
    draft: Draft | None = None
    assistant: Any = None

    def cost(self, owner: Any) -> float:
        """The time of the drafts of a round, as a part of that of a step of the model, by the
        weights that both read. 0.0 for lookups, and for an object, whose time is not known."""
        if self.form.head is not None:
            read = self.form.head.weights(owner)
        elif self.assistant is not None:
            # It steps over its last token, too.
            read = (1 + self.form.drafts) * weights_of(self.assistant)
        else:
            return 0.0
        return read / max(1, weights_of(owner))

    def against(self, owner: Any) -> str:
        """Why nothing drafts for the model as it is now; "" where something may."""
        if self.form.head is not None:
            return self.form.head.against(owner)
        return "" if self.assistant is None else against_assistant(owner, self.assistant)

    @contextmanager
    def drafts(self, asked: Asked) -> Iterator[Draft | None]:
        """What proposes the tokens of this call, which has read its prompt; None: none does."""
        if self.assistant is None:
            yield self.draft
            return
        found = Assistant(self.assistant, self.form.drafts)
        try:
            found.begin(asked, asked.max_length + self.form.depths[-1])
            yield found
        finally:
            found.end()


LOOKS_UP = Plan(Form())
_PROPOSED = Form(max_ngram=0)


class Drafting(NamedTuple):
    """Of a call of `generate()`.

    kwargs: its arguments. What the plan replaces is off: False or None.
    plan: how attnops drafts; None: it does not. why: the reason, "" where nothing was asked for.
    """

    kwargs: dict[str, Any]
    plan: Plan | None
    why: str = ""

    def arguments(self) -> dict[str, Any]:
        """The arguments for transformers, where None overrides a field of its config."""
        arguments = dict(self.kwargs)
        if LOOKUP in arguments:
            arguments[LOOKUP] = None
        return arguments


def resolved(speculate: Any, owner: Any) -> Any:
    """The option of `patch` as the model has it: a head in place of its folder.

    Raises InvalidInput unless it is one, PatchError for an assistant with other words than the
    model has, and for a head that is not of this model.
    """
    if speculate is None or (isinstance(speculate, str) and speculate == "lookup"):
        return speculate
    speculate = _loaded(speculate, owner)
    known = isinstance(speculate, (nn.Module, DraftTree)) or hasattr(speculate, "propose")
    need(known, "speculate", repr(speculate), _WANT)
    most = _num_drafts(speculate)
    want = f"1 to {MOST_DRAFTS} tokens that the object drafts for a row at most"
    whole = isinstance(most, int) and 1 <= most <= MOST_DRAFTS
    need(whole, "speculate.num_drafts", repr(most), want)
    why = ""
    if (head := _head_of(speculate)) is not None:
        why = head.against(owner)
    elif not hasattr(speculate, "propose"):
        why = _other_words(owner, speculate)
    if why:
        fail(PatchError, f"patch: got speculate={type(speculate).__name__}; {why}")
    if isinstance(speculate, MTPLayer):
        lend(speculate, owner)
    return speculate


def _loaded(speculate: Any, owner: Any) -> Any:
    """The option, with a module in place of the checkpoint that it names. Raises PatchError."""
    if isinstance(speculate, DraftTree) and not isinstance(speculate.head, nn.Module):
        return replace(speculate, head=_head_in(str(speculate.head), owner))
    if not isinstance(speculate, (str, PathLike)):
        return speculate
    if speculate == MTP:
        return loaded(owner, _held_by(owner))
    return _head_in(str(speculate), owner) if Path(speculate).is_dir() else speculate


def _head_of(speculate: Any) -> Head | None:
    """None where it is no draft head."""
    if isinstance(speculate, DraftTree):
        module: Any = speculate.head
        return Eagle(module, speculate)
    if isinstance(speculate, Eagle3Head):
        return Eagle(speculate)
    if isinstance(speculate, DFlashHead):
        return DFlash(speculate)
    return Mtp(speculate) if isinstance(speculate, MTPLayer) else None


def _held_by(owner: Any) -> Any:
    """The option with which the model is patched; None where it is not."""
    handle = vars(owner).get(MARK)
    return None if handle is None else handle.decode.speculate


def _head_in(folder: str, owner: Any) -> Any:
    """The head of a checkpoint; that of a patched model, where it came from this folder."""
    held = _held_by(owner)
    if isinstance(held, DraftTree):
        held = held.head
    if isinstance(held, (Eagle3Head, DFlashHead)) and held.folder == folder:
        return held
    try:
        kind = DFlashHead if "dflash_config" in config_of(folder) else Eagle3Head
        return kind.from_folder(folder, owner.get_input_embeddings())
    except InvalidInput as error:
        raise PatchError(f"patch: got speculate={folder!r}; {one_line(error)}") from None


def plan_of(speculate: Any) -> Plan | None:
    """The plan of a model with this option."""
    if speculate is None:
        return None
    if isinstance(speculate, str):
        return LOOKS_UP
    if (head := _head_of(speculate)) is not None:
        return Plan(Form(head.num_drafts, 0, head, head.levels))
    if hasattr(speculate, "propose"):
        most = _num_drafts(speculate)
        return Plan(Form(most, 0, levels=most), speculate)
    return Plan(_PROPOSED, assistant=speculate)


def _num_drafts(draft: Any) -> Any:
    """The most tokens that an object drafts for a row: its `num_drafts`, where it has one."""
    return getattr(draft, "num_drafts", _PROPOSED.drafts)


def _other_words(owner: Any, assistant: Any) -> str:
    """Why the words of an assistant are not those of a model; "" where they are."""
    own, theirs = (
        getattr(getattr(each, "config", None), "vocab_size", None) for each in (owner, assistant)
    )
    if own is None or own != theirs:
        return f"it has {theirs} words and {type(owner).__name__} has {own}; want as many"
    return ""


def against_assistant(owner: Any, assistant: Any) -> str:
    """Why a model cannot draft for another; "" where it can."""
    if why := _other_words(owner, assistant):
        return why
    handle = vars(assistant).get(MARK)
    if handle is None:
        return "it is not patched; want attnops.patch(assistant) before"
    handle._settle()
    paged, device = handle._paged, assistant.device
    if paged is None or paged.states:
        return f"its cache is not of pages alone ({handle._why or 'states'})"
    if paged.decode.mode != "auto":
        return f"it is patched with decode={paged.decode.mode!r}; want 'auto'"
    if vars(assistant).get("forward") is not paged._forward:
        return REPLACED
    if device != owner.device:
        return f"it is on {device}, and {type(owner).__name__} on {owner.device}"
    return ""


def drafting(
    owner: Any, args: Sequence[Any], kwargs: dict[str, Any], plan: Plan | None
) -> Drafting:
    """What drafts for a call. plan: of the model's option."""
    configs = _configs_of(owner, args, kwargs)
    looked_up = _asked(LOOKUP, kwargs, configs)
    assistant, ahead = kwargs.get(ASSISTANT), _asked(USE_MTP, kwargs, configs)
    if bool(looked_up) + bool(ahead) + (assistant is not None) > 1:
        return Drafting(kwargs, None)  # transformers refuses some, and chooses of the others
    if ahead:
        return _by_layer(owner, kwargs)
    if looked_up:
        ngram = min(_asked(_NGRAM, kwargs, configs) or 2, LONGEST)
        return _without(kwargs, Plan(Form(_most(looked_up), ngram)))
    if assistant is None:
        why = "" if plan is None else plan.against(owner)
        return Drafting(kwargs, None if why else plan, why and f"nothing was drafted: {why}")
    if why := against_assistant(owner, assistant):
        return Drafting(kwargs, None, f"transformers' own loop drafts: {why}")
    asked = getattr(assistant.generation_config, "num_assistant_tokens", None) or 5
    form = Form(min(_most(asked), _PROPOSED.drafts), 0)
    return _without(kwargs, Plan(form, assistant=assistant))


def _by_layer(owner: Any, kwargs: dict[str, Any]) -> Drafting:
    """By the MTP layer of the model's checkpoint."""
    try:
        head = Mtp(vars(owner)[MARK]._layer_ahead())
        why = head.against(owner)
    except PatchError as error:
        why = one_line(error)
    if why:
        return Drafting(kwargs, None, f"transformers' own loop drafts: {why}")
    return _without({**kwargs, USE_MTP: False}, Plan(Form(head.num_drafts, 0, head)))


def _without(kwargs: dict[str, Any], plan: Plan) -> Drafting:
    return Drafting({**kwargs, LOOKUP: False, ASSISTANT: None}, plan)


def reads_states(
    head: Head | None, generation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """May a head read the states of a call's prompt? head: the one that reads those of the
    model."""
    configs = _configs_of(generation.owner, args, kwargs)
    return head is not None or bool(_asked(USE_MTP, kwargs, configs))


def _configs_of(owner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Generation configs of a call, the first one that counts first."""
    config = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
    return config, getattr(owner, "generation_config", None)


def _most(tokens: int) -> int:
    """Tokens that can be taken back from a window."""
    return max(1, min(int(tokens), DRAFTS - 1))


def _asked(name: str, kwargs: Mapping[str, Any], configs: Sequence[Any]) -> Any:
    """An argument of `generate()`, or the field of the first config that has it."""
    fields = (getattr(config, name, None) for config in configs)
    found = (value for value in (kwargs.get(name), *fields) if value is not None)
    return next(found, None)
