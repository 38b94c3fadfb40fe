"""Shared pieces of checkpoint/test_export.py and other tests."""

from pathlib import Path
from typing import Any

import torch
from fixtures import make_tokenizer
from tiny import model_config
from transformers import AutoConfig, AutoModelForCausalLM


def publish(folder: Path, family: str = "qwen3", **changes: Any) -> Path:
    """A published model, as transformers writes it."""
    torch.manual_seed(2)
    fields = model_config(family) | changes
    AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields)).save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def from_folder(folder: Path, **options: Any) -> dict[str, dict[str, Any]]:
    return {"model": {"config": None, "path": str(folder), "tokenizer": None, **options}}
