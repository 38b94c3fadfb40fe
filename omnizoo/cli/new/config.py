"""`omnizoo new MODEL_FOLDER DATA`: write a config that trains without edits, with the reason for each value.

Sizes depend on the lengths of the samples, the experts and positions of the model, and the memory of this machine.
Values that depend on the user's goal, such as the learning rate and the number of epochs, are marked with "choose".
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from omnizoo.cli.render_file import render_file
from omnizoo.cli.train import check_nproc
from omnizoo.config.errors import UserError
from omnizoo.config.hub import hub_hint
from omnizoo.config.load import load_config
from omnizoo.parallel.layout import micro_batches, plan_layout

LONGEST = 2**15  # maximum length, in tokens, up to which the lengths of samples are measured exactly
LEAST_HELD_OUT = 20  # minimum number of rows of a source to hold some of them out
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
    memory: int  # memory of one device, or of this machine without devices, in bytes
    device: str

    @property
    def mean(self) -> float:
        return sum(self.lengths) / len(self.lengths)

    @property
    def median(self) -> int:
        return self.lengths[len(self.lengths) // 2]

    @property
    def is_plain_text(self) -> bool:
        return self.format in ("text", "document")


def new_config(args: argparse.Namespace) -> int:
    """Write a config for a model folder and data."""
    out = args.out or Path("first.yaml")
    if out.exists():
        raise UserError(f"--out: {out} exists already; it is left as it is")
    check_nproc(args.nproc)
    facts = look(args.model, args.data, args.nproc)
    text = write(facts, out.stem)
    settings = load_config(yaml.safe_load(text))
    micro_batches(
        plan_layout(settings.parallel, facts.nproc), settings.train.packs_per_step, settings.train.micro_batch
    )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out: {out} cannot be written: {error.strerror}") from None
    print(f"{facts.family}, {facts.parameters / 1e6:,.1f} M parameters; {facts.rows:,} rows, taken as: {facts.format}")
    print(f"written: {out}. Look at the data and train:")
    print(f"  omnizoo data inspect {out}\n  omnizoo train {out}{nproc_flag(facts)}")
    return 0


def look(model: str, data: str, nproc: int | None) -> NewConfigFacts:
    """Build the model on the meta device, render some samples, and return the facts that the config depends on."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise UserError(
            f"new: {model} is not a folder; expected one with a Hugging Face model{hub_hint(model, 'model')}"
        )
    import torch

    from omnizoo.data.loading.inspection import inspect_data, one_lane
    from omnizoo.data.rendering.template_limits import memory_limits
    from omnizoo.models.recipe import read_facts
    from omnizoo.ops.device import device_name, is_host, pick_device, total_memory
    from omnizoo.training.setup import build_bundle

    part = _part(folder)
    splits = _splits(data)
    source: dict[str, Any] = {"path": data} | ({"split": splits[0]} if splits else {})
    spec = {"path": model} | ({"part": part} if part else {})
    settings: dict[str, Any] = {"model": spec, "data": {"sources": [source], "pack_tokens": LONGEST}}
    with memory_limits():
        bundle = build_bundle(one_lane(load_config(settings)))
        reader = bundle.reader()
        if reader.format_of(0)[0] == "preference":
            settings["train"] = {"losses": [{"kind": "dpo"}]}
            bundle = build_bundle(one_lane(load_config(settings)))
            reader = bundle.reader()
        inspection = inspect_data(reader, 0)
    if inspection.bad_rows:
        raise UserError(f"{inspection.bad_rows[0]}; `data.on_bad_row: skip` would go on without such rows")
    device = pick_device(0)
    count = 1 if is_host(device) else torch.accelerator.device_count()
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
        nproc=nproc or count,
        is_host=is_host(device),
        memory=total_memory(device),
        device=device_name(device),
    )


def _part(folder: Path) -> str | None:
    """Return the name of the submodel that has a recipe, if the model as a whole has none."""
    from transformers import AutoConfig, PretrainedConfig

    from omnizoo.models.recipe import recipe_of
    from omnizoo.models.untrusted_folders import read_json

    kind = read_json(folder / "config.json").get("model_type") if (folder / "config.json").is_file() else None
    if not isinstance(kind, str) or recipe_of(kind).about:
        return None
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError, KeyError, TypeError):
        return None  # building the model reports the error
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PretrainedConfig) and recipe_of(part.model_type).modalities is not None:
            return str(name)
    return None


