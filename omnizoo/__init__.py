"""OmniZoo: train models of any modality. Models stay Hugging Face code, and recipes describe how to distribute them.

This module is the public API. It is sufficient to write a training loop by hand (examples/linear_train.py). Names are
imported on first use, so that the command line starts before torch is loaded.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "load_config": "omnizoo.config.load",
    "Config": "omnizoo.config.schema",
    "ModelSection": "omnizoo.config.sections.model",
    "TrainSection": "omnizoo.config.sections.train",
    "OptimizerSection": "omnizoo.config.sections.optimizer",
    "UserError": "omnizoo.config.errors",
    "TrainingError": "omnizoo.config.errors",
    "process_group": "omnizoo.parallel.process",
    "build_mesh": "omnizoo.parallel.mesh",
    "Mesh": "omnizoo.parallel.mesh",
    "load_tokenizer": "omnizoo.models.read_config",
    "build_model": "omnizoo.models.build",
    "attend": "omnizoo.models.interfaces.attention",
    "parallelize_model": "omnizoo.parallelize.parallelize",
    "read_modalities": "omnizoo.models.media.model_inputs",
    "build_loader": "omnizoo.data.loading.loader",
    "merge_states": "omnizoo.data.loading.loader",
    "count_steps": "omnizoo.data.loading.step_count",
    "build_optimizer": "omnizoo.training.optimizers.build",
    "Loss": "omnizoo.training.losses.base",
    "LocalBatch": "omnizoo.training.local_batch",
    "run_model": "omnizoo.training.local_batch",
    "Balancer": "omnizoo.balancing.balancer",
    "next_step": "omnizoo.balancing.prefetch",
    "Objective": "omnizoo.training.objective",
    "build_objective": "omnizoo.training.objective",
    "train_step": "omnizoo.training.step",
    "optimizer_step": "omnizoo.training.step",
    "find_checkpoint": "omnizoo.checkpoint.resume",
    "save_checkpoint": "omnizoo.checkpoint.save",
    "load_checkpoint": "omnizoo.checkpoint.save",
    "train": "omnizoo.training.loop",
    "evaluate": "omnizoo.training.evaluation.evaluate_checkpoint",
    "export": "omnizoo.checkpoint.export_run",
    "generate": "omnizoo.cli.generate",
    "TrainResult": "omnizoo.reporting.results",
    "BestMetric": "omnizoo.reporting.results",
    "EvaluationResult": "omnizoo.reporting.results",
    "GeneratedResponse": "omnizoo.reporting.results",
    "Exported": "omnizoo.checkpoint.export",
    "Engine": "omnizoo.rl.engine",
    "Rollout": "omnizoo.rl.rollouts",
    "Answer": "omnizoo.training.evaluation.answer_metrics",
    "Callback": "omnizoo.training.callbacks.base",
    "Logger": "omnizoo.training.callbacks.base",
    "Request": "omnizoo.training.callbacks.base",
    "StartEvent": "omnizoo.training.callbacks.base",
    "StepEvent": "omnizoo.training.callbacks.base",
    "EvaluationEvent": "omnizoo.training.callbacks.base",
    "SaveEvent": "omnizoo.training.callbacks.base",
    "EndEvent": "omnizoo.training.callbacks.base",
    "ChatModel": "omnizoo.generation.chat_model",
    "load_chat_model": "omnizoo.generation.chat_model",
    "RunFolder": "omnizoo.reporting.run_folder",
    "ReportSection": "omnizoo.reporting.report",
    "write_report": "omnizoo.reporting.report",
    "RowSource": "omnizoo.data.sources.base",
    "BadRow": "omnizoo.data.row",
    "Encoder": "omnizoo.modalities.base",
    "Decoder": "omnizoo.modalities.base",
    "CustomFlops": "omnizoo.modalities.base",
    "check_encoder": "omnizoo.modalities.contract_checks",
    "check_decoder": "omnizoo.modalities.contract_checks",
    "LikelihoodDecoder": "omnizoo.modalities.base",
    "MediaSize": "omnizoo.modalities.item",
    "Inputs": "omnizoo.modalities.item",
    "Sampling": "omnizoo.modalities.sampling",
    "Media": "omnizoo.modalities.media",
    "BadMedia": "omnizoo.modalities.media",
    "fit_patch_codebook": "omnizoo.modalities.decoders.image_tokenizers",
    "save_patch_codebook": "omnizoo.modalities.decoders.image_tokenizers",
    "Recipe": "omnizoo.models.recipe",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'omnizoo' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
