"""`omnizoo new MODEL DATA`: write a config that trains without edits, with the reason for each value.

Sizes depend on the lengths of the samples, the experts and positions of the model, and the memory of this machine.
Values that depend on the user's goal, such as the learning rate and the number of epochs, are marked with "choose".
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from omnizoo.cli.render_file import render_file
from omnizoo.cli.train import check_nproc
from omnizoo.config.errors import UserError
from omnizoo.config.hub import local_path, parse_name
from omnizoo.config.load import load_config
from omnizoo.hub.resolve import resolve_names, with_values
from omnizoo.parallel.layout import micro_batches, plan_layout

MAX_MEASURED = 2**15  # in tokens; longer samples are not measured exactly
MIN_ROWS_TO_SPLIT = 20  # minimum number of rows in a source for holding some of them out
STATE_BYTES = 16  # per trained parameter: fp32 weight, gradient and two moments


@dataclass(frozen=True)
class NewConfigFacts:
    """Facts about the model, the data and the machine that determine the sizes in a config."""

    model: str  # folder
    part: str | None
    family: str
    parameters: int
    experts: int
    positions: int | None
    modalities: tuple[str, ...]
    data: str
    format: str
    rows: int
    lengths: list[int]  # sorted lengths of the inspected samples, in tokens
    splits: tuple[str, str] | None  # names of the training and evaluation splits
    nproc: int
    is_host: bool
    memory: int  # in bytes: memory of one device, or of this machine if it has no devices
    device: str

    @property
    def mean(self) -> float:
        """Mean length of the inspected samples, in tokens."""
        return sum(self.lengths) / len(self.lengths)

    @property
    def median(self) -> int:
        """Median length of the inspected samples, in tokens."""
        return self.lengths[len(self.lengths) // 2]

    @property
    def is_plain_text(self) -> bool:
        """Whether the rows are texts without prompts, as in pretraining."""
        return self.format in ("text", "document")


def new_config(args: argparse.Namespace) -> int:
    """Write a config for a model folder and data."""
    out = args.out or Path("first.yaml")
    if out.exists():
        raise UserError(f"--out: {out} already exists. Delete it, or choose another file.")
    check_nproc(args.nproc)
    facts = collect_facts(args.model, args.data, args.nproc)
    text = render_config(facts, out.stem)

    # Check that the written config is valid, and that its batch fits the layout.
    config = load_config(yaml.safe_load(text))
    layout = plan_layout(config.parallel, facts.nproc)
    micro_batches(layout, config.train.packs_per_step, config.train.micro_batch)

    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out: cannot write {out}: {error.strerror}") from None
    print(f"{facts.family}, {facts.parameters / 1e6:,.1f} M parameters; {facts.rows:,} rows, schema: {facts.format}")
    print(f"written: {out}. Inspect the data, then train:")
    print(f"  omnizoo data inspect {out}")
    print(f"  omnizoo train {out}{nproc_flag(facts)}")
    return 0


def collect_facts(model: str, data: str, nproc: int | None) -> NewConfigFacts:
    """Build the model on the meta device, render some samples, and return the facts that the config depends on."""
    if parse_name(model) is None and not Path(model).expanduser().is_dir():
        raise UserError(
            f"MODEL: {model} is not a folder; expected a folder with a Hugging Face model, or ORG/NAME on the hub"
        )
    settings: dict[str, Any] = {
        "model": {"path": model},
        "data": {"sources": [{"path": data}], "pack_tokens": MAX_MEASURED},
    }
    config, pins = resolve_names(load_config(settings), with_weights=False)
    folder = Path(local_path(str(config.model.path))).expanduser()
    import torch

    from omnizoo.data.loading.inspection import inspect_data, one_lane
    from omnizoo.data.rendering.template_limits import memory_limits
    from omnizoo.models.recipe import read_facts
    from omnizoo.ops.device import device_name, is_host, pick_device, total_memory
    from omnizoo.training.setup import build_bundle

    part = _part(folder)
    splits = _splits(str(config.data.sources[0].path))
    if splits:
        settings["data"]["sources"][0]["split"] = splits[0]
    if part:
        settings["model"]["part"] = part

    with memory_limits():
        bundle = build_bundle(one_lane(with_values(load_config(settings), pins)))
        reader = bundle.reader()
        if reader.format_of(0)[0] == "preference":
            settings["train"] = {"losses": [{"kind": "dpo"}]}
            bundle = build_bundle(one_lane(with_values(load_config(settings), pins)))
            reader = bundle.reader()
        inspection = inspect_data(reader, 0)
    if inspection.bad_rows:
        raise UserError(f"{inspection.bad_rows[0]}. Fix the row, or set `data.on_bad_row: skip` to skip such rows.")

    device = pick_device(0)
    num_devices = 1 if is_host(device) else torch.accelerator.device_count()
    return NewConfigFacts(
        model=model,
        part=part,
        family=type(bundle.model).__name__,
        parameters=sum(p.numel() for p in bundle.model.parameters()),
        experts=read_facts(bundle.model).num_experts,
        positions=reader.most_positions,
        modalities=tuple(reader.modalities),
        data=data,
        format=reader.format_of(0)[0] or "messages",
        rows=len(reader.sources[0]),
        lengths=sorted(inspection.lengths),
        splits=splits,
        nproc=nproc or num_devices,
        is_host=is_host(device),
        memory=total_memory(device),
        device=device_name(device),
    )


def _part(folder: Path) -> str | None:
    """Return the name of the first submodel that has a recipe, if the complete model has none."""
    from transformers import AutoConfig, PretrainedConfig

    from omnizoo.models.recipe import recipe_of
    from omnizoo.models.untrusted_folders import read_json

    config_file = folder / "config.json"
    model_type = read_json(config_file).get("model_type") if config_file.is_file() else None
    if not isinstance(model_type, str) or recipe_of(model_type).about:
        return None
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError, KeyError, TypeError):
        return None  # building the model reports the error
    for name in config.sub_configs:
        submodel = getattr(config, name, None)
        if isinstance(submodel, PretrainedConfig) and recipe_of(submodel.model_type).modalities is not None:
            return str(name)
    return None


def _splits(data: str) -> tuple[str, str] | None:
    """Return the names of the training and evaluation splits, if the data is a folder or repository that has both."""
    from omnizoo.data.sources.open import data_files
    from omnizoo.hub.dataset import files_in_split

    path = Path(data).expanduser()
    name = parse_name(data)
    if name is None and not path.is_dir():
        return None

    def files_of(split: str) -> Sequence[Any]:
        return files_in_split(name, split) if name is not None else data_files(path, split)

    for eval_split in ("validation", "test"):
        try:
            if files_of("train") != files_of(eval_split):
                return "train", eval_split
        except UserError:
            continue
    return None


def power_above(value: float) -> int:
    """Return the smallest power of two that is at least `value`."""
    return 1 << max(0, math.ceil(math.log2(max(1.0, value))))


def pack_tokens(facts: NewConfigFacts) -> int:
    """Return a pack length that fits 99 % of the samples, and several samples of median length."""
    num_samples = len(facts.lengths)
    percentile_99 = facts.lengths[min(num_samples - 1, int(0.99 * num_samples))]
    usual_tokens = 1024 if facts.is_host else 8192
    tokens = max(power_above(percentile_99), min(usual_tokens, power_above(8 * facts.median)))
    return min(tokens, facts.positions or tokens)


def held_out(facts: NewConfigFacts) -> int:
    """Return n if every n-th row should be held out for evaluation, or 0 if none should."""
    if facts.splits or facts.rows < MIN_ROWS_TO_SPLIT:
        return 0
    return 50 if facts.rows >= 1000 else 10


def packs_per_step(facts: NewConfigFacts, num_packs: float) -> int:
    """Return the number of packs per step, a multiple of nproc.

    An epoch has about 50 steps, unless a step would then exceed a usual number of tokens.
    """
    usual_tokens = 2**14 if facts.is_host else 2**18
    max_packs = max(1, usual_tokens // pack_tokens(facts))
    packs = max(1, min(max_packs, round(num_packs / 50)))
    return facts.nproc * max(1, round(packs / facts.nproc))


def learning_rate(facts: NewConfigFacts) -> float:
    """Return a usual learning rate for full fine-tuning of a model of this size."""
    if facts.parameters > 3e9:
        return 1e-5
    if facts.parameters > 3e8:
        return 2e-5
    return 3e-4


def expert_ranks(facts: NewConfigFacts) -> int:
    """Return the largest number that divides both the number of ranks and the number of experts."""
    return math.gcd(facts.nproc, facts.experts)


def source_options(facts: NewConfigFacts, every: int) -> tuple[str, str]:
    """Return the YAML options that select the rows of the training source and of the evaluation source."""
    if facts.splits:
        train_split, eval_split = facts.splits
        return f", split: {train_split}", f", split: {eval_split}"
    if every:
        return f", take: all but every {every}th", f", take: every {every}th"
    return "", ""


def render_config(facts: NewConfigFacts, name: str) -> str:
    """Return the config as YAML with comments."""
    tokens = pack_tokens(facts)
    every = held_out(facts)
    num_held_out = facts.rows // every if every else 0
    num_packs = (facts.rows - num_held_out) * facts.mean / tokens
    step_packs = packs_per_step(facts, num_packs)
    epochs = 1 if facts.is_plain_text else 3
    train_options, eval_options = source_options(facts, every)

    required_memory = facts.parameters * STATE_BYTES / facts.nproc
    rank_memory = facts.memory / facts.nproc if facts.is_host else facts.memory
    fits = required_memory < 0.7 * rank_memory
    lr = learning_rate(facts)
    if not fits:
        lr *= 10  # adapters need a higher learning rate than full fine-tuning
    return render_file(
        "config.yaml.jinja",
        facts=facts,
        name=name,
        nproc_flag=nproc_flag(facts),
        million_parameters=f"{facts.parameters / 1e6:,.1f}",
        memory=f"{required_memory / 2**30:,.1f} of {rank_memory / 2**30:,.1f} GiB on each rank",
        fits=fits,
        train_options=train_options,
        eval_options=eval_options,
        pack_tokens=tokens,
        num_overlong=sum(length > tokens for length in facts.lengths),
        expert_ranks=expert_ranks(facts),
        epochs=epochs,
        steps=max(1, math.ceil(num_packs / step_packs)) * epochs,
        packs_per_step=step_packs,
        lr=yaml_float(lr),
    )


def nproc_flag(facts: NewConfigFacts) -> str:
    """Return the flag `--nproc` for `omnizoo train`, or an empty string for one rank."""
    return f" --nproc {facts.nproc}" if facts.nproc > 1 else ""


def yaml_float(value: float) -> str:
    """Format a number so that YAML parses it as a float: 3.0e-4."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"
