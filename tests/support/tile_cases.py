"""Shared pieces of ops/memory/test_tiles.py and other tests."""

from pathlib import Path
from typing import Any

from tiny import model_config, write_config

from omnizoo.config.load import load_config
from omnizoo.parallel.layout import Layout
from omnizoo.parallel.process import process_group
from omnizoo.verification.prepare import plain
from omnizoo.verification.trial import Trial, run_trial

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
MODELS = {
    "dense": model_config("qwen3"),
    "experts and a shared one": model_config("qwen3")
    | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 24}
    | EXPERTS,
}
LOSSES = [{"kind": "cross_entropy"}, {"kind": "balance", "weight": 0.1}, {"kind": "router_z", "weight": 0.01}]


def trial(folder: Path, name: str, **parallel: Any) -> tuple[Trial, Trial]:
    """With `parallel`, and plain."""
    train = {"steps": 1, "packs_per_step": 2} | ({"losses": LOSSES} if name != "dense" else {})
    path = write_config(folder, model={"config": MODELS[name]}, train=train | {"precision": "fp64"}, parallel=parallel)
    config = load_config(path, [])
    with process_group((0, 1, 0)) as process:
        return run_trial(config, Layout(), process), run_trial(plain(config), Layout(), process)
