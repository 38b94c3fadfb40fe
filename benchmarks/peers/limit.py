"""The matmul limit: real tokens per CPU second of a step that consists of matmuls only, on this machine."""

import json
import time
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

ROWS, WIDTH, INNER, VOCABULARY = 1024, 512, 1536, 32_000
REPETITIONS = 5


def matmul_rate() -> float:
    """Return FLOPs per CPU second of the matmuls of a dense step, in fp32 on one thread (best of several)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    shapes = [(WIDTH, INNER)] * 16 + [(INNER, WIDTH)] * 8 + [(WIDTH, WIDTH)] * 12 + [(WIDTH, VOCABULARY)]
    flops = sum(2 * ROWS * in_features * out_features for in_features, out_features in shapes)
    rows = {size: torch.randn(ROWS, size) for size in (WIDTH, INNER)}
    weights = {shape: torch.randn(shape[1], shape[0]) for shape in shapes}
    best = float("inf")
    for _ in range(REPETITIONS):
        start = time.process_time()
        for in_features, out_features in shapes:
            rows[in_features] @ weights[in_features, out_features].t()
        best = min(best, time.process_time() - start)
    torch.set_num_threads(threads)
    return flops / best


def flops_per_token(folder: Path) -> float | None:
    """Return the FLOPs per token of forward and backward: matmuls with weights, and attention.

    None for the composed model, whose config is OmniZoo's.
    """
    stats = json.loads((folder / "stats.json").read_text())
    if not stats:
        return None
    config = AutoConfig.from_pretrained(folder)
    text = config.get_text_config()
    kind = AutoModelForImageTextToText if stats["pictured"] else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(config)
    weights = 0.0
    for name, module in model.named_modules():
        share = 1.0
        if "visual" in name:  # four patches become one placeholder token
            share = stats["pictured"] * (1 if "merger" in name else 4)
        if isinstance(module, nn.Linear):
            weights += share * module.weight.numel()
        for parameter in module.parameters(recurse=False):
            if parameter.ndim == 3:  # experts
                weights += parameter.numel() * text.num_experts_per_tok / text.num_experts
    attention_width = text.num_hidden_layers * text.num_attention_heads * (text.hidden_size // text.num_attention_heads)
    return 6 * weights + 12 * attention_width * stats["context"]
