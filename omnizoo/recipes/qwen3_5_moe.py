"""Qwen3.5 with experts in every layer; otherwise like dense Qwen3.5."""

from dataclasses import replace

from omnizoo.recipes import qwen3_5

RECIPE = replace(
    qwen3_5.RECIPE,
    about="Qwen3.5 35B-A3B and larger",
    blocks=("Qwen3_5MoeDecoderLayer", "Qwen3_5MoeVisionBlock"),
)
