"""Types of the public API. `omnizoo/__init__.py` imports each name on first use."""

from omnizoo.balancing.balancer import Balancer as Balancer
from omnizoo.balancing.prefetch import next_step as next_step
from omnizoo.checkpoint.resume import find_checkpoint as find_checkpoint
from omnizoo.checkpoint.save import load_checkpoint as load_checkpoint
from omnizoo.checkpoint.save import save_checkpoint as save_checkpoint
from omnizoo.config.errors import UserError as UserError
from omnizoo.config.load import load_config as load_config
from omnizoo.config.schema import Config as Config
from omnizoo.config.sections.model import ModelSection as ModelSection
from omnizoo.config.sections.optimizer import OptimizerSection as OptimizerSection
from omnizoo.config.sections.train import TrainSection as TrainSection
from omnizoo.data.loading.loader import build_loader as build_loader
from omnizoo.data.loading.loader import merge_states as merge_states
from omnizoo.data.loading.step_count import count_steps as count_steps
from omnizoo.data.row import BadRow as BadRow
from omnizoo.data.sources.base import RowSource as RowSource
from omnizoo.generation.chat_model import ChatModel as ChatModel
from omnizoo.generation.chat_model import load_chat_model as load_chat_model
from omnizoo.modalities.base import (
    CustomFlops as CustomFlops,
)
from omnizoo.modalities.base import (
    Decoder as Decoder,
)
from omnizoo.modalities.base import (
    Encoder as Encoder,
)
from omnizoo.modalities.base import (
    LikelihoodDecoder as LikelihoodDecoder,
)
from omnizoo.modalities.contract_checks import check_decoder as check_decoder
from omnizoo.modalities.contract_checks import check_encoder as check_encoder
from omnizoo.modalities.decoders.image_tokenizers import (
    fit_patch_codebook as fit_patch_codebook,
)
from omnizoo.modalities.decoders.image_tokenizers import (
    save_patch_codebook as save_patch_codebook,
)
from omnizoo.modalities.item import Inputs as Inputs
from omnizoo.modalities.item import MediaSize as MediaSize
from omnizoo.modalities.media import BadMedia as BadMedia
from omnizoo.modalities.media import Media as Media
from omnizoo.modalities.sampling import Sampling as Sampling
from omnizoo.models.build import build_model as build_model
from omnizoo.models.interfaces.attention import attend as attend
from omnizoo.models.media.model_inputs import read_modalities as read_modalities
from omnizoo.models.read_config import load_tokenizer as load_tokenizer
from omnizoo.models.recipe import Recipe as Recipe
from omnizoo.parallel.mesh import Mesh as Mesh
from omnizoo.parallel.mesh import build_mesh as build_mesh
from omnizoo.parallel.process import process_group as process_group
from omnizoo.parallelize.parallelize import parallelize_model as parallelize_model
from omnizoo.reporting.report import ReportSection as ReportSection
from omnizoo.reporting.report import write_report as write_report
from omnizoo.reporting.run_folder import RunFolder as RunFolder
from omnizoo.rl.engine import Engine as Engine
from omnizoo.rl.rollouts import Rollout as Rollout
from omnizoo.training.callbacks.base import (
    Callback as Callback,
)
from omnizoo.training.callbacks.base import (
    EndEvent as EndEvent,
)
from omnizoo.training.callbacks.base import (
    EvaluationEvent as EvaluationEvent,
)
from omnizoo.training.callbacks.base import (
    Logger as Logger,
)
from omnizoo.training.callbacks.base import (
    Request as Request,
)
from omnizoo.training.callbacks.base import (
    SaveEvent as SaveEvent,
)
from omnizoo.training.callbacks.base import (
    StartEvent as StartEvent,
)
from omnizoo.training.callbacks.base import (
    StepEvent as StepEvent,
)
from omnizoo.training.evaluation.answer_metrics import Answer as Answer
from omnizoo.training.local_batch import LocalBatch as LocalBatch
from omnizoo.training.local_batch import run_model as run_model
from omnizoo.training.loop import train as train
from omnizoo.training.losses.base import Loss as Loss
from omnizoo.training.objective import Objective as Objective
from omnizoo.training.objective import build_objective as build_objective
from omnizoo.training.optimizers.build import build_optimizer as build_optimizer
from omnizoo.training.step import optimizer_step as optimizer_step
from omnizoo.training.step import train_step as train_step

__all__ = [
    "Answer",
    "BadMedia",
    "BadRow",
    "Balancer",
    "Callback",
    "ChatModel",
    "Config",
    "CustomFlops",
    "Decoder",
    "Encoder",
    "EndEvent",
    "Engine",
    "EvaluationEvent",
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
    "TrainSection",
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
    "find_checkpoint",
    "fit_patch_codebook",
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
