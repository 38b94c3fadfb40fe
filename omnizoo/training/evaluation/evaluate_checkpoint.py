"""Evaluate a checkpoint on held-out data, with any layout: `omnizoo.evaluate` and the command `omnizoo eval`."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import PreTrainedTokenizerBase

from omnizoo.checkpoint.folder import checkpoints, step_of
from omnizoo.checkpoint.resume import StartingPoint, best_checkpoint, resolve_checkpoint
from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.parallel.errors import sync_errors
from omnizoo.reporting.plural import plural
from omnizoo.reporting.results import EvaluationResult
from omnizoo.reporting.run_folder import RunFolder, replace_file
from omnizoo.training.evaluation.held_out import Evaluator, read_parts
from omnizoo.training.evaluation.responses import check_samples
from omnizoo.training.evaluation.run_config import load_evaluation_config
from omnizoo.training.losses.base import losses_of_rows
from omnizoo.training.preflight import check_rows, check_same_model
from omnizoo.training.setup import build_bundle, joined_world, set_up_training


def evaluate(
    config: str | Path | Mapping[str, Any] | Config,
    checkpoint: str | Path | None = None,
    *,
    best: bool = False,
    out: str | Path | None = None,
    model: nn.Module | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    data: Any = None,
    eval_data: Any = None,
    allow_code: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> EvaluationResult:
    """Compute losses, metrics and responses of a checkpoint on held-out data, and write them to files.

    Under torchrun, every rank must pass the same arguments.

    Args:
        config: Run folder, path of a YAML file, mapping or config.
        checkpoint: Checkpoint or run folder. Default: the newest checkpoint of the run; without one, the initial
            weights.
        best: Whether to evaluate the best checkpoint of the run (`checkpoint.best`).
        out: Folder for the results. Default: `eval/step_N` in the run folder.
        model: Used in place of `model.path`, as in `train`. The weights of a checkpoint replace its weights.
        tokenizer: Used in place of `model.tokenizer`.
        data: Used in place of `data.sources`, the training data. It is not evaluated.
        eval_data: Used in place of `data.eval_sources`: a list of dicts, a `datasets.Dataset` or a torch dataset.
        allow_code: Python modules, with submodules, that the config of a run folder may import code from.
        trust_remote_code: Whether Python code in the model folder of a run may run.

    Returns:
        The metrics and responses, and the evaluated checkpoint.

    Raises:
        UserError: If there is no held-out data, or the checkpoint, the model or a metric cannot be used.

    Example:
        >>> omnizoo.evaluate("runs/my", eval_data=rows).metrics["eval/loss"]
    """
    if checkpoint is not None and best:
        raise UserError("best: checkpoint is also set. Remove one of them.")
    objects = {"model": model, "tokenizer": tokenizer, "data": data, "eval_data": eval_data}
    loaded, run_folder = load_evaluation_config(
        config, allow_code=allow_code, trust_remote_code=trust_remote_code, objects=objects
    )
    folder = run_folder if checkpoint is None else Path(checkpoint)
    return evaluate_run(loaded, folder, best, None if out is None else Path(out))


def find_weights(config: Config, folder: Path | None, best: bool) -> Path | None:
    """Return the checkpoint to evaluate; None for the initial weights of the config.

    Args:
        config: The config of the run.
        folder: A checkpoint or a run; None for the run of the config.
        best: Whether to use the best checkpoint of the run (`checkpoint.best`).
    """
    if best:
        return best_checkpoint(folder or Path(config.log.dir))
    if folder is None:
        folder = Path(config.checkpoint.dir or Path(config.log.dir) / "checkpoints")
        if not checkpoints(folder):
            init_from = config.model.init_from
            return resolve_checkpoint(Path(init_from)) if init_from else None
    return resolve_checkpoint(folder)


def evaluate_run(
    config: Config,
    folder: Path | None,
    best: bool,
    out: Path | None,
    on_failure: Callable[[int, BaseException], None] | None = None,
    is_printed: bool = False,
) -> EvaluationResult:
    """Compute the losses, metrics and responses of a checkpoint, and write them to files.

    Args:
        config: The config of the run.
        folder: A checkpoint or a run; None for the run of the config.
        best: Whether to use the best checkpoint of the run (`checkpoint.best`).
        out: The folder for results (default: `eval/step_N` in the run folder).
        on_failure: Called with the rank and the error when a rank fails.
        is_printed: Whether to print the metrics.

    Returns:
        The result, identical on all ranks.

    Raises:
        UserError: If there is no held-out data, or the checkpoint, the model or a metric cannot be used.
    """
    if not config.data.eval_sources:
        raise UserError("data.eval_sources: not set, so there is no data to evaluate on. Set it to held-out data.")
    config = config.changed(evaluation={"every": config.evaluation.every or 1})
    with joined_world(config, on_failure, has_loader=False) as (config, mesh):
        losses_of_rows(config)
        bundle = sync_errors(mesh, lambda: build_bundle(config))
        check_same_model(config, mesh)
        sync_errors(mesh, lambda: check_samples(bundle.model, mesh, config))
        reader = sync_errors(mesh, bundle.held_out_reader)
        assert reader is not None
        check_rows([reader], bundle.model, mesh)
        packs = sync_errors(mesh, lambda: read_parts(reader, mesh))
        local_checkpoint = sync_errors(mesh, lambda: find_weights(config, folder, best) if mesh.is_first else None)
        checkpoint: Path | None = mesh.from_first(local_checkpoint)
        start = StartingPoint("", checkpoint, weights_only=True)
        setup = set_up_training(bundle, mesh, start, has_optimizer=False)

        step = 0
        if checkpoint is not None:
            step = step_of(checkpoint) or 0
        run = RunFolder(out or Path(config.log.dir) / "eval" / f"step_{step:08d}")
        evaluator = Evaluator(setup.objective, setup.balancer, packs, reader, run)
        metrics = evaluator.losses()
        records = []
        problem = ""
        if evaluator.sampler is not None:
            responses = evaluator.sampler.respond(step, run)
            if responses.failures:
                raise UserError(responses.failures[0])
            problem = responses.failed_prompts()
            metrics |= responses.metrics
            records = responses.records
        if mesh.is_first:
            name = None if checkpoint is None else str(checkpoint)
            results = {"checkpoint": name, "step": step, **metrics}
            replace_file(run.root / "metrics.json", json.dumps(results, indent=2) + "\n")
            replace_file(run.samples, "".join(json.dumps(record) + "\n" for record in records))
            if is_printed:
                print_results(checkpoint, metrics, evaluator.totals.packs, len(records), run)
                if problem:
                    Console(soft_wrap=True).print(f"warning: {problem}", highlight=False, markup=False)
        local = EvaluationResult(
            folder=run.root, checkpoint=checkpoint, step=step, metrics=dict(metrics), samples=list(records)
        )
        result: EvaluationResult = mesh.from_first(local)
    return result


def print_results(
    checkpoint: Path | None, metrics: dict[str, float | None], num_packs: int, num_prompts: int, run: RunFolder
) -> None:
    """Print the metrics of an evaluation, and where they were written."""
    table = Table.grid(padding=(0, 2))
    for name, value in metrics.items():
        table.add_row(name, "-" if value is None else f"{value:.4f}")
    source = checkpoint or "initial weights"
    console = Console(soft_wrap=True)
    console.print(f"{source}: {plural(num_packs, 'pack')}, {plural(num_prompts, 'prompt')}", highlight=False)
    console.print(table)
    console.print(f"written to {run.root}", highlight=False)
