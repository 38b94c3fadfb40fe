"""OmniZoo: trains models of any modality; the model stays Hugging Face code, how it is distributed is a recipe.

The public API, enough to write the training loop by hand (examples/linear_train.py). Names are imported on first use,
so that the command line answers before torch is loaded.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "load_config": "omnizoo.config.load",
    "process_group": "omnizoo.parallel.process",
    "build_mesh": "omnizoo.parallel.mesh",
    "load_tokenizer": "omnizoo.models.build",
    "build_model": "omnizoo.models.build",
    "attend": "omnizoo.models.attention",
    "parallelize": "omnizoo.assembly.parallelize",
    "read_modalities": "omnizoo.assembly.entrance",
    "build_loader": "omnizoo.data.loader",
    "merge_states": "omnizoo.data.loader",
    "count_steps": "omnizoo.data.epochs",
    "build_optimizer": "omnizoo.training.optimizer",
    "Loss": "omnizoo.training.loss_contract",
    "Objective": "omnizoo.training.losses",
    "next_step": "omnizoo.training.step",
    "train_step": "omnizoo.training.step",
    "find": "omnizoo.checkpoint.start",
    "save": "omnizoo.checkpoint.save",
    "load": "omnizoo.checkpoint.save",
    "train": "omnizoo.training.run",
    "Engine": "omnizoo.training.engine",
    "Rollout": "omnizoo.data.rollouts",
    "Answer": "omnizoo.training.answer_metrics",
    "Callback": "omnizoo.training.callbacks",
    "Logger": "omnizoo.training.callbacks",
    "RowSource": "omnizoo.data.rows",
    "BadRow": "omnizoo.data.rows",
    "Encoder": "omnizoo.modalities.base",
    "Decoder": "omnizoo.modalities.base",
    "Size": "omnizoo.modalities.base",
    "BadMedia": "omnizoo.modalities.item",
    "Recipe": "omnizoo.recipes.base",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'omnizoo' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