def _splits(data: str) -> tuple[str, str] | None:
    """Return the names of the training and evaluation splits, if the data is a folder that has both."""
    from omnizoo.data.sources.open import data_files

    path = Path(data).expanduser()
    if not path.is_dir():
        return None
    for held_out in ("validation", "test"):
        try:
            if data_files(path, "train") != data_files(path, held_out):
                return "train", held_out
        except UserError:
            continue
    return None


def power_above(value: float) -> int:
    """Return the smallest power of two that is at least `value`."""
    return 1 << max(0, math.ceil(math.log2(max(1.0, value))))


def pack_tokens(facts: NewConfigFacts) -> int:
    """Return a pack length that fits 99 % of the samples, and several samples of median length."""
    nearly_all = facts.lengths[min(len(facts.lengths) - 1, int(0.99 * len(facts.lengths)))]
    usual = 1024 if facts.is_host else 8192
    wanted = max(power_above(nearly_all), min(usual, power_above(8 * facts.median)))
    return min(wanted, facts.positions or wanted)


def held_out(facts: NewConfigFacts) -> int:
    """Return n if every n-th row is held out for evaluation, or 0 if no row is."""
    if facts.splits or facts.rows < LEAST_HELD_OUT:
        return 0
    return 50 if facts.rows >= 1000 else 10


def packs_per_step(facts: NewConfigFacts, packs: float) -> int:
    """Return the packs per step: about 50 steps per epoch, limited by a usual number of tokens, a multiple of nproc."""
    most = max(1, (2**14 if facts.is_host else 2**18) // pack_tokens(facts))
    wanted = max(1, min(most, round(packs / 50)))
    return facts.nproc * max(1, round(wanted / facts.nproc))


def learning_rate(facts: NewConfigFacts) -> float:
    return 1e-5 if facts.parameters > 3e9 else 2e-5 if facts.parameters > 3e8 else 3e-4


def expert_ranks(facts: NewConfigFacts) -> int:
    return max((n for n in range(1, facts.nproc + 1) if facts.nproc % n == 0 and facts.experts % n == 0), default=1)


def write(facts: NewConfigFacts, name: str) -> str:
    """Return the config as YAML with comments."""
    pack, every = pack_tokens(facts), held_out(facts)
    num_rows = facts.rows - (facts.rows // every if every else 0)
    packs = num_rows * facts.mean / pack
    batch = packs_per_step(facts, packs)
    epochs = 1 if facts.is_plain_text else 3
    need = facts.parameters * STATE_BYTES / facts.nproc
    have = facts.memory / (facts.nproc if facts.is_host else 1)
    fits = need < 0.7 * have
    train_rows, eval_rows = "", ""
    if facts.splits:
        train_rows, eval_rows = (f", split: {split}" for split in facts.splits)
    elif every:
        train_rows, eval_rows = f", take: all but every {every}th", f", take: every {every}th"
    return render_file(
        "config.yaml.jinja",
        facts=facts,
        name=name,
        nproc_flag=nproc_flag(facts),
        million_parameters=f"{facts.parameters / 1e6:,.1f}",
        memory=f"{need / 2**30:,.1f} of {have / 2**30:,.1f} GiB on each process",
        fits=fits,
        train_rows=train_rows,
        eval_rows=eval_rows,
        pack_tokens=pack,
        num_overlong=sum(length > pack for length in facts.lengths),
        expert_ranks=expert_ranks(facts),
        epochs=epochs,
        steps=max(1, math.ceil(packs / batch)) * epochs,
        packs_per_step=batch,
        lr=number(learning_rate(facts) * (1 if fits else 10)),
    )


def nproc_flag(facts: NewConfigFacts) -> str:
    return f" --nproc {facts.nproc}" if facts.nproc > 1 else ""


def number(value: float) -> str:
    """Format a number so that YAML parses it as a float: 3.0e-4."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"
