"""`omnizoo new MODEL_FOLDER DATA`: look at both, and write a config that trains as it is, with the reasons beside it.

Sizes come from what is there: lengths of rows, experts and positions of the model, memory and devices of this machine.
What only the user can know (the learning rate, how long to train) is marked with "choose".
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from omnizoo.config.errors import UserError
from omnizoo.config.hub import hub_hint
from omnizoo.config.load import load_config
from omnizoo.parallel.layout import micro_batches, plan_layout

LONGEST = 2**15  # tokens of a sample that is looked at whole
LEAST_HELD_OUT = 20  # rows of a source from which some are held out
STATE_BYTES = 16  # of a trained parameter: fp32 weight, gradient and two moments


@dataclass(frozen=True)
class Found:
    """What there is to decide by."""

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
    lengths: list[int]  # of the samples that were looked at, sorted
    splits: tuple[str, str] | None  # of a folder: what to train on, and what to evaluate on
    nproc: int
    is_host: bool
    memory: int  # bytes of one device, or of this machine
    device: str

    @property
    def mean(self) -> float:
        return sum(self.lengths) / len(self.lengths)

    @property
    def is_plain_text(self) -> bool:
        return self.format in ("text", "document")


def new_config(model: str, data: str, nproc: int | None, out: Path) -> int:
    """Write the config to `out`, and say what it is."""
    if out.exists():
        raise UserError(f"--out: {out} exists already; it is left as it is")
    if nproc is not None and not 1 <= nproc <= 1024:
        raise UserError(f"--nproc is {nproc}; expected how many processes will train on this machine, 1 to 1024")
    found = look(model, data, nproc)
    text = write(found, out.stem)
    settings = load_config(yaml.safe_load(text))
    micro_batches(plan_layout(settings.parallel, found.nproc), settings.train.global_batch, settings.train.micro_batch)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out: {out} cannot be written: {error.strerror}") from None
    nproc_flag = f" --nproc {found.nproc}" if found.nproc > 1 else ""
    print(f"{found.family}, {found.parameters / 1e6:,.1f} M parameters; {found.rows:,} rows, taken as: {found.format}")
    print(f"written: {out}. Look at the data and train:")
    print(f"  omnizoo data inspect {out}\n  omnizoo train {out}{nproc_flag}")
    return 0


def look(model: str, data: str, nproc: int | None) -> Found:
    """The model on meta, and the first few hundred samples as the model would see them."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise UserError(
            f"new: {model} is not a folder; expected one with a Hugging Face model{hub_hint(model, 'model')}"
        )
    import torch

    from omnizoo.assembly.assemble import assemble
    from omnizoo.data.inspect import inspect_data, one_lane
    from omnizoo.ops.device import device_name, is_host, pick_device, total_memory
    from omnizoo.recipes.base import read_facts

    part = _part(folder)
    splits = _splits(data)
    source: dict[str, Any] = {"path": data} | ({"split": splits[0]} if splits else {})
    spec = {"path": model} | ({"part": part} if part else {})
    settings: dict[str, Any] = {"model": spec, "data": {"sources": [source], "pack_tokens": LONGEST}}
    assembled = assemble(one_lane(load_config(settings)))
    reader = assembled.reader()
    if reader.format_of(0)[0] == "preference":
        settings["train"] = {"losses": [{"kind": "dpo"}]}
        assembled = assemble(one_lane(load_config(settings)))
        reader = assembled.reader()
    inspection = inspect_data(reader, 0)
    if inspection.bad_rows:
        raise UserError(f"{inspection.bad_rows[0]}; `data.on_bad_row: skip` would go on without such rows")
    device = pick_device(0)
    count = 1 if is_host(device) else torch.accelerator.device_count()
    return Found(
        model=model,
        part=part,
        family=type(assembled.model).__name__,
        parameters=sum(p.numel() for p in assembled.model.parameters()),
        experts=read_facts(assembled.model).num_experts,
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
    """Of a published model of several, the one that a recipe is for."""
    from transformers import AutoConfig, PretrainedConfig

    from omnizoo.models.artefact import read_json
    from omnizoo.recipes.base import recipe_of

    kind = read_json(folder / "config.json").get("model_type") if (folder / "config.json").is_file() else None
    if not isinstance(kind, str) or recipe_of(kind).about:
        return None
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError, KeyError, TypeError):
        return None  # what is wrong with it is said where it is built
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PretrainedConfig) and recipe_of(part.model_type).modalities is not None:
            return str(name)
    return None


def _splits(data: str) -> tuple[str, str] | None:
    from omnizoo.data.sources import data_files

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


# ---- what is decided


def power_above(value: float) -> int:
    return 1 << max(0, math.ceil(math.log2(max(1.0, value))))


