"""`omnizoo new MODEL DATA`: write a config that trains without edits, with the reason for each value.

Sizes depend on the lengths of the samples, the model's number of experts and maximum number of positions, and the
memory of this machine. Values that depend on the user's goal, such as the learning rate and the number of epochs, are
marked with "choose". If the rows cannot be read before the user has made a decision, one line is marked with "CHOOSE".
"""

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from omnizoo.cli.new.dataset import SOURCE, DatasetSettings, estimated_lengths, fit_settings
from omnizoo.cli.new.overrides import flow, source_text, write_overrides
from omnizoo.cli.render_file import render_file
from omnizoo.cli.train import check_nproc
from omnizoo.config.errors import UserError, printable
from omnizoo.config.hub import local_path, parse_name
from omnizoo.config.load import load_config
from omnizoo.config.overrides import apply_override, parse_overrides
from omnizoo.hub.resolve import resolve_names
from omnizoo.parallel.layout import check_step, plan_layout

MAX_CORES = 8  # on a machine without accelerators, packs per step are a multiple of at most this many ranks
MAX_COMMENT = 300  # maximum number of characters in a comment
MIN_ROWS_TO_SPLIT = 20  # a source with fewer rows is used for training only
STATE_BYTES = 16  # bytes per trained parameter: fp32 weight, gradient and two moments


