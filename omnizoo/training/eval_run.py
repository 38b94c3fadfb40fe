"""`omnizoo eval`: what a checkpoint is worth on held-out data, on any layout; nothing is trained."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from omnizoo.assembly.adapters import adapter_record
from omnizoo.assembly.assemble import assemble, check_same_model, check_same_rows
from omnizoo.assembly.parallelize import parallelize
from omnizoo.checkpoint.export import best_checkpoint, resolve_checkpoint
from omnizoo.checkpoint.folder import checkpoints, step_of
from omnizoo.checkpoint.save import load
from omnizoo.checkpoint.start import Origin
from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.parallel.agree import agree
from omnizoo.parallel.mesh import build_mesh
from omnizoo.parallel.process import process_group
from omnizoo.training.evaluate import check_held_out, deal_held_out, evaluate, read_parts
from omnizoo.training.loss_contract import losses_of_rows
from omnizoo.training.losses import Objective
from omnizoo.training.metrics import RunFolder, replace_file
from omnizoo.training.run import on_device, set_up_logging
from omnizoo.training.samples import Sampler, check_samples


@dataclass(frozen=True)
class Wanted:
    """Which weights are looked at."""

    place: Path | None  # a checkpoint or a run; None: what the config's own run has, or its initial weights
    best: bool = False  # of a run: the checkpoint that `checkpoint.best` has chosen

    def find(self, config: Config) -> Path | None:
        own = Path(config.checkpoint.dir or Path(config.log.dir) / "checkpoints")
        if self.best:
            return best_checkpoint(self.place or Path(config.log.dir))
        if self.place is not None:
            return resolve_checkpoint(self.place)
        return resolve_checkpoint(own) if checkpoints(own) else None


def evaluate_run(
    config: Config, wanted: Wanted, out: Path | None, on_failure: Callable[[int, BaseException], None] | None = None
) -> int:
    """Losses, metrics and answers of a checkpoint: on the terminal, and as files in `out`, which is by default a folder
    `eval/step_N` of the run."""
    if not config.data.eval_sources:
        raise UserError("data.eval_sources is empty: there is nothing to evaluate on; name held-out data there")
    with process_group(on_failure=on_failure) as process:
        config = on_device(config, process.device)
        # Evaluations happen, and packs of training are not read: any number that fits the ranks will do.
        batch = process.world_size * config.train.micro_batch
        train = config.train.model_copy(update={"eval_every": config.train.eval_every or 1, "global_batch": batch})
        config = config.model_copy(update={"train": train})
        mesh = build_mesh(config, process)
        set_up_logging(mesh)
        losses_of_rows(config)
        assembled = agree(mesh, lambda: assemble(config))
        check_same_model(config, mesh)
        model, tokenizer = assembled.model, assembled.tokenizer
        agree(mesh, lambda: check_samples(model, mesh, config))
        reader = agree(mesh, assembled.held_out)
        assert reader is not None
        check_same_rows(reader, mesh)
        packs = agree(mesh, lambda: read_parts(reader, mesh))
        source = mesh.from_first(agree(mesh, lambda: wanted.find(config) if mesh.is_first else None))
        adapter = mesh.from_first(agree(mesh, lambda: adapter_record(model, config) if mesh.is_first else None))
        agree(mesh, lambda: parallelize(model, mesh, config, load=source is None or adapter is not None))
        load(Origin("", source, weights_only=True), model, None, adapter and adapter["base"])

        objective = agree(mesh, lambda: Objective(model, mesh, config))
        held_out = deal_held_out(objective, packs)
        check_held_out(objective, held_out)
        step = (step_of(source) or 0) if source is not None else 0
        run = RunFolder(out or Path(config.log.dir) / "eval" / f"step_{step:08d}")
        found: dict[str, float | None] = {**evaluate(objective, held_out)}
        records = []
        if config.evaluation.samples:
            taken = Sampler(config, model, mesh, tokenizer, reader).take(step, run)
            if taken.failures:
                raise UserError(taken.failures[0])
            found |= taken.metrics
            records = taken.records
        if mesh.is_first:
            about = {"checkpoint": None if source is None else str(source), "step": step, **found}
            replace_file(run.root / "metrics.json", json.dumps(about, indent=2) + "\n")
            replace_file(run.samples, "".join(json.dumps(record) + "\n" for record in records))
            show(source, found, held_out.packs, records, run)
    return 0


def show(
    source: Path | None, found: dict[str, float | None], packs: int, records: list[dict[str, object]], run: RunFolder
) -> None:
    table = Table.grid(padding=(0, 2))
    for name, value in found.items():
        table.add_row(name, "-" if value is None else f"{value:.4f}")
    console = Console(soft_wrap=True)
    console.print(f"{source or 'initial weights'}: {packs} pack(s), {len(records)} question(s)", highlight=False)
    console.print(table)
    console.print(f"written to {run.root}", highlight=False)
