"""The start-up table and the closing message of a run."""

from collections.abc import Iterator

from torch import nn

from omnizoo.checkpoint.folder import folder_of
from omnizoo.checkpoint.resume import StartingPoint
from omnizoo.config.schema import Config
from omnizoo.data.loading.lanes import shares_of
from omnizoo.data.loading.reader import Reader
from omnizoo.models.adapters.record import describe_adapter
from omnizoo.models.hf_private import attention_name
from omnizoo.models.media.hf_model import media_model
from omnizoo.ops.device import device_name
from omnizoo.ops.quantization import count_weights
from omnizoo.parallel.errors import sync_errors
from omnizoo.parallel.fsdp.sharded_tensors import local_bytes
from omnizoo.parallel.layout import Layout, micro_batches
from omnizoo.parallel.mesh import Mesh
from omnizoo.reporting.plural import plural
from omnizoo.reporting.start_clock import StartClock
from omnizoo.training.recorder import Recorder
from omnizoo.training.setup import RunContext

MIB = 2**20


def open_recorder(run: RunContext, clock: StartClock) -> Recorder:
    """Print the start-up table and start recording. Collective: all ranks must call it.

    An error on rank 0 is raised on all ranks.

    Args:
        run: The run.
        clock: Measures the duration of the start-up.
    """
    facts = describe_run(run)
    return sync_errors(run.mesh, lambda: Recorder(run, facts, clock))


def describe_run(run: RunContext) -> dict[str, str]:
    """Return the rows of the start-up table as a mapping from label to text."""
    config, optimizer = run.config, run.config.optimizer
    optimizer_kinds = [optimizer.kind, *(group.kind for group in optimizer.groups if group.kind)]
    save_interval = f"every {config.checkpoint.every} steps" if config.checkpoint.every else "at the end"
    return {
        **_describe_model(run.setup.model, config, run.setup.start),
        **_describe_step(config, run.mesh, run.setup.model),
        "precision": config.train.precision,
        "optimizer": ", ".join(dict.fromkeys(optimizer_kinds)),
        "attention": attention_name(run.setup.model),
        "data": "\n".join(_describe_sources(run.reader)),
        "run folder": str(run.folder.root),
        "checkpoints": f"{run.checkpoint_dir}, {save_interval}",
        "starts from": _describe_start(run.setup.start),
        "recompute": run.recompute,
        "held-out": run.evaluator.describe(),
        **run.overlong.at_start(run.first_step.counters),
    }


def _describe_model(model: nn.Module, config: Config, start: StartingPoint) -> dict[str, str]:
    """Return the rows about the model, its weights and its modalities."""
    num_parameters = count_weights(model)
    num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    model_class = type(model).__name__.removeprefix("FSDP")  # FSDP renames the class
    rows = {
        "model": f"{model_class}, {num_parameters / 1e6:.1f} M parameters",
        "trained": f"{num_trained / 1e6:.1f} M parameters, {num_trained / max(1, num_parameters):.1%}",
    }
    random_weights = f"random, from train.seed {config.train.seed}"
    initial_weights = "from the Python object" if config.model.given else random_weights
    base_weights = (config.model.foundation or config.model).path or initial_weights
    adapter = describe_adapter(model)
    if adapter:
        rows |= {"adapter": adapter, "weights": base_weights}
    else:
        rows["weights"] = str(start.checkpoint or base_weights)
    ports = media_model(model).ports
    if ports:
        rows["modalities"] = ", ".join(str(port) for port in ports)
    return rows


def _describe_step(config: Config, mesh: Mesh, model: nn.Module) -> dict[str, str]:
    """Return the rows about the mesh, the number of steps and the size of a step."""
    train, layout = config.train, mesh.layout
    weights = f"{local_bytes(model) / MIB:.1f} MiB of weights each"
    epochs = "" if train.epochs is None else f": {plural(train.epochs, 'epoch')}"
    return {
        "mesh": f"{layout} = {plural(layout.world, 'rank')} on {device_name(mesh.device)}; {weights}",
        "run": f"{train.steps:,} steps{epochs}",
        "step": _describe_size(config, layout),
    }


def _describe_size(config: Config, layout: Layout) -> str:
    """Return a description of the size of a step."""
    train, pack_tokens = config.train, config.data.pack_tokens
    if train.samples_per_step is not None:
        size = f"{plural(train.samples_per_step, 'sample')} in packs of up to {pack_tokens} tokens"
        per_rank = f"micro-batches of {plural(train.micro_batch, 'pack')}"
    else:
        num_micro_batches = micro_batches(layout, train.packs_per_step, train.micro_batch)
        num_tokens = train.packs_per_step * pack_tokens
        size = f"{train.packs_per_step} packs of up to {pack_tokens} tokens, {num_tokens:,} in total"
        per_rank = f"{plural(num_micro_batches, 'micro-batch', 'micro-batches')} of {train.micro_batch}"
    growth = ""
    if train.batch_warmup is not None:
        growth = f"; grows from {train.step_sizes.of_step(0)} in {plural(train.batch_warmup.steps, 'step')}"
    return f"{size}; per rank {per_rank}{growth}"


def _describe_sources(reader: Reader) -> Iterator[str]:
    """Yield a line about each data source."""
    data = reader.config.data
    has_epochs = reader.config.train.epochs is not None
    shares = shares_of(reader, by_rows=has_epochs)
    weights = None if has_epochs else data.weights
    for number, (spec, source) in enumerate(zip(data.sources, reader.sources, strict=True)):
        schema, _ = reader.format_of(number)
        read_as = f", read as {schema}" if schema else ""
        reason = "by size" if weights is None else f"weight {weights[number]:g}"
        share = f"; share {shares[number]:.1%} ({reason})" if len(data.sources) > 1 else ""
        yield f"{spec.name}: {len(source):,} rows{read_as}{share}"


def _describe_start(start: StartingPoint) -> str:
    if start.checkpoint is None:
        return "step 0"
    if start.weights_only:
        return f"the weights of {start.checkpoint}, step 0"
    return str(start.checkpoint)


def closing_message(run: RunContext, stopped_by: str | None) -> str:
    """Return a message with the locations of the results and a hint on how to continue.

    Args:
        run: The run.
        stopped_by: Name of the signal or callback that stopped the run; None if it reached its last step.
    """
    step = run.state.step
    results = f"checkpoint {folder_of(run.checkpoint_dir, step)}, report {run.folder.report}"
    if stopped_by is None:
        return f"done, {step} steps: {results}. For Hugging Face: omnizoo export {run.folder.root} OUT_DIR"
    hint = "The same command continues from here."
    if stopped_by == "evaluation.early_stop":
        hint = "Raise evaluation.early_stop.patience to continue."
    return f"stopped by {stopped_by} after step {step}/{run.config.train.steps}: {results}. {hint}"
