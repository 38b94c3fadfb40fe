"""Qwen3-VL 30B-A3B and 235B-A22B: Qwen3-VL with experts."""

from dataclasses import replace

from omnizoo.recipes import qwen3_vl

RECIPE = replace(
    qwen3_vl.RECIPE,
    about="Qwen3-VL 30B-A3B and 235B-A22B",
    blocks=("Qwen3VLMoeTextDecoderLayer", "Qwen3VLMoeVisionBlock"),
)