def pack_tokens(found: Found) -> int:
    """Long enough for nearly every sample, and for several of the usual ones."""
    nearly_all = found.lengths[min(len(found.lengths) - 1, int(0.99 * len(found.lengths)))]
    median = found.lengths[len(found.lengths) // 2]
    usual = 1024 if found.is_host else 8192
    wanted = max(power_above(nearly_all), min(usual, power_above(8 * median)))
    return min(wanted, found.positions or wanted)


def held_out(found: Found) -> int:
    """Every how many-th row is held out; 0: none."""
    if found.splits or found.rows < LEAST_HELD_OUT:
        return 0
    return 50 if found.rows >= 1000 else 10


def global_batch(found: Found, packs: float) -> int:
    """Packs of a step: about 50 steps an epoch, up to a usual number of tokens; the same for every process."""
    most = max(1, (2**14 if found.is_host else 2**18) // pack_tokens(found))
    wanted = max(1, min(most, round(packs / 50)))
    return found.nproc * max(1, round(wanted / found.nproc))


def rate(found: Found) -> float:
    return 1e-5 if found.parameters > 3e9 else 2e-5 if found.parameters > 3e8 else 3e-4


def expert_ranks(found: Found) -> int:
    return max((n for n in range(1, found.nproc + 1) if found.nproc % n == 0 and found.experts % n == 0), default=1)


def write(found: Found, name: str) -> str:
    """The config as YAML, with comments."""
    pack, every = pack_tokens(found), held_out(found)
    rows = found.rows - (found.rows // every if every else 0)
    packs = rows * found.mean / pack
    batch = global_batch(found, packs)
    epochs = 1 if found.is_plain_text else 3
    steps = max(1, math.ceil(packs / batch)) * epochs
    cut = sum(length > pack for length in found.lengths)
    need, have = found.parameters * STATE_BYTES / found.nproc, found.memory / (found.nproc if found.is_host else 1)
    fits = need < 0.7 * have
    trained = "all weights" if fits else "adapters"
    flag = f" --nproc {found.nproc}" if found.nproc > 1 else ""
    lines = [
        f"# Written by `omnizoo new {found.model} {found.data}` for {found.nproc} process(es) on {found.device}.",
        f"#   omnizoo data inspect {name}.yaml      look at the samples first",
        f"#   omnizoo train {name}.yaml{flag}",
        "# Lines with `choose` are yours to decide; every key: docs/configuration.md",
        "model:",
        f"  path: {quoted(found.model)} # {found.family}, {found.parameters / 1e6:,.1f} M parameters",
    ]
    if found.part:
        lines.append(f"  part: {found.part} # the model of several in that folder that is trained")
    if found.modalities:
        taken = ", ".join(found.modalities)
        lines.append(f"  # it takes {taken} besides text; budgets: model.modalities.NAME.encoder.options")
    lines += adapter_lines(found, fits, need, have)
    split = f", split: {found.splits[0]}" if found.splits else f", take: all but every {every}th" if every else ""
    lines += [
        "",
        "data:",
        "  sources:",
        f"    - {{path: {quoted(found.data)}{split}}} # {found.rows:,} rows, taken as: {found.format}",
    ]
    if found.splits or every:
        part = f"split: {found.splits[1]}" if found.splits else f"take: every {every}th"
        lines += ["  eval_sources:", f"    - {{path: {quoted(found.data)}, {part}}}"]
    else:
        lines.append("  # eval_sources: too few rows to hold any out; with others: [{path: held_out.jsonl}]")
    median = found.lengths[len(found.lengths) // 2]
    lines.append(f"  pack_tokens: {pack} # samples: median {median:,}, longest {found.lengths[-1]:,} tokens")
    if cut:
        does = "cut into pieces" if found.is_plain_text else "cut off"
        longer = f"{cut:,} of {len(found.lengths):,} samples are longer, and {does}"
        lines.append(f"  # {longer}; choose: `overlong: drop` leaves them out")
    lines += ["", "parallel:"]
    lines.append("  dp_shard: -1 # all processes share one copy of the weights (FSDP2)")
    if found.experts and expert_ranks(found) > 1:
        lines.append(f"  ep: {expert_ranks(found)} # the {found.experts} experts of a layer are shared out")
    lines.append(f"  precision: {'fp32' if found.is_host else 'bf16'}")
    if not found.is_host:
        lines.append("  recompute: selective # less memory, some more work; `none` if `omnizoo plan` says that it fits")
    lines += [
        "",
        "train:",
        f"  epochs: {epochs} # choose: about {steps:,} steps; with `steps` in its place, a fixed number",
        f"  global_batch: {batch} # packs of a step over all processes: up to {batch * pack:,} tokens",
        f"  lr: {number(rate(found) * (1 if fits else 10))} # choose: usual for {trained} of a model of this size",
        "  warmup_ratio: 0.03",
    ]
    if found.format == "preference":
        lines.append("  losses: [{kind: dpo, beta: 0.1}] # choose: simpo, orpo or kto (docs/preferences.md)")
    if found.splits or every:
        lines.append(f"  eval_every: {max(1, steps // 10)}")
    lines += ["", "checkpoint:", f"  every: {max(1, steps // 4)}", "  keep: 2"]
    if found.splits or every:
        lines.append("  best: eval/loss # that checkpoint is kept as well")
    lines += ["", "log:", f"  dir: runs/{name}", ""]
    return "\n".join(lines)


def adapter_lines(found: Found, fits: bool, need: float, have: float) -> Sequence[str]:
    about = f"{need / 2**30:,.1f} of {have / 2**30:,.1f} GiB on each process"
    if fits:
        return [f"  # all weights are trained: weights, gradients and optimizer take {about}"]
    return [
        f"  # to train all weights would take {about}: an adapter is trained instead (docs/adapters.md)",
        "  adapter: {kind: lora, rank: 16, alpha: 32}",
    ]


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def number(value: float) -> str:
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"
