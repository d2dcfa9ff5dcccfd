"""Pipelines of transformers work with a patched model as it is. (Its Trainer:
tests/hf/test_training_steps.py.)"""

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import attnops
from attnops.hf import tiny
from tests.adapters.helpers import Calls, block

WORDS = ["[PAD]", "[UNK]", "[EOS]", "[MASK]", *(f"w{i}" for i in range(100))]
PROMPTS = ["w1 w2 w3 w4 w5", "w6", "w7 w8 w9"]


@pytest.fixture(scope="module")
def tokenizer():
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(zip(("pad_token", "unk_token", "eos_token", "mask_token"), WORDS, strict=False))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", **names)


MASKED = ["w1 [MASK] w2", "w3 w4 w5 [MASK] w6"]
PIPELINES = {
    "text-generation": (
        "llama",
        PROMPTS,
        {"max_new_tokens": 6, "do_sample": False, "batch_size": 1},
    ),
    "text-generation of a batch": (
        "llama",
        PROMPTS,
        {"max_new_tokens": 6, "do_sample": False, "batch_size": 3},
    ),
    "fill-mask": ("bert", MASKED, {"batch_size": 2, "top_k": 3}),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines(tokenizer, name):
    family, texts, options = PIPELINES[name]
    model = tiny.model(family)

    def answers():
        pipe = transformers.pipeline(
            name.partition(" ")[0], model=model, tokenizer=tokenizer, device="cpu"
        )
        return [dict(answer) for found in pipe(texts, **options) for answer in found]

    want = answers()
    with attnops.patch(model), Calls() as calls:
        got = answers()
    assert {name for name in calls.names if name.startswith("attnops::")} == {"attnops::attention"}
    assert got == [
        {**answer, "score": pytest.approx(answer["score"], rel=1e-4)}
        if "score" in answer
        else answer
        for answer in want
    ]


def test_the_page(tokenizer):
    exec(block("transformers.pipeline"), {"model": tiny.model("llama"), "tokenizer": tokenizer})
