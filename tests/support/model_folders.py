"""Small Hugging Face model folders with random weights, for tests of `omnizoo new`."""

import shutil
from pathlib import Path

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

ROOT = Path(__file__).parents[2]
DATA = ROOT / "examples/published/data"
MEDIA = {"qwen3_vl": "visual.jsonl", "qwen3_omni": "rows.jsonl"}
TEXT = {"vocab_size": 384, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def model_folder(kind: str, folder: Path) -> Path:
    """Save a small model with random weights and a tokenizer."""
    torch.manual_seed(0)
    if kind in MEDIA:
        fields = yaml.safe_load((ROOT / f"examples/published/{kind}.yaml").read_text())["model"]["config"]
        model = AutoModelForMultimodalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    else:
        family, fields = ("qwen3_moe", TEXT | EXPERTS) if kind == "moe" else ("qwen3", TEXT)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields))
    model.save_pretrained(folder)
    shutil.copytree(DATA / "tokenizer", folder, dirs_exist_ok=True)
    return folder
