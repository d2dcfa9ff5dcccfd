"""Embed texts of different lengths without padding: packed into one row, they get the embeddings
that a padded batch gives.

python examples/embeddings.py                             a tiny BERT with random weights
python examples/embeddings.py --model path/or/hub/name    any model of sentence-transformers
"""

import argparse
import tempfile
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules.transformer import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import attnops
from attnops.hf import tiny

TEXTS = [
    "the kernel is chosen when the graph is lowered",
    "when the graph is lowered the kernel is chosen",
    "padding",
    "a longer text has more tokens than a short one , and a batch of both is padded to the longest",
]


def tiny_model() -> SentenceTransformer:
    words = {
        word: i for i, word in enumerate(["[PAD]", "[UNK]", *sorted(set(" ".join(TEXTS).split()))])
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with tempfile.TemporaryDirectory() as folder:
        tiny.model("bert").bert.save_pretrained(folder)
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
        ).save_pretrained(folder)
        return SentenceTransformer(modules=[Transformer(folder), Pooling(64, pooling_mode="mean")])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="folder or hub name; default a tiny BERT")
    options = parser.parse_args()
    model: Any = SentenceTransformer(options.model) if options.model else tiny_model()

    def embed(how: str) -> torch.Tensor:
        print(
            f"{how}: {model.preprocess(TEXTS)['input_ids'].numel()} tokens for {len(TEXTS)} texts"
        )
        return model.encode(TEXTS, convert_to_tensor=True)

    padded = embed("padded")
    attnops.patch(model)
    packed = embed("packed")
    print(
        "smallest cosine of a text's two embeddings: "
        f"{torch.cosine_similarity(padded, packed).min():.4f}"
    )
    torch.testing.assert_close(packed, padded, rtol=1e-2, atol=1e-3)


if __name__ == "__main__":
    main()
