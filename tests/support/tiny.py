"""A run small enough for tests: models of some thousand weights, two sources of rows, a YAML that trains on them."""

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
# Between them: tied and own heads, grouped keys, softcaps, sliding windows shorter than samples, sinks, experts.
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
    """texts.jsonl and chats.jsonl; a sample is about 60 tokens at most, so a pack of 64 splits none."""
    dice, words = random.Random(0), TEXT.split()

    def say(most: int) -> str:
        return " ".join(dice.choices(words, k=dice.randint(1, most)))

    write_rows(folder / "texts.jsonl", [{"text": say(14)} for _ in range(1500)])
    turns = ("user", "assistant")
    chats = [{"messages": [{"role": role, "content": say(4)} for role in turns]} for _ in range(500)]
    write_rows(folder / "chats.jsonl", chats)


def write_config(folder: Path, **sections: dict[str, Any]) -> Path:
    """`folder`/tiny.yaml with rows and tokenizer next to it; `sections` are merged into it, key by key."""
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
    """The steps in a run's metrics.jsonl, read with plain JSON; a half-written last line is not there yet."""
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []
