"""A run small enough for tests: models with a few thousand weights, two row sources and a config."""

import json
import random
from pathlib import Path
from typing import Any

import yaml
from fixtures import TEXT, make_tokenizer

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
# Together they cover tied and untied heads, grouped keys, softcaps, short sliding windows, sinks and experts.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "llama": {},
    "gemma2": {"sliding_window": 5, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "gpt_oss": {"sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def model_config(family: str) -> dict[str, Any]:
    return {"model_type": family} | SHAPE | FAMILIES[family]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_rows(folder: Path) -> None:
    """Write texts.jsonl and chats.jsonl. A sample has at most about 60 tokens, so a pack of 64 tokens splits none."""
    rng = random.Random(0)
    words = TEXT.split()

    def random_text(max_words: int) -> str:
        return " ".join(rng.choices(words, k=rng.randint(1, max_words)))

    write_rows(folder / "texts.jsonl", [{"text": random_text(14)} for _ in range(1500)])
    turns = ("user", "assistant")
    chats = [{"messages": [{"role": role, "content": random_text(4)} for role in turns]} for _ in range(500)]
    write_rows(folder / "chats.jsonl", chats)


def write_config(folder: Path, **sections: dict[str, Any]) -> Path:
    """Write tiny.yaml with rows and a tokenizer into `folder`; `sections` override its keys."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder / "tokenizer")
    make_rows(folder)
    config: dict[str, dict[str, Any]] = {
        "model": {"config": model_config("qwen3"), "tokenizer": str(folder / "tokenizer")},
        "data": {
            "sources": [{"path": str(folder / "texts.jsonl"), "weight": 3.0}, {"path": str(folder / "chats.jsonl")}],
            "pack_tokens": 96,
            "lanes": 4,
            "look_ahead": 8,
        },
        "train": {"steps": 20, "packs_per_step": 8, "lr": 3e-3, "warmup_steps": 5},
        "optimizer": {},
        "parallel": {},
        "checkpoint": {},
        "evaluation": {},
        "log": {"dir": str(folder / "run"), "tensorboard": False},
    }
    for section, keys in sections.items():
        config[section] = config[section] | keys
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def read_steps(run: Path) -> list[dict[str, Any]]:
    """Return the steps in metrics.jsonl of a run, without an incomplete last line."""
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []
