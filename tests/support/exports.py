"""Model folders for checkpoint/test_export.py and other tests."""

from pathlib import Path
from typing import Any

import torch
from fixtures import make_tokenizer
from tiny import model_config
from transformers import AutoConfig, AutoModelForCausalLM


def publish(folder: Path, family: str = "qwen3", **changes: Any) -> Path:
    """Write a model with random weights as a Hugging Face folder."""
    torch.manual_seed(2)
    fields = model_config(family) | changes
    AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields)).save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def from_folder(folder: Path, **options: Any) -> dict[str, dict[str, Any]]:
    """Return the config section that loads a model folder."""
    return {"model": {"config": None, "path": str(folder), "tokenizer": None, **options}}
