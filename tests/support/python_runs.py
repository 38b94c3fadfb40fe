"""Rows, settings and a module for runs that are started from Python."""

from pathlib import Path
from typing import Any

import own_rows
import torch
from own_module import TinyModel

ROWS = own_rows.make()


def settings(tokenizer: Path, run: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model": {"tokenizer": str(tokenizer)},
        "data": {"pack_tokens": 64, "lanes": 4, "look_ahead": 8},
        "train": {"steps": 4, "packs_per_step": 4, "lr": 3e-3, "schedule": "constant"},
        "log": {"dir": str(run), "tensorboard": False},
    }
    return {name: config.get(name, {}) | sections.get(name, {}) for name in {*config, *sections}}


def plugin_model(seed: int = 0) -> TinyModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TinyModel(512, 32, 4, 2)
