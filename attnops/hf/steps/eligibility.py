"""Which calls of `generate()` are plain, so that their loop may be captured."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from attnops.hf.cache.names import cache_in
from attnops.hf.cache.paged_cache import PagedModelCache
from attnops.hf.models.methods import Method, is_compiled
from attnops.hf.steps.around import function_modes
from attnops.hf.steps.calls import more
from attnops.hf.steps.decode import Decoder
from attnops.hf.steps.numbers import Number, field_of, is_theirs
from attnops.hf.steps.reasons import runs_hooks

# Their results depend on the logits and the tokens so far, and on no Python number that changes
# from step to step.
_PROCESSORS = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
)
# These count tokens too, by a Python number. See attnops.hf.steps.sampler_graph.Held.
_HELD = (MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor)
_CRITERIA = (MaxLengthCriteria, EosTokenCriteria)
# Methods that the loop calls, or whose work it does.
FOLLOWED = (
    "_sample",
    "_prefill",
    "_optimize_model_for_decode",
    "prepare_inputs_for_generation",
    "_update_model_kwargs_for_generation",
)
# Arguments of generate() that a `custom_generate` is not given.
_ARGUMENTS = (
    "custom_generate",
    "assistant_model",
    "assistant_tokenizer",
    "tokenizer",
    "synced_gpus",
)
COUNTS = ("num_beams", "num_beam_groups")
"""Fields of a generation config by which transformers chooses another method than `_sample`, if
they are above 1."""
CHOICES = (
    "constraints",
    "force_words_ids",
    "penalty_alpha",
    "use_mtp",
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "dola_layers",
)
"""Such fields that do so if they are set."""
_OUTPUTS = (
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "output_logits",
    "is_assistant",
)


class Asked(NamedTuple):
    """The arguments of `_sample`.

    owner: the model. input_ids: `[B, S]`. given: the arguments of the model's first call.
    """

    owner: Any
    input_ids: Tensor
    processors: Any
    criteria: Any
    config: Any
    streamer: Any
    given: dict[str, Any]

    @property
    def max_length(self) -> int:
        """The tokens of a text, prompt included, at which the loop stops."""
        return min(
            (int(each.max_length) for each in self.criteria if type(each) is MaxLengthCriteria),
            default=sys.maxsize,
        )

    @property
    def columns(self) -> int:
        """Positions that the prompt fills. Tokens of earlier turns may be in the mask and not in
        the text. transformers drops a mask without zeros, and keeps its length."""
        given = (self.given.get(name) for name in ("position_ids", "attention_mask"))
        shapes = (x.shape[-1] for x in given if isinstance(x, Tensor))
        return max(self.input_ids.shape[-1], getattr(self.config, "_mask_length", 0), *shapes)

    @property
    def positions(self) -> int:
        """The positions that the model has."""
        limits = (getattr(each, "max_position_embeddings", None) for each in self.criteria)
        return min((limit for limit in limits if limit is not None), default=sys.maxsize)

    @property
    def eos(self) -> list[Tensor]:
        """The tokens that end a row, of each criterion."""
        return [each.eos_token_id for each in self.criteria if type(each) is EosTokenCriteria]


def several_processes() -> bool:
    """Is this process one of several that torch.distributed joins?"""
    distributed = torch.distributed
    joined = distributed.is_available() and distributed.is_initialized()
    return joined and distributed.get_world_size() > 1


def why_not_sampled(owner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Each reason why this call of `generate()` may not end in transformers' own `_sample`."""
    if len(args) > 5:
        yield "more than five arguments without names"
    yield from (f"{name}=" for name in _ARGUMENTS if kwargs.get(name) is not None)
    methods = (name for name in ("generate", *FOLLOWED) if not is_stock(owner, name))
    yield from (f"{type(owner).__name__} has a {name} of its own" for name in methods)
    if several_processes():
        yield "several processes may have to stop together"
    config = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
    yield from _why_another(kwargs, (config, getattr(owner, "generation_config", None)))


def _why_another(kwargs: Mapping[str, Any], configs: Sequence[Any]) -> Iterator[str]:
    """The fields by which transformers chooses another method than `_sample`."""
    for name in (*COUNTS, *CHOICES):
        asked = kwargs.get(name)
        for config in configs:
            asked = getattr(config, name, None) if asked is None else asked
        if (asked or 1) > 1 if name in COUNTS else asked not in (None, False):
            yield f"{name}="


def why_not_plain(asked: Asked, decoder: Decoder) -> Iterator[str]:
    """Each reason why the loop of this call cannot be captured."""
    owner, ids, config, given = asked.owner, asked.input_ids, asked.config, asked.given
    cache = cache_in(given)
    if not isinstance(cache, PagedModelCache):
        yield f"its cache is a {type(cache).__name__}"
        return
    device = cache.state.pages.seen.device
    yield from _why_unknown(asked)
    yield from (f"{name}=True" for name in _OUTPUTS if getattr(config, name, None))
    if any(_leaves_out(each, ids) for each in asked.processors):
        yield "a repetition penalty leaves the prompt out"
    if more(given) or not config.use_cache:
        yield "the model gets arguments that change from step to step"
    if (ids.dtype, ids.device, ids.dim()) != (torch.int64, device, 2) or not ids.numel():
        yield "its tokens are not int64 on the device of the pages"
    yield from _why_misplaced(asked, cache)
    yield from _why_watched(owner)
    if decoder.why_not(ids.shape[0]) or (decoder.how.graphs is None and device.type != "cuda"):
        yield "graphs cannot be made"


