"""What the machine's matrix multiplications would allow: real tokens per CPU second, if a step were nothing else."""

import json
import time
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

ROWS, WIDTH, INNER, VOCABULARY = 1024, 512, 1536, 32_000
TIMES = 5


def matmul_rate() -> float:
    """FLOPs per CPU second on one thread, fp32, over the products of a step of the dense model; the best of some."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    shapes = [(WIDTH, INNER)] * 16 + [(INNER, WIDTH)] * 8 + [(WIDTH, WIDTH)] * 12 + [(WIDTH, VOCABULARY)]
    flops = sum(2 * ROWS * given * made for given, made in shapes)
    rows = {size: torch.randn(ROWS, size) for size in (WIDTH, INNER)}
    weights = {shape: torch.randn(shape[1], shape[0]) for shape in shapes}
    best = float("inf")
    for _ in range(TIMES):
        began = time.process_time()
        for given, made in shapes:
            rows[given] @ weights[given, made].t()
        best = min(best, time.process_time() - began)
    torch.set_num_threads(threads)
    return flops / best


def flops_per_token(folder: Path) -> float | None:
    """Of forward and backward: products with weights, and attention over what a token sees. None for the composed
    model, whose config is OmniZoo's."""
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
        if "visual" in name:  # a place of the text is four patches
            share = stats["pictured"] * (1 if "merger" in name else 4)
        if isinstance(module, nn.Linear):
            weights += share * module.weight.numel()
        for parameter in module.parameters(recurse=False):
            if parameter.ndim == 3:  # of experts
                weights += parameter.numel() * text.num_experts_per_tok / text.num_experts
    seen = text.num_hidden_layers * text.num_attention_heads * (text.hidden_size // text.num_attention_heads)
    return 6 * weights + 12 * seen * stats["context"]