@dataclass(frozen=True)
class NewConfigFacts:
    """Facts about the model, the data and the machine that determine the sizes in a config."""

    model: str  # MODEL argument: folder or name on the hub
    part: str | None  # submodel to train (`model.part`); None for the complete model
    family: str  # class name of the model
    parameters: int  # number of parameters
    experts: int  # number of experts; 0 for dense models
    positions: int | None  # maximum number of positions; None if there is no limit
    modalities: tuple[str, ...]  # names of the modalities that the model reads or generates
    data: str  # DATA argument: path or name on the hub
    settings: DatasetSettings
    changes: Mapping[str, Any]  # values from the command line, by key
    format: str  # row schema
    rows: int  # number of rows in the source
    lengths: list[int]  # sorted lengths of the inspected samples, in tokens
    splits: tuple[str, str] | None  # names of the training and evaluation splits
    nproc: int  # number of ranks
    cores: int  # number of CPU cores that this process may use
    is_host: bool  # whether the machine has no accelerator
    memory: int  # bytes of memory of one accelerator, or of the machine if it has none
    device: str  # name of the accelerator or CPU

    @property
    def median(self) -> int:
        """Median length of the inspected samples, in tokens."""
        return self.lengths[len(self.lengths) // 2]

    @property
    def is_plain_text(self) -> bool:
        """Whether the rows are texts without prompts, as in pretraining."""
        return self.format in ("text", "document", "tokenized")


def new_config(args: argparse.Namespace) -> int:
    """Write a config for a model and data, and print the next commands.

    Args:
        args: The command line.

    Returns:
        The exit code 0.

    Raises:
        UserError: If the file exists or cannot be written, or the model or the data cannot be used.
    """
    out = args.out or Path("first.yaml")
    if out.exists():
        raise UserError(f"--out: {out} already exists. Delete it, or choose another file.")
    check_nproc(args.nproc)
    facts = collect_facts(args, check_overrides(args), out)
    text = write_overrides(render_config(facts, out.stem), line_overrides(facts.changes))

    # Check that the written config is valid, and that its batch fits the layout.
    config = load_config(yaml.safe_load(text))
    layout = plan_layout(config.parallel, facts.nproc)
    check_step(layout, config.train)

    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out: cannot write {out}: {error.strerror}") from None
    print_summary(facts, out)
    return 0


def print_summary(facts: NewConfigFacts, out: Path) -> None:
    """Print the facts, the settings that the rows need, and the next commands."""
    print(f"{facts.family}, {facts.parameters / 1e6:,.1f} M parameters; {facts.rows:,} rows, schema: {facts.format}")
    for key, comment in facts.settings.comments.items():
        print(f"  {key}: {short_comment(comment)}")
    if facts.settings.choice:
        print(f"written: {out}. Edit the line after CHOOSE, then inspect the data and train:")
    else:
        print(f"written: {out}. Inspect the data, then train:")
    print(f"  omnizoo data inspect {out}")
    print(f"  omnizoo train {out}{nproc_flag(facts)}")


def check_overrides(args: argparse.Namespace) -> dict[str, Any]:
    """Return the config values from the command line, by key. Raises `UserError` if one of them is not valid."""
    source = {"path": args.data}
    sections = {"model": {"path": args.model}, "data": {"sources": [source], "eval_sources": [source]}}
    load_config(sections, args.overrides)
    return parse_overrides(args.overrides)


def line_overrides(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes without the keys for reading rows. `DatasetSettings` already contains those keys."""
    in_settings = ("data.sources.", "data.eval_sources", "data.ignore", "data.on_bad_row", "data.chat_template")
    return {key: value for key, value in changes.items() if not key.startswith((*in_settings, "train.losses"))}


def dataset_settings(model: str, data: str, changes: Mapping[str, Any], out: Path) -> DatasetSettings:
    """Return the initial settings for reading the rows, to which `fit_settings` applies fixes.

    Args:
        model: The argument MODEL.
        data: The argument DATA.
        changes: Config values from the command line, by key.
        out: File for the config. A chat template is written next to it.
    """
    sections: dict[str, dict[str, Any]] = {"model": {"path": model}, "data": {"sources": [{"path": data}]}}
    for key, value in changes.items():
        if key.startswith(("model.", "data.", "train.losses")):
            apply_override(sections, key, value)
    config, pins = resolve_names(load_config(deepcopy(sections)), with_weights=False)
    part = _part(Path(local_path(str(config.model.path))).expanduser())
    if part:
        sections["model"].setdefault("part", part)
    source = sections["data"]["sources"][0]
    splits = _splits(str(config.data.sources[0].path)) if "split" not in source else None
    if splits:
        source["split"] = splits[0]
    template_file = out.with_name(f"{out.stem}_template.jinja")
    return DatasetSettings(
        sections=sections, template_file=template_file, fixed=frozenset(changes), pins=pins, splits=splits
    )


def collect_facts(args: argparse.Namespace, changes: Mapping[str, Any], out: Path) -> NewConfigFacts:
    """Build the model on the meta device, render some samples, and return the facts that the config depends on.

    Args:
        args: The command line.
        changes: Config values from the command line, by key.
        out: File for the config.

    Raises:
        UserError: If the model or the data cannot be used.
    """
    model, data = args.model, args.data
    if parse_name(model) is None and not Path(model).expanduser().is_dir():
        raise UserError(
            f"MODEL: {model} is not a folder; expected a folder with a Hugging Face model, or ORG/NAME on the hub"
        )
    import torch

    from omnizoo.data.rendering.template_limits import memory_limits
    from omnizoo.data.sources.open import open_source
    from omnizoo.models.recipe import read_facts
    from omnizoo.ops.device import device_name, is_host, pick_device, total_memory
    from omnizoo.training.setup import build_bundle

    settings = dataset_settings(model, data, changes, out)
    with memory_limits():
        bundle = build_bundle(settings.config())
        fitted = fit_settings(settings, bundle)
    source = fitted.reader.sources[0] if fitted else open_source(settings.unread_source())
    lengths = fitted.lengths if fitted else estimated_lengths(source)
    format_name = fitted.reader.format_of(0)[0] if fitted else "not known yet"

    device = pick_device(0)
    num_devices = 1 if is_host(device) else torch.accelerator.device_count()
    return NewConfigFacts(
        model=model,
        part=settings.sections["model"].get("part"),
        family=type(bundle.model).__name__,
        parameters=sum(p.numel() for p in bundle.model.parameters()),
        experts=read_facts(bundle.model).num_experts,
        positions=bundle.media["most_positions"],
        modalities=tuple(bundle.media.get("modalities", ())),
        data=data,
        settings=settings,
        changes=changes,
        format=format_name or "messages",
        rows=len(source),
        lengths=lengths,
        splits=settings.splits,
        nproc=args.nproc or num_devices,
        cores=len(os.sched_getaffinity(0)),
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
    """Return a pack length. At least 99 % of the samples fit into a pack, and usually several of median length."""
    if facts.changes.get("data.pack_tokens"):
        return int(facts.changes["data.pack_tokens"])
    num_samples = len(facts.lengths)
    percentile_99 = facts.lengths[min(num_samples - 1, int(0.99 * num_samples))]
    usual_tokens = 1024 if facts.is_host else 8192
    tokens = max(power_above(percentile_99), min(usual_tokens, power_above(8 * facts.median)))
    return min(tokens, facts.positions or tokens)


def held_out(facts: NewConfigFacts) -> int:
    """Return n if every n-th row should be held out for evaluation, or 0 if no row should be."""
    is_set = "take" in facts.settings.source or "eval_sources" in facts.settings.sections["data"]
    if facts.splits or is_set or facts.rows < MIN_ROWS_TO_SPLIT:
        return 0
    return 50 if facts.rows >= 1000 else 10


def packs_per_step(facts: NewConfigFacts, num_packs: float) -> int:
    """Return the number of packs per step.

    An epoch has about 50 steps, unless a step would then have more tokens than usual. The result is a multiple of the
    number of ranks. On a machine without accelerators, where users may later start up to one rank per core, it is also
    a multiple of larger numbers of ranks.

    Args:
        facts: Facts about the model, the data and the machine.
        num_packs: Number of packs in an epoch.
    """
    if facts.changes.get("train.packs_per_step"):
        return int(facts.changes["train.packs_per_step"])
    if facts.changes.get("train.tokens_per_step"):
        return max(1, int(facts.changes["train.tokens_per_step"]) // pack_tokens(facts))
    multiple = facts.nproc
    if facts.is_host:
        multiple = math.lcm(facts.nproc, power_above((min(facts.cores, MAX_CORES) + 1) / 2))
    usual_tokens = 2**14 if facts.is_host else 2**18
    max_packs = max(1, usual_tokens // pack_tokens(facts))
    packs = max(1, min(max_packs, round(num_packs / 50)))
    return multiple * max(1, round(packs / multiple))


def learning_rate(facts: NewConfigFacts) -> float:
    """Return a typical learning rate for full fine-tuning of a model of this size."""
    if facts.parameters > 3e9:
        return 1e-5
    if facts.parameters > 3e8:
        return 2e-5
    return 3e-4


def expert_ranks(facts: NewConfigFacts) -> int:
    """Return the size for expert parallelism: the largest number that divides the numbers of ranks and experts."""
    return math.gcd(facts.nproc, facts.experts)


def source_lines(facts: NewConfigFacts, interval: int) -> tuple[str, list[str]]:
    """Return the training source and the evaluation sources as YAML.

    Args:
        facts: Facts about the model, the data and the machine.
        interval: n if every n-th row is held out for evaluation; 0 if no row is.
    """
    data = facts.settings.sections["data"]
    train_source = dict(facts.settings.source)
    eval_sources = [dict(source) for source in data.get("eval_sources", [])]
    choice = facts.settings.choice
    if not eval_sources and facts.splits:
        eval_sources = [train_source | {"split": facts.splits[1]}]
    elif not eval_sources and interval:
        eval_sources = [train_source | {"take": f"every {interval}th"}]
        train_source["take"] = f"all but every {interval}th"
    # The user edits a placeholder in the training source only. The evaluation source refers to it with a YAML alias.
    return source_text(train_source, anchor=choice), [source_text(source, alias=choice) for source in eval_sources]


def short_comment(text: str) -> str:
    """Return a text as one printable line of at most `MAX_COMMENT` characters."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= MAX_COMMENT else line[: MAX_COMMENT - 3] + "..."


def data_lines(facts: NewConfigFacts) -> list[str]:
    """Return the keys of `data` that the rows need, as YAML with the reason for each value."""
    lines = []
    for name, value in facts.settings.sections["data"].items():
        if name in ("ignore", "on_bad_row", "chat_template"):
            comment = facts.settings.comments.get(f"data.{name}", "")
            suffix = f" # choose: {short_comment(comment)}" if comment else ""
            lines.append(f"{name}: {flow(value)}{suffix}")
    return lines


def source_comments(facts: NewConfigFacts) -> list[str]:
    """Return the comments above the training source: the reason for each key, and the choice left to the user."""
    comments = []
    for key, comment in facts.settings.comments.items():
        name = key.rpartition(".")[2]
        if key.startswith(f"{SOURCE}."):
            verb = "CHOOSE" if name == facts.settings.choice else "choose"
            comments.append(f"{verb} `{name}`: {short_comment(comment)}")
    return sorted(comments, reverse=True)  # the line to edit follows CHOOSE


def render_config(facts: NewConfigFacts, name: str) -> str:
    """Return the config as YAML with comments. `name` is the name of the run folder."""
    tokens = pack_tokens(facts)
    interval = held_out(facts)
    num_held_out = facts.rows // interval if interval else 0
    used = facts.lengths if facts.is_plain_text else [min(length, tokens) for length in facts.lengths]
    num_packs = (facts.rows - num_held_out) * sum(used) / len(used) / tokens
    step_packs = packs_per_step(facts, num_packs)
    epochs = facts.changes.get("train.epochs") or (1 if facts.is_plain_text else 3)
    steps = facts.changes.get("train.steps") or math.ceil(max(1, math.ceil(num_packs / step_packs)) * epochs)
    train_source, eval_sources = source_lines(facts, interval)
    losses = facts.settings.sections.get("train", {}).get("losses")

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
        source_comments=source_comments(facts),
        train_source=train_source,
        eval_sources=eval_sources,
        data_lines=data_lines(facts),
        losses=flow(losses) if losses else "",
        loss_comment=short_comment(facts.settings.comments.get("train.losses", "")),
        pack_tokens=tokens,
        num_overlong=sum(length > tokens for length in facts.lengths),
        expert_ranks=expert_ranks(facts),
        epochs=epochs,
        steps=steps,
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