def _why_watched(owner: Any) -> Iterator[str]:
    """What is to see each call of the model."""
    if not isinstance(owner.__dict__.get("forward"), Method) or runs_hooks(owner):
        yield "the caller's hooks or forward want each call of the model"
    if function_modes():
        yield "a function mode sees each operation of the loop"
    if is_compiled(owner):
        yield "the caller compiles the model"


def _why_unknown(asked: Asked) -> Iterator[str]:
    """Names code of the call's own: what is of no class of transformers' that is known."""
    lists, known = (asked.processors, asked.criteria), (LogitsProcessorList, StoppingCriteriaList)
    unknown = [each for each in chain(*lists) if not _is_known(each)] + [
        each for each in lists if type(each) not in known
    ]
    yield from (f"{type(each).__name__} is code of its own" for each in unknown)


def _why_misplaced(asked: Asked, cache: PagedModelCache) -> Iterator[str]:
    """The reasons for which its tokens may have no place."""
    ids, config, most = asked.input_ids, asked.config, asked.max_length
    positions = asked.given.get("position_ids")
    if (
        not isinstance(positions, Tensor)
        or positions.dtype != torch.int64
        or positions.shape[:-1] != ids.shape[:1]
    ):
        yield "it has no positions for each row"
    pad = getattr(config, "_pad_token_tensor", None)
    if asked.eos and not (isinstance(pad, Tensor) and pad.dim() == 0):
        yield "a token ends rows and none pads them"
    if asked.columns + most - ids.shape[-1] > cache.max_length + 1:
        yield "its text may not fit the cache"
    if most > asked.positions + 1:
        yield "its text may be longer than the model's positions"


def fields(processors: Any, device: torch.device) -> tuple[Any, ...]:
    """The types, fields and code of plain processors, of tensors the shapes.

    Equal ones do the same to equal tensors on this device. Numbers of `held` and of
    `attnops.hf.steps.numbers` are tensors.
    """

    def of(processor: Any) -> tuple[Any, ...]:
        if type(processor) in _HELD:
            return (processor.eos_token_id.numel(),)
        constants = {
            name: x.shape if isinstance(x, Tensor) else x for name, x in vars(processor).items()
        }
        if (name := field_of(processor, device)) is not None:
            constants[name] = Number
        return tuple(sorted(constants.items(), key=lambda field: field[0]))

    return tuple((type(each), *of(each), type(each).__call__) for each in processors)


def held(processor: Any) -> tuple[Tensor, int] | None:
    """Of a processor that forbids tokens until a text has some length: the tokens, and the
    length."""
    if type(processor) is MinLengthLogitsProcessor:
        return processor.eos_token_id.reshape(-1), processor.min_length
    if type(processor) is MinNewTokensLengthLogitsProcessor:
        return processor.eos_token_id.reshape(
            -1
        ), processor.prompt_length_to_skip + processor.min_new_tokens
    return None


def _is_known(each: Any) -> bool:
    """Is the effect of this processor or criterion known?"""
    kind = type(each)
    return kind in (*_PROCESSORS, *_CRITERIA) or (kind in _HELD and is_theirs(kind))


def _leaves_out(processor: Any, ids: Tensor) -> bool:
    """Does a penalty not count each row's last token? transformers 5.23 leaves out the padding on
    the left."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if isinstance(ignored, Tensor) and ignored.shape == ids.shape[:1]:
        return not bool((ignored < ids.shape[-1]).all())
    return ignored is not None


def is_stock(owner: Any, name: str) -> bool:
    """Is this method transformers' own, or one of ours around it?"""
    found = owner.__dict__.get(name)
    while isinstance(found, Method):
        found = found.own
    theirs, own = (getattr(each, name, None) for each in (GenerationMixin, type(owner)))
    known = theirs is not None and (own is theirs or _keeps_logits_alone(own))
    return found is None and known


class _KeepsLogits:
    """A model that asks for the logits of some last tokens, as several of transformers do."""

    config: Any

    def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> Any:
        kwargs["logits_to_keep"] = self.config.num_logits_to_keep
        model_inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)  # type: ignore[misc]
        return model_inputs


def _keeps_logits_alone(method: Any) -> bool:
    """Does it do what that of `_KeepsLogits` does? The last token's logits are all that the loop
    reads."""
    code, known = (getattr(f, "__code__", None) for f in (method, _PREPARES))
    return code is not None and all(getattr(code, n) == getattr(known, n) for n in _OF_CODE)


_PREPARES = _KeepsLogits.prepare_inputs_for_generation
_OF_CODE = "co_code", "co_names", "co_consts", "co_varnames", "co_freevars"
