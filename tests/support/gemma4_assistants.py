"""Tiny random assistants of Gemma 4, written by transformers, and what they guess."""

import copy
from pathlib import Path

import torch
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM,
)

CLASSES = {
    "gemma4_text": (Gemma4AssistantConfig, Gemma4AssistantForCausalLM),
    "gemma4_unified_text": (Gemma4UnifiedAssistantConfig, Gemma4UnifiedAssistantForCausalLM),
}


def write_assistant(folder: Path, target, **overrides):
    """Writes an assistant for transformers' model of a target, and returns transformers' of it."""
    config_class, model_class = CLASSES[target.config.model_type]
    text = copy.deepcopy(target.config)
    stored = text.to_dict()
    # Of the last layer, which has no window.
    of_global = stored["per_layer_config"][str(len(text.layer_types) - 1)]
    fields = {
        **stored,
        "per_layer_config": {"2": of_global},
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_kv_shared_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
    }
    own = type(text)(**fields)
    config = config_class(text_config=own, backbone_hidden_size=text.hidden_size, **overrides)
    config._attn_implementation = own._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model = model_class(config).eval()
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            with torch.no_grad():
                if name.endswith("token_ordering"):
                    tensor.copy_(torch.randperm(len(tensor)))
                elif name.endswith(("norm.weight", "layer_scalar")):
                    tensor.normal_(1.0, 0.3)
                elif tensor.dim() == 2:
                    tensor.normal_(0.0, 0.4)
    model.save_pretrained(folder)
    # transformers lets layers with a window see a key more than the target's of the same window.
    model.config.get_text_config().sliding_window -= 1
    return model


@torch.inference_mode()
def guesses(target, assistant, token_ids: list[int], num_drafts: int) -> list[int]:
    """Returns what transformers' assistant guesses after tokens of which the last is the newest.

    The caches hold what the target makes of the tokens before it, as after a prompt.
    """
    known = target(
        torch.tensor([token_ids[:-1]]), output_hidden_states=True, return_shared_kv_states=True
    )
    hidden = known.hidden_states[-1][:, -1:]
    newest = torch.tensor([token_ids[-1:]])
    positions = torch.tensor([[len(token_ids) - 1]])
    made = []
    for _ in range(num_drafts):
        embedded = target.get_input_embeddings()(newest)
        output = assistant(
            inputs_embeds=torch.cat((embedded, hidden), dim=-1),
            position_ids=positions,
            shared_kv_states=known.shared_kv_states,
        )
        newest, hidden = output.logits.argmax(-1), output.last_hidden_state
        made.append(int(newest))
    return made
