"""Language models of two layers with adapters. Nothing is downloaded; imported by workers too."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

__all__ = ["KINDS", "base_model", "generated", "train", "with_adapters"]

TARGETS = {"gpt2": ["c_attn", "c_fc"], "llama": ["q_proj", "v_proj"], "qwen2": ["q_proj", "up_proj"]}
"""Kind of model -> the layers that get an adapter."""

KINDS = tuple(TARGETS)
"""The output layer of ``gpt2`` and ``qwen2`` is tied to the embedding."""

_TOKENS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}


def base_model(kind: str, seed: int = 0) -> Any:
    """A model of this kind. The same seed gives the same weights."""
    torch.manual_seed(seed)
    if kind == "gpt2":
        sizes: dict[str, Any] = {"vocab_size": 64, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
        return GPT2LMHeadModel(GPT2Config(**sizes, **_TOKENS)).eval()
    sizes = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
    }
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes, **_TOKENS)).eval()
    return Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True, **_TOKENS)).eval()


def with_adapters(kind: str, seed: int = 0, **options: Any) -> Any:
    """The same with an adapter that changes nothing yet, in evaluation mode."""
    options = {"r": 2, "lora_alpha": 4, "target_modules": TARGETS[kind], **options}
    return get_peft_model(base_model(kind, seed), LoraConfig(fan_in_fan_out=kind == "gpt2", **options)).eval()


def train(model: nn.Module) -> None:
    """Change all that is trained, by much."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))


def generated(model: Any) -> tuple[list[int], Tensor]:
    """The tokens that the model generates, and the logits of the prompt."""
    prompt = torch.tensor([[1, 7, 3]])
    with torch.no_grad():
        logits = model(input_ids=prompt).logits
        mask = torch.ones_like(prompt)
        tokens = model.generate(
            input_ids=prompt, attention_mask=mask, min_new_tokens=8, max_new_tokens=8, do_sample=False
        )
    return tokens[0].tolist(), logits
