"""Fine-tune a patched model with LoRA (pip install peft), then merge the adapter and generate.

python examples/lora.py                             a tiny Llama with random weights
python examples/lora.py --model path/or/hub/name    any causal language model of transformers
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import attnops
from attnops.hf import tiny


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="folder or hub name; default a tiny Llama")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    torch.manual_seed(0)
    base = (
        AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
        if options.model
        else tiny.model("llama")
    )
    base = base.to("cuda" if torch.cuda.is_available() else "cpu")

    attnops.patch(base)  # before or after get_peft_model
    model = get_peft_model(
        base,
        LoraConfig(r=8, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    trained, everything = model.get_nb_trainable_parameters()
    print(f"{trained} of {everything} parameters are trained")

    text = torch.randint(
        3, base.config.vocab_size, (1, 24), device=base.device
    )  # to be learnt by heart
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model.train()
    losses = []
    for _ in range(options.steps):
        loss = model(text, labels=text, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.2f} before, {losses[-1]:.2f} after {options.steps} steps")
    assert losses[-1] < 0.7 * losses[0], "the loss did not fall"

    asked = {
        "max_new_tokens": 8,
        "do_sample": False,
        "attention_mask": torch.ones_like(text[:, :8]),
    }
    model.eval()
    adapted = model.generate(input_ids=text[:, :8], **asked)
    merged = model.merge_and_unload()  # the patch stays with the model
    same = torch.equal(merged.generate(text[:, :8], **asked), adapted)
    print("merged weights give", "the same tokens" if same else "NOT the same tokens")


if __name__ == "__main__":
    main()
