"""`fa3` over latents through a stand-in of the op it wraps: views, lse, padding, stale pages, refusals, and compiled code."""

from dataclasses import replace

import torch

from attnops.core.kernel import kernels_of
from attnops.core.record import changed
from attnops.core.select import Policy, select
from attnops.ops.latent.cases import DEEPSEEK
from attnops.testing import Source, make_call

NAME = "fa3"
FA3 = kernels_of("mla_attention")["fa3"]
BF16, F32 = torch.bfloat16, torch.float32


def call(q_lens=(1, 2, 1), seq_lens=(70, 3, 130), page=64, f=DEEPSEEK, padding=1, **more):
    return make_call("mla_attention", Source(0), q_lens, seq_lens, page, f, padding, **more)


def test_parts_of_the_pages_are_views_and_the_output_is_written_in_place(standin):
    given = call()
    FA3.run(given.record)
    seen, pages = standin[-1], given.arguments["latent_pages"]
    assert (seen["k"].shape[2:], seen["v"].shape[2:]) == ((1, 64), (1, 512))
    assert (seen["v"].data_ptr(), seen["k"].data_ptr()) == (pages.data_ptr(), pages[..., 512:].data_ptr())
    assert seen["q_v"] is given.arguments["q_nope"] and seen["q"] is given.arguments["q_pe"]
    assert seen["out"] is given.arguments["output"] and seen["max_seqlen_q"] == 2
    assert (seen["softmax_scale"], seen["is_causal"], seen["num_splits"]) == (192**-0.5, True, 0)


def test_tma_is_avoided_where_it_would_load_stale_rows(standin):
    for page, heads, padded in ((64, 128, True), (64, 16, False), (16, 128, False), (96, 128, False), (128, 64, True)):
        given = call(page=page, f=replace(DEEPSEEK, q_heads=heads))
        FA3.run(given.record)
        assert (standin[-1]["leftpad_k"] is not None) == padded, (page, heads)


def test_one_split_under_a_deterministic_policy(standin):
    given = call((1, 1), (9, 30), padding=0)
    for policy, splits in (("", 0), ("deterministic", 1)):
        FA3.run(changed(given.record, policy=policy))
        assert standin[-1]["num_splits"] == splits and (standin[-1]["leftpad_k"] is not None) == bool(splits)
    assert select(given.problem, Policy(deterministic=True)).kernel is FA3


def test_prefill_is_its_own(standin):
    # FlashMLA takes one query a request at a time; of more, fa3 reads the latents once for all.
    many = call((300, 70), (300, 170), f=replace(DEEPSEEK, q_heads=128))
    assert select(many.problem).kernel is FA3
