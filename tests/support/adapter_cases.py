"""Models for models/adapters/test_lora.py and other tests."""

from pathlib import Path
from typing import Any

import torch
from fixtures import make_tokenizer
from tiny import model_config
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).parents[2]

MOE: dict[str, Any] = model_config("qwen3") | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def publish(folder: Path) -> Path:
    """Write a mixture of experts with random weights and a tokenizer as a Hugging Face folder."""
    torch.manual_seed(2)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**MOE)).save_pretrained(folder)
    make_tokenizer(folder)
    return folder


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    ids = torch.arange(40, 72)[None]
    return model.eval()(ids).logits
