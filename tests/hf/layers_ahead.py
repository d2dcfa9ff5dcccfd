"""Tiny checkpoints with an MTP layer, under the names of public ones."""

import torch
from safetensors.torch import save_file

from attnops.nn import MTPLayer


def layer_of(model, seed=7):
    """An MTP layer with random weights, and the model's embeddings and last linear. It is given its
    rotation."""
    config, decoder = model.config.get_text_config(), model.get_decoder()
    like = next(each for each in reversed(decoder.layers) if hasattr(each, "self_attn"))
    torch.manual_seed(seed)
    layer = type(like)(like.self_attn.config, like.self_attn.layer_idx)
    made = MTPLayer(config.to_dict(), layer, norm=type(decoder.norm))
    with torch.no_grad():
        for each in made.parameters():
            each.add_(torch.randn_like(each) * 0.1) if each.dim() == 1 else each.normal_(0, 0.2)
        for each in made.buffers():
            each.normal_(0, 0.1)
    made.embed_tokens = model.get_input_embeddings()
    made.shared_head["head"] = model.get_output_embeddings()
    return made.eval()


QWEN = {
    "eh_proj.": "fc.",
    "enorm.": "pre_fc_norm_embedding.",
    "hnorm.": "pre_fc_norm_hidden.",
    "shared_head.norm.": "norm.",
    "layer.": "layers.0.",
}


def public(model, layer):
    """The tensors of an MTP layer as the checkpoints of its family name them."""
    qwen = model.config.model_type.startswith("qwen")
    found = {}
    for name, each in layer.state_dict().items():
        if qwen and name.startswith(("embed_tokens.", "shared_head.head.")):
            continue
        if qwen:
            theirs = next(old for old in QWEN if name.startswith(old))
            name = "mtp." + QWEN[theirs] + name.removeprefix(theirs)
        else:
            number = model.config.num_hidden_layers
            name = f"model.layers.{number}.{name.removeprefix('layer.')}"
        found |= apart(name, each)
    return {name: each.clone() for name, each in found.items()}


def apart(name, tensor):
    """The experts of a tensor, by their own names."""
    room, _, kind = name.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind)
    if parts is None:
        return {name: tensor}
    return {
        f"{room}.{number}.{part}.weight": half
        for number, each in enumerate(tensor)
        for part, half in zip(parts, each.chunk(len(parts)), strict=True)
    }


def saved(model, folder, tensors):
    """Save a model, and these tensors beside its own. It is then one that came from there."""
    model.save_pretrained(folder)
    save_file(tensors, folder / "mtp.safetensors")
    model.config.name_or_path = str(folder)
