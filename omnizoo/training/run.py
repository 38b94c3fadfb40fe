"""`omnizoo train`: the one loop, for every model, modality and layout. Read it from top to bottom."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from omnizoo.assembly.adapters import describe_adapter
from omnizoo.assembly.assemble import assemble, check_same_model, check_same_rows
from omnizoo.assembly.parallelize import check_memory
from omnizoo.assembly.parts import saved_bytes
from omnizoo.assembly.published import media_model
from omnizoo.checkpoint.folder import checkpoints, clean, folder_of
from omnizoo.checkpoint.ownership import check_space, hold
from omnizoo.checkpoint.save import SaveError, save
from omnizoo.checkpoint.start import Origin
from omnizoo.config.errors import TrainingError, UserError
from omnizoo.config.load import load_config
from omnizoo.config.schema import Config
from omnizoo.data.epochs import count_steps
from omnizoo.data.loader import ROWS_READ, merge_states
from omnizoo.data.reader import Reader
from omnizoo.data.workers import start_server, worker_count
from omnizoo.models.hf_private import attention_name
from omnizoo.ops.device import device_name, is_host, memory_gb, peak_flops, use_tensor_cores
from omnizoo.ops.quantised import count_weights
from omnizoo.parallel.agree import agree
from omnizoo.parallel.layout import Layout, micro_batches
from omnizoo.parallel.mesh import Mesh, build_mesh
from omnizoo.parallel.process import process_group
from omnizoo.parallel.rendezvous import place_in_world
from omnizoo.parallel.shard import local_bytes
from omnizoo.training.ahead import Ahead
from omnizoo.training.begin import begin, check_parts
from omnizoo.training.best import check_metrics, watchers
from omnizoo.training.callbacks import Asked, Callback, Callbacks, Start, user_callbacks
from omnizoo.training.evaluate import (
    check_held_out,
    deal_held_out,
    describe_held_out,
    evaluate,
    metric_names,
    read_parts,
)
from omnizoo.training.interrupt import StopRequest
from omnizoo.training.lengthy import Lengthy
from omnizoo.training.loggers import built_in_loggers
from omnizoo.training.loss_contract import losses_of_rows
from omnizoo.training.losses import Objective
from omnizoo.training.metrics import RunFolder
from omnizoo.training.probe import Probed, dropout_of_media, probe
from omnizoo.training.profiler import Profiler
from omnizoo.training.recompute_budget import chosen, settle
from omnizoo.training.record import Recorder
from omnizoo.training.samples import Sampler, check_samples
from omnizoo.training.start_clock import StartClock
from omnizoo.training.step import train_step

log = logging.getLogger(__name__)


def train(
    config: str | Path | Mapping[str, Any] | Config,
    on_failure: Callable[[int, BaseException], None] | None = None,
    *,
    model: nn.Module | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    data: Any = None,
    eval_data: Any = None,
    callbacks: Sequence[Callback] = (),
    clock: StartClock | None = None,
) -> int:
    """Train as `config` says, on from the newest checkpoint if there is one; returns the exit code.

    `model` stands for what `model.path` or `model.module` would name: a Hugging Face model, or a module that is called
    as one. A copy of it is trained, from the weights that it has on the first rank. `data` and `eval_data` stand for
    `data.sources` and `data.eval_sources`: a list of dicts, a `datasets.Dataset`, a torch dataset (docs/extending.md).
    `callbacks` come after those of `log.callbacks`; only those of the first rank are called. Under torchrun, every rank
    is given the same objects. `clock` knows how long it took to come here.
    """
    clock = clock or StartClock()
    objects = {"model": model, "tokenizer": tokenizer, "data": data, "eval_data": eval_data}
    if not isinstance(config, Config) or any(given is not None for given in objects.values()):
        rank = (place_in_world() or (0,))[0]
        config = load_config(config, notices=rank == 0, objects=objects)
    return _train(config, on_failure, callbacks, clock)


def _train(
    config: Config,
    on_failure: Callable[[int, BaseException], None] | None,
    callbacks: Sequence[Callback],
    clock: StartClock,
) -> int:
    stop = StopRequest()
    with process_group(on_failure=on_failure) as process, ExitStack() as stack:
        config = on_device(config, process.device)
        if worker_count(config.data.workers):
            start_server()  # now: it needs seconds, and so does what comes before the first row
        mesh = build_mesh(config, process)
        clock.done("process group")
        set_up_logging(mesh)
        run = RunFolder(Path(config.log.dir))
        directory = Path(config.checkpoint.dir) if config.checkpoint.dir else run.checkpoints
        agree(mesh, lambda: lock(run, directory, stack) if mesh.is_first else None)
        own = agree(
            mesh, lambda: [*built_in_loggers(config, run), *user_callbacks(config, callbacks)] if mesh.is_first else []
        )

        check_parts(config)
        losses_of_rows(config)  # one of the user's own may be a mistake
        assembled = agree(mesh, lambda: assemble(config))
        check_same_model(config, mesh)
        model, name = assembled.model, type(assembled.model).__name__  # FSDP renames the class
        probed = agree(mesh, lambda: probe(config.model) if mesh.is_first else None)
        if probed is not None:
            warn_of(probed, model, mesh.layout, config.train.micro_batch)
        agree(mesh, lambda: check_memory(model, mesh, config))
        agree(mesh, lambda: check_samples(model, mesh, config))
        agree(mesh, lambda: leave_room(config, model, directory) if mesh.is_first else None)
        clock.done("model")
        loader = agree(mesh, lambda: assembled.loader(mesh))
        held_out_reader = agree(mesh, assembled.held_out)
        for reader in (loader.reader, held_out_reader):
            if reader is not None:
                check_same_rows(reader, mesh)
        held_out = agree(mesh, lambda: read_parts(held_out_reader, mesh) if held_out_reader else {})
        peak = peak_flops(mesh.device, config.parallel.precision)
        clock.done("data")
        begun = begin(model, mesh, config, directory, clock.done)
        origin, optimizer, state = begun.origin, begun.optimizer, begun.state

        start, tokens_seen, bad_steps, bad_in_a_row = 0, 0, 0, 0
        if state:
            start, tokens_seen = state["step"], state.get("tokens_seen", 0)
            bad_steps, bad_in_a_row = state.get("bad_steps", 0), state.get("bad_in_a_row", 0)
            saved = state["loader"]
            if saved is None:
                raise UserError(
                    f"{origin.checkpoint} was saved by omnizoo.Engine, which reads no data: it has no place in them; "
                    f"start a new run from its weights (checkpoint.resume: weights:{origin.checkpoint})"
                )
            agree(mesh, lambda: loader.load_state_dict(saved))
        config = count_steps(config, loader.reader, mesh, state.get("steps"))
        watching = Callbacks([*watchers(config, origin.run), *own] if mesh.is_first else [], active=mesh.is_first)
        watching.load_state_dict(state.get("callbacks", {}))
        if start >= config.train.steps:
            if mesh.is_first:
                at = f"{origin.checkpoint} is at step {start} of {config.train.steps}"
                print(f"nothing to do: {at}" + ("" if config.train.epochs else "; raise train.steps"))
            return 0

        fetching = time.perf_counter()
        objective = agree(mesh, lambda: Objective(model, mesh, config))
        eval_data = deal_held_out(objective, held_out)
        sampler = None
        if held_out_reader is not None:
            check_held_out(objective, eval_data)
            check_metrics(config, metric_names(objective, eval_data))
            if config.evaluation.samples:
                sampler = Sampler(config, model, mesh, assembled.tokenizer, held_out_reader)
        ahead = stack.enter_context(Ahead(loader, objective, config.train.steps - start))
        data = ahead.next()  # before anything is written: unusable data leaves no trace
        clock.done("data")
        recomputed = agree(mesh, lambda: settle(objective, data, state.get("recompute")))
        facts = describe(config, mesh, model, name, run, directory, origin, loader.reader)
        facts["recompute"] = recomputed
        facts |= {"held-out": describe_held_out(config, eval_data.packs)}
        rows, told = sum(map(len, loader.reader.sources)), Lengthy(config, loader.reader)
        facts |= told.at_start(data.counters)
        started = Start(run.root, directory, config.model_dump(), start, config.train.steps, mesh.layout.world)
        with (
            agree(mesh, lambda: Recorder(config, run, started, facts, origin, watching)) as recorder,
            Profiler(config, run, objective, ahead, recorder.say, start) as profiler,
        ):
            if heed(mesh, watching).stop:
                recorder.say(f"nothing to do: {watching.stopped_by} has stopped the run, at step {start}")
                watching.end("stopped")
                heed(mesh, watching)
                return 0
            for step in range(start + 1, config.train.steps + 1):
                fetched = time.perf_counter()
                result = train_step(objective, optimizer, data, step, stop=bool(stop) or watching.wants_to_stop)
                seconds, waited = time.perf_counter() - fetching, fetched - fetching
                tokens_seen += data.tokens

                if not result.finite:
                    bad_steps, bad_in_a_row = bad_steps + 1, bad_in_a_row + 1
                    samples = [name for batch in data.micro_batches for name in batch.sample_ids]
                    samples = [name for names in mesh.gather(samples if mesh.sp_rank == 0 else []) for name in names]
                    recorder.bad_step(step, result.loss, result.grad_norm, samples)
                    recorder.say(
                        f"step {step} skipped: loss {result.loss}, grad norm {result.grad_norm}; "
                        f"its samples are in {run.bad_steps}"
                    )
                else:
                    bad_in_a_row = 0
                is_learnt = data.totals.is_learnt
                if not is_learnt:
                    recorder.say(f"step {step}: nothing to learn in it, the loss is on none of its tokens")
                for warning in told.news(data.counters):
                    recorder.say(f"warning: {warning}")
                if data.bad_rows:
                    recorder.bad_rows(step, sorted(set(data.bad_rows)))

                metrics: dict[str, float | None] = {
                    **result.metrics(),
                    "loss": result.loss if is_learnt else None,
                    "tokens": data.tokens,
                    "tokens_seen": tokens_seen,
                    "tokens_per_sec": data.tokens / seconds,
                    "mfu": data.totals.flops / seconds / (peak * mesh.layout.world) if peak else None,
                    "memory_gb": memory_gb(mesh.device),
                    "data_wait": waited / seconds,
                    "fill": data.tokens / (config.train.global_batch * config.data.pack_tokens),
                    "imbalance": max(data.imbalance.values()),
                    **{f"imbalance/{part}": figure for part, figure in data.imbalance.items() if objective.ports},
                    "bad_steps": bad_steps,
                    **{name: count for name, count in data.counters.items() if name != ROWS_READ},
                    "epoch": data.counters[ROWS_READ] / rows,
                }
                is_evaluated = bool(config.train.eval_every) and step % config.train.eval_every == 0
                found: dict[str, float | None] = {**evaluate(objective, eval_data)} if is_evaluated else {}
                if is_evaluated and sampler is not None:
                    with objective.mark("evaluation"):
                        taken = sampler.take(step, run)
                    found |= taken.metrics
                    recorder.samples(taken.records)
                    for failure in taken.failures:
                        recorder.say(f"warning: step {step}: {failure}; this evaluation is without it")
                with objective.mark("record"):
                    recorder.step(step, metrics | found)
                if step == start + 1:
                    clock.done("first step")
                    recorder.started(clock)
                if is_evaluated:
                    watching.evaluation(step, found)
                asked: Asked = mesh.from_first(watching.asked()) if is_evaluated else Asked()
                if bad_in_a_row >= config.train.max_bad_steps:
                    raise TrainingError(
                        f"{bad_in_a_row} steps in a row had a non-finite loss or gradient (train.max_bad_steps); "
                        f"their samples are in {run.bad_steps}"
                    )

                last = step == config.train.steps or result.stop or asked.stop
                if last or asked.save or (config.checkpoint.every and step % config.checkpoint.every == 0):
                    recorder.flush()
                    state = begun.saved() | {"tokens_seen": tokens_seen}
                    state |= {"bad_steps": bad_steps, "bad_in_a_row": bad_in_a_row}
                    state |= chosen(model, config, mesh) | {"callbacks": watching.state_dict()}
                    if config.train.epochs is not None:
                        state["steps"] = config.train.steps
                    lanes = mesh.gather(ahead.state)
                    state["loader"] = merge_states(lanes) if mesh.is_first else None
                    try:
                        with objective.mark("checkpoint"):
                            saved_to = save(directory, step, model, optimizer, state, mesh, config, assembled.tokenizer)
                        watching.save(step, saved_to)
                    except SaveError as error:
                        message = f"no checkpoint of step {step}: {error}; those before it in {directory} are intact"
                        if config.checkpoint.on_save_error == "stop" or last:
                            raise TrainingError(message) from error
                        recorder.say(f"warning: {message}; training goes on (checkpoint.on_save_error: continue)")
                if last:
                    break
                profiler.after(step)
                fetching = time.perf_counter()
                data = ahead.next()
            is_stopped = result.stop or asked.stop
            watching.end("failed" if watching.failure else "stopped" if is_stopped else "done", watching.failure)
            heed(mesh, watching, f"; checkpoint {folder_of(directory, step)} is complete")
            by = stop.signal or watching.stopped_by or "a signal to another rank"
            recorder.say(farewell(step, config, run, directory, by if is_stopped else None))
    return 0


def on_device(config: Config, device: torch.device) -> Config:
    """`config` with what is left to the device settled: accelerators compute in bf16 unless told otherwise."""
    if "precision" not in config.parallel.model_fields_set and not is_host(device):
        config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"precision": "bf16"})})
    if config.parallel.precision == "bf16":
        use_tensor_cores(device)
    return config


def heed(mesh: Mesh, watching: Callbacks, saved: str = "") -> Asked:
    """What callbacks, all on the first rank, ask for. One that has failed ends the run, on every rank."""
    asked: Asked = mesh.from_first(watching.asked())
    if asked.failure is not None:
        raise TrainingError(asked.failure + saved)
    return asked


def lock(run: RunFolder, directory: Path, folders: ExitStack) -> None:
    """Keep other runs out of both folders, and see that they can be written to."""
    folders.enter_context(hold(run.root, "log.dir"))
    if directory.resolve() != run.root.resolve():
        folders.enter_context(hold(directory, "checkpoint.dir"))
    clean(directory)


def leave_room(config: Config, model: nn.Module, directory: Path) -> None:
    every, steps, keep = config.checkpoint.every, config.train.steps, config.checkpoint.keep
    saves = -(-steps // every) if every else 1
    if config.checkpoint.best is not None:
        saves, keep = saves + steps // max(1, config.train.eval_every), keep + 1
    check_space(directory, saved_bytes(model, config), len(checkpoints(directory)), saves, keep)


def warn_of(probed: Probed, model: nn.Module, layout: Layout, micro_batch: int) -> None:
    """Say what layouts do not agree on, and what could not be checked."""
    if probed.unchecked:
        log.warning("model.module: whether tokens see later ones or other samples is not checked: %s", probed.unchecked)
    drawn = [*probed.random, *dropout_of_media(model)]
    if drawn and (layout.sp > 1 or micro_batch > 1):
        shared = "ranks share packs" if layout.sp > 1 else f"train.micro_batch is {micro_batch}"
        log.warning(
            "the model draws random numbers in training (%s), and %s: what is drawn depends on the layout, so losses "
            "agree with those of another layout in distribution only (docs/step.md)",
            ", ".join(drawn),
            shared,
        )


def set_up_logging(mesh: Mesh) -> None:
    """Only the first rank talks."""
    logging.basicConfig(level=logging.INFO if mesh.is_first else logging.CRITICAL, format="%(levelname)s: %(message)s")
    if not mesh.is_first:
        transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()


def describe(
    config: Config,
    mesh: Mesh,
    model: nn.Module,
    name: str,
    run: RunFolder,
    directory: Path,
    origin: Origin,
    reader: Reader,
) -> dict[str, str]:
    """The start-up table."""
    parameters = count_weights(model)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    held = local_bytes(model)
    train, layout = config.train, mesh.layout
    own = "those of the object" if config.model.given else f"drawn from train.seed {train.seed}"
    drawn = (config.model.foundation or config.model).path or own
    return {
        "model": f"{name}, {parameters / 1e6:.1f} M parameters",
        "trained": f"{trained / 1e6:.1f} M parameters, {trained / max(1, parameters):.1%}",
        **({"adapter": adapter} if (adapter := describe_adapter(model)) else {}),
        "weights": str(origin.checkpoint or drawn) if not adapter else drawn,
        **({"modalities": ", ".join(map(str, ports))} if (ports := media_model(model).ports) else {}),
        "mesh": f"{layout} = {layout.world} process(es) on {device_name(mesh.device)}; "
        f"{held / 2**20:.1f} MiB of weights each",
        "run": f"{train.steps:,} steps" + ("" if train.epochs is None else f": {train.epochs:g} epoch(s)"),
        "step": f"{train.global_batch} packs of up to {config.data.pack_tokens} tokens, "
        f"{train.global_batch * config.data.pack_tokens:,} in all; per rank "
        f"{micro_batches(layout, train.global_batch, train.micro_batch)} micro-batch(es) of {train.micro_batch}",
        "precision": config.parallel.precision,
        "optimizer": ", ".join(
            dict.fromkeys([config.optimizer.kind, *(g.kind for g in config.optimizer.groups if g.kind)])
        ),
        "attention": attention_name(model),
        "data": "\n".join(describe_sources(reader)),
        "run folder": str(run.root),
        "checkpoints": f"{directory}, "
        + (f"every {config.checkpoint.every} steps" if config.checkpoint.every else "at the end"),
        "starts from": (
            f"the weights of {origin.checkpoint}, step 0" if origin.weights_only else str(origin.checkpoint)
        )
        if origin.checkpoint
        else "step 0",
    }


def describe_sources(reader: Reader) -> Iterator[str]:
    for number, (spec, source) in enumerate(zip(reader.config.data.sources, reader.sources, strict=True)):
        taken, _ = reader.format_of(number)
        format = f", taken as {taken}" if taken else ""
        weight = "" if reader.config.train.epochs else f" (weight {spec.weight:g})"
        yield f"{spec.name}: {len(source):,} rows{format}{weight}"


def farewell(step: int, config: Config, run: RunFolder, directory: Path, stopped_by: str | None) -> str:
    saved = f"checkpoint {folder_of(directory, step)}, report {run.report}"
    if stopped_by is not None:
        early = stopped_by == "train.early_stop"
        way_on = "Raise its patience to go on" if early else "The same command goes on from here"
        return f"stopped by {stopped_by} after step {step}/{config.train.steps}: {saved}. {way_on}."
    return f"done, {step} steps: {saved}. For Hugging Face: omnizoo export {run.root} OUT_DIR"
