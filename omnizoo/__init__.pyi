"""Types of the public API. `omnizoo/__init__.py` imports each name on first use."""

from omnizoo.balancing.balancer import Balancer
from omnizoo.balancing.prefetch import next_step
from omnizoo.checkpoint.export import Exported
from omnizoo.checkpoint.export_run import export
from omnizoo.checkpoint.resume import find_checkpoint
from omnizoo.checkpoint.save import load_checkpoint, save_checkpoint
from omnizoo.cli.generate import generate
from omnizoo.config.errors import TrainingError, UserError
from omnizoo.config.load import load_config
from omnizoo.config.schema import Config
from omnizoo.config.sections.model import ModelSection
from omnizoo.config.sections.optimizer import OptimizerSection
from omnizoo.config.sections.train import TrainSection
from omnizoo.data.loading.loader import build_loader, merge_states
from omnizoo.data.loading.step_count import count_steps
from omnizoo.data.row import BadRow
from omnizoo.data.sources.base import RowSource
from omnizoo.generation.chat_model import ChatModel, load_chat_model
from omnizoo.modalities.base import CustomFlops, Decoder, Encoder, LikelihoodDecoder
from omnizoo.modalities.contract_checks import check_decoder, check_encoder
from omnizoo.modalities.decoders.image_tokenizers import fit_patch_codebook, save_patch_codebook
from omnizoo.modalities.item import Inputs, MediaSize
from omnizoo.modalities.media import BadMedia, Media
from omnizoo.modalities.sampling import Sampling
from omnizoo.models.build import build_model
from omnizoo.models.interfaces.attention import attend
from omnizoo.models.media.model_inputs import read_modalities
from omnizoo.models.read_config import load_tokenizer
from omnizoo.models.recipe import Recipe
from omnizoo.parallel.mesh import Mesh, build_mesh
from omnizoo.parallel.process import process_group
from omnizoo.parallelize.parallelize import parallelize_model
from omnizoo.reporting.report import ReportSection, write_report
from omnizoo.reporting.results import BestMetric, EvaluationResult, GeneratedResponse, TrainResult
from omnizoo.reporting.run_folder import RunFolder
from omnizoo.rl.engine import Engine
from omnizoo.rl.rollouts import Rollout
from omnizoo.training.callbacks.base import (
    Callback,
    EndEvent,
    EvaluationEvent,
    Logger,
    Request,
    SaveEvent,
    StartEvent,
    StepEvent,
)
from omnizoo.training.evaluation.answer_metrics import Answer
from omnizoo.training.evaluation.evaluate_checkpoint import evaluate
from omnizoo.training.local_batch import LocalBatch, run_model
from omnizoo.training.loop import train
from omnizoo.training.losses.base import Loss
from omnizoo.training.objective import Objective, build_objective
from omnizoo.training.optimizers.build import build_optimizer
from omnizoo.training.step import optimizer_step, train_step

__all__ = [
    "Answer",
    "BadMedia",
    "BadRow",
    "Balancer",
    "BestMetric",
    "Callback",
    "ChatModel",
    "Config",
    "CustomFlops",
    "Decoder",
    "Encoder",
    "EndEvent",
    "Engine",
    "EvaluationEvent",
    "EvaluationResult",
    "Exported",
    "GeneratedResponse",
    "Inputs",
    "LikelihoodDecoder",
    "LocalBatch",
    "Logger",
    "Loss",
    "Media",
    "MediaSize",
    "Mesh",
    "ModelSection",
    "Objective",
    "OptimizerSection",
    "Recipe",
    "ReportSection",
    "Request",
    "Rollout",
    "RowSource",
    "RunFolder",
    "Sampling",
    "SaveEvent",
    "StartEvent",
    "StepEvent",
    "TrainResult",
    "TrainSection",
    "TrainingError",
    "UserError",
    "attend",
    "build_loader",
    "build_mesh",
    "build_model",
    "build_objective",
    "build_optimizer",
    "check_decoder",
    "check_encoder",
    "count_steps",
    "evaluate",
    "export",
    "find_checkpoint",
    "fit_patch_codebook",
    "generate",
    "load_chat_model",
    "load_checkpoint",
    "load_config",
    "load_tokenizer",
    "merge_states",
    "next_step",
    "optimizer_step",
    "parallelize_model",
    "process_group",
    "read_modalities",
    "run_model",
    "save_checkpoint",
    "save_patch_codebook",
    "train",
    "train_step",
    "write_report",
]
