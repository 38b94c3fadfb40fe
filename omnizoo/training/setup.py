"""Set-up before the first step: process group, model, data, optimizer and objective.

`train`, `eval`, `rl.Engine`, `verify` and `plan` share `build_bundle` and `set_up_training`. The first three also share
`joined_world`. `prepare_run` sets up a complete training run.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers.utils import logging as transformers_logging

from omnizoo.balancing.balancer import Balancer
from omnizoo.balancing.prefetch import Prefetcher
from omnizoo.balancing.step_data import StepData
from omnizoo.checkpoint.resume import StartingPoint, find_checkpoint
from omnizoo.checkpoint.save import load_checkpoint, read_saved_state
from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.config.schema import Config
from omnizoo.data.loading.held_out import held_out_config
from omnizoo.data.loading.lane_stream import LoadingStopped
from omnizoo.data.loading.loader import Loader, build_loader
from omnizoo.data.loading.reader import Reader, build_reader
from omnizoo.data.loading.step_count import count_steps
from omnizoo.data.loading.workers import start_server, worker_count
from omnizoo.data.packing.pack import Pack
from omnizoo.data.sources.base import RowSource
from omnizoo.models.adapters.record import adapter_record
from omnizoo.models.build import build_model, check_vocabulary
from omnizoo.models.chat_tokenizer import load_chat_tokenizer
from omnizoo.models.diffusion.recipe import denoiser_recipe
from omnizoo.models.hf_private import PublishedKeys, most_positions
from omnizoo.models.media.model_inputs import read_modalities
from omnizoo.ops.determinism import deterministic_algorithms
from omnizoo.ops.device import is_host, use_tensor_cores
from omnizoo.parallel.downloads import download_on_ranks
from omnizoo.parallel.errors import sync_errors
from omnizoo.parallel.mesh import Mesh, build_mesh
from omnizoo.parallel.process import process_group
from omnizoo.parallelize.parallelize import parallelize_model
from omnizoo.reporting.run_folder import RunFolder
from omnizoo.reporting.start_clock import StartClock
from omnizoo.training.callbacks.base import Callback
from omnizoo.training.callbacks.best_checkpoint import check_metrics
from omnizoo.training.callbacks.build import user_callbacks, watchers
from omnizoo.training.callbacks.dispatcher import Callbacks
from omnizoo.training.callbacks.loggers import built_in_loggers
from omnizoo.training.denoising.reader_inputs import Simulated, denoiser_inputs
from omnizoo.training.evaluation.held_out import Evaluator, read_parts
from omnizoo.training.losses.base import NamedLoss
from omnizoo.training.objective import Objective, build_objective
from omnizoo.training.optimizers.build import build_optimizer
from omnizoo.training.overlong_warnings import OverlongWarnings
from omnizoo.training.preflight import check_model, check_plugins, check_rows, lock_folders
from omnizoo.training.recompute_budget import apply_recompute_budget
from omnizoo.training.state import TrainState
from omnizoo.training.stop_signal import StopSignal

T = TypeVar("T")


@dataclass(frozen=True)
class ModelBundle:
    """A model without weights, and its tokenizer. The bundle builds data readers for the model."""

    config: Config
    tokenizer: Any  # None if no tokenizer is needed
    model: nn.Module  # on the meta device until `set_up_training`
    simulated: Simulated | None = None  # how items of a diffusion transformer are simulated, in `verify` and `plan`

    @cached_property
    def media(self) -> dict[str, Any]:
        """Arguments of readers and loaders that depend on the model. Read them before the model is sharded."""
        if denoiser_recipe(self.model) is not None:
            return denoiser_inputs(self.config, self.simulated)
        return read_modalities(self.model, self.config.model) | {"most_positions": most_positions(self.model)}

    def reader(self, sources: Sequence[RowSource] | None = None) -> Reader:
        """Return a reader of `sources` (default: `data.sources`)."""
        return build_reader(self.config, self.tokenizer, **self.media, sources=sources)

    def held_out_reader(self) -> Reader | None:
        """Return a reader of `data.eval_sources`; None if the run never evaluates."""
        config = held_out_config(self.config)
        if not config.evaluation.every:
            return None
        return build_reader(config, self.tokenizer, **self.media)

    def loader(self, mesh: Mesh) -> Loader:
        """Return the loader of this rank."""
        return build_loader(self.config, self.tokenizer, mesh.rank, mesh.layout.world, **self.media)


@dataclass(frozen=True)
class TrainingSetup:
    """A sharded model with weights, and its optimizer, objective and balancer."""

    config: Config
    mesh: Mesh
    model: nn.Module
    tokenizer: Any
    start: StartingPoint
    adapter: dict[str, Any] | None  # stored in checkpoints; None without an adapter
    optimizer: torch.optim.Optimizer | None  # None for evaluation
    objective: Objective
    balancer: Balancer
    saved: Mapping[str, Any]  # `state.json` of the checkpoint that the run resumes from; empty for a new run
    published_keys: PublishedKeys | None  # published names of the weights, if `checkpoint.export` is set

    def identity(self) -> dict[str, Any]:
        """Return the run id and the adapter record. Every checkpoint of the run stores them."""
        record: dict[str, Any] = {"run": self.start.run}
        if self.adapter is not None:
            record["adapter"] = self.adapter
        return record


@dataclass(frozen=True)
class RunContext:
    """All parts of a training run, built by `prepare_run`."""

    config: Config
    mesh: Mesh
    setup: TrainingSetup
    optimizer: torch.optim.Optimizer
    state: TrainState
    folder: RunFolder
    checkpoint_dir: Path
    callbacks: Callbacks
    evaluator: Evaluator
    reader: Reader
    overlong: OverlongWarnings
    steps: Prefetcher
    first_step: StepData
    recompute: str  # description of the recomputed blocks, for the start-up table
    stop: StopSignal
    prepared_at: float  # `time.perf_counter()` before the first step was loaded

    @property
    def objective(self) -> Objective:
        return self.setup.objective

    @property
    def stop_requested(self) -> bool:
        """Whether a signal or a callback on this rank requested to stop."""
        return bool(self.stop) or self.callbacks.wants_to_stop


def load_run_config(config: str | Path | Mapping[str, Any] | Config, **objects: Any) -> Config:
    """Return the config of a run. Python objects replace paths in the config.

    Args:
        config: Path of a YAML file, a mapping, or a config.
        **objects: `model`, `tokenizer`, `data` and `eval_data`; None to use the settings of the config.
    """
    if isinstance(config, Config) and all(value is None for value in objects.values()):
        return config
    return load_config(config, objects=objects)


@contextmanager
def joined_world(
    config: Config,
    on_failure: Callable[[int, BaseException], None] | None = None,
    has_loader: bool = True,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[Config, Mesh]]:
    """Context manager that joins the process group and builds the mesh.

    Args:
        config: The config of the run.
        on_failure: Called with the rank and the error when a rank fails.
        has_loader: Whether a loader reads the steps. Without a loader, the size of a step is set to match the number of
            ranks.
        stop_requested: Whether to stop waiting for other ranks.

    Yields:
        The config, including settings that depend on the device, and the mesh.
    """
    timeout = config.parallel.join_timeout
    deterministic = deterministic_algorithms(config.train.deterministic)
    joined = process_group(on_failure=on_failure, join_timeout=timeout, stop_requested=stop_requested)
    with joined as process, deterministic:
        config = resolve_precision(config, process.device)
        if not has_loader:
            config = config.with_packs_per_step(process.world_size * config.train.micro_batch)
        elif worker_count(config.data.workers):
            start_server()  # start it now, because starting takes seconds
        mesh = build_mesh(config, process)
        set_up_logging(mesh)
        yield download_on_ranks(config, mesh, process.local_rank), mesh


def resolve_precision(config: Config, device: torch.device) -> Config:
    """Return `config` with its precision set. If the config sets none, accelerators use bf16."""
    if "precision" not in config.train.model_fields_set and not is_host(device):
        config = config.changed(train={"precision": "bf16"})
    if config.train.precision == "bf16":
        use_tensor_cores(device)
    return config


def set_up_logging(mesh: Mesh) -> None:
    """Configure logging, so that only rank 0 logs."""
    level = logging.INFO if mesh.is_first else logging.CRITICAL
    logging.basicConfig(level=level, format="%(levelname)s: %(message)s")
    if not mesh.is_first:
        transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()


def build_bundle(config: Config, tokenizer_required: bool = True) -> ModelBundle:
    """Build the model on the meta device and load its tokenizer.

    Args:
        config: The config of the run.
        tokenizer_required: Whether to load the tokenizer. `plan` works without one.

    Raises:
        UserError: If the model cannot be built, or the tokenizer has more tokens than the model.
    """
    model = build_model(config.model, config.train.precision)
    needs_tokenizer = tokenizer_required and denoiser_recipe(model) is None
    tokenizer = load_chat_tokenizer(config) if needs_tokenizer else None
    if tokenizer is not None:
        check_vocabulary(model, tokenizer)
    return ModelBundle(config, tokenizer, model)


def set_up_training(
    bundle: ModelBundle,
    mesh: Mesh,
    start: StartingPoint,
    *,
    has_optimizer: bool = True,
    losses: Sequence[NamedLoss] | None = None,
    fill: Callable[[nn.Module], None] | None = None,
    done: Callable[[str], None] = lambda part: None,
) -> TrainingSetup:
    """Shard the model, load its weights, and build optimizer, balancer and objective.

    Collective: all ranks must call it, except in a dry run.

    Args:
        bundle: The model without weights.
        mesh: The mesh to distribute the model over.
        start: The checkpoint to start from, if any.
        has_optimizer: Whether to build an optimizer. Evaluation needs none.
        losses: Losses to use instead of `train.losses`.
        fill: Sets the weights of the sharded model in a dry run. By default, weights are loaded.
        done: Called with the name of each part of the set-up when it is finished.

    Raises:
        UserError: If weights, optimizer or losses do not fit the model.
    """
    model, config = bundle.model, bundle.config
    is_dry_run = fill is not None  # one rank of a simulated world, without collectives

    def on_all_ranks(work: Callable[[], T]) -> T:
        return work() if is_dry_run else sync_errors(mesh, work)

    adapter = None
    if not is_dry_run:
        local_record = on_all_ranks(lambda: adapter_record(model, config) if mesh.is_first else None)
        adapter = mesh.from_first(local_record)
    published_keys = PublishedKeys(model) if config.checkpoint.export else None  # before the model is sharded
    loads_weights = not is_dry_run and (start.checkpoint is None or adapter is not None)
    on_all_ranks(lambda: parallelize_model(model, mesh, config, load=loads_weights, done=done))
    if fill is not None:
        fill(model)
    optimizer = on_all_ranks(lambda: build_optimizer(model, config)) if has_optimizer else None
    model.train()
    done("optimizer")
    saved = load_checkpoint(start, model, optimizer, adapter and adapter["base"])
    done("weights")  # includes the optimizer state of the checkpoint
    return TrainingSetup(
        config=config,
        mesh=mesh,
        model=model,
        tokenizer=bundle.tokenizer,
        start=start,
        adapter=adapter,
        optimizer=optimizer,
        objective=on_all_ranks(lambda: build_objective(model, mesh, config, losses)),
        balancer=Balancer(model, mesh, config),
        saved=saved,
        published_keys=published_keys,
    )


def prepare_run(
    config: Config,
    mesh: Mesh,
    callbacks: Sequence[Callback],
    stop: StopSignal,
    clock: StartClock,
    resources: ExitStack,
) -> RunContext | None:
    """Check and set up everything that a training run needs, including the data of its first step.

    Collective: all ranks must call it.

    Args:
        config: The config of the run.
        mesh: The mesh, from `joined_world`.
        callbacks: The callbacks that were passed to `train`.
        stop: Records whether a signal requested to stop this process.
        clock: Measures the duration of each part of the start-up.
        resources: Exit stack that unlocks folders and ends prefetching when it is closed.

    Returns:
        The parts of the run; None if the checkpoint is already at the last step, or if a signal stopped the run.

    Raises:
        UserError: If the run cannot start.
    """
    clock.done("process group")
    folder = RunFolder(Path(config.log.dir))
    checkpoint_dir = Path(config.checkpoint.dir) if config.checkpoint.dir else folder.checkpoints
    lock_folders(folder, checkpoint_dir, mesh, resources)
    plugins = sync_errors(
        mesh, lambda: [*built_in_loggers(config, folder), *user_callbacks(config, callbacks)] if mesh.is_first else []
    )
    check_plugins(config)
    bundle = sync_errors(mesh, lambda: build_bundle(config))
    check_model(bundle.model, config, mesh, checkpoint_dir)
    clock.done("model")
    loader, held_out_reader, held_out_packs = _open_data(bundle, mesh)
    clock.done("data")

    start = find_checkpoint(config, checkpoint_dir, mesh)
    saved = read_saved_state(start)
    state = TrainState.from_checkpoint(saved)
    if saved:
        _restore_loader(loader, saved, start, mesh)
    config = count_steps(config, loader.reader, mesh, saved.get("steps"))
    if state.step >= config.train.steps:
        _print_nothing_to_do(config, mesh, start, state)
        return None

    setup = set_up_training(replace(bundle, config=config), mesh, start, done=clock.done)
    assert setup.optimizer is not None
    entries = [*watchers(config, start.run), *plugins] if mesh.is_first else []
    dispatcher = Callbacks(entries, active=mesh.is_first)
    dispatcher.load_state_dict(saved.get("callbacks", {}))

    prepared_at = time.perf_counter()
    evaluator = Evaluator(setup.objective, setup.balancer, held_out_packs, held_out_reader, folder)
    if held_out_reader is not None:
        check_metrics(config, evaluator.metric_names())
    num_steps = config.train.steps - state.step
    prefetcher = Prefetcher(loader, setup.balancer, num_steps, setup.objective.phases, lambda: bool(stop))
    steps = resources.enter_context(prefetcher)
    try:
        first_step = steps.next()  # unusable data raises an error here, before any file is written
    except LoadingStopped:
        _print_stopped(mesh, stop, state)
        return None
    clock.done("data")
    recompute = sync_errors(mesh, lambda: apply_recompute_budget(setup.objective, first_step, saved.get("recompute")))
    return RunContext(
        config=config,
        mesh=mesh,
        setup=setup,
        optimizer=setup.optimizer,
        state=state,
        folder=folder,
        checkpoint_dir=checkpoint_dir,
        callbacks=dispatcher,
        evaluator=evaluator,
        reader=loader.reader,
        overlong=OverlongWarnings(config, loader.reader),
        steps=steps,
        first_step=first_step,
        recompute=recompute,
        stop=stop,
        prepared_at=prepared_at,
    )


def _open_data(bundle: ModelBundle, mesh: Mesh) -> tuple[Loader, Reader | None, dict[str, list[Pack]]]:
    """Return the loader, the reader of held-out data, and this rank's held-out packs, keyed by source."""
    loader = sync_errors(mesh, lambda: bundle.loader(mesh))
    held_out_reader = sync_errors(mesh, bundle.held_out_reader)
    check_rows([loader.reader, held_out_reader], bundle.model, mesh)
    packs = sync_errors(mesh, lambda: read_parts(held_out_reader, mesh) if held_out_reader else {})
    return loader, held_out_reader, packs


def _restore_loader(loader: Loader, saved: Mapping[str, Any], start: StartingPoint, mesh: Mesh) -> None:
    """Set the data position of the loader to the position in the checkpoint."""
    position = saved["loader"]
    if position is None:
        raise UserError(
            f"checkpoint.resume: {start.checkpoint} was written by omnizoo.Engine and has no data position. "
            f"Start a new run with model.init_from: {start.checkpoint}."
        )
    sync_errors(mesh, lambda: loader.load_state_dict(position))


def _print_nothing_to_do(config: Config, mesh: Mesh, start: StartingPoint, state: TrainState) -> None:
    """Print, on rank 0, that the checkpoint is already at the last step."""
    if mesh.is_first:
        hint = "" if config.train.epochs else ". Raise train.steps to continue"
        print(f"nothing to do: {start.checkpoint} is at step {state.step} of {config.train.steps}{hint}")


def _print_stopped(mesh: Mesh, stop: StopSignal, state: TrainState) -> None:
    """Print, on rank 0, that a signal stopped the run while it waited for its first step."""
    if mesh.is_first:
        stopped_by = stop.signal or "a signal to another rank"
        print(f"stopped by {stopped_by} while step {state.step + 1} was loading: there is nothing new to save")
