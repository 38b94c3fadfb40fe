"""Convert the fields of another trainer's config. Every field becomes a key or a comment."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from omnizoo.cli.convert.source_file import Source
from omnizoo.cli.convert.values import CONVERSIONS, ConversionContext, NoCounterpartError
from omnizoo.config import reference
from omnizoo.config.errors import show_value
from omnizoo.config.foreign.base import KEEP, TWICE_THE_RANK, Rule, Trainer
from omnizoo.config.foreign.lookup import flatten
from omnizoo.config.schema import Config
from omnizoo.config.sections.loss_options import LOSSES, PREFERENCES

NOT_LISTED: Any = object()
CHOOSE = "CHOOSE"  # value of a key that the user must set
MAX_ROUNDS = 20  # validations of the converted config
MAX_EVERY = 1000  # largest N of `take: every Nth`
OURS = tuple(f"{section}." for section in Config.model_fields)


@dataclass
class Converted:
    """A converted config: its keys, comments, and the keys that could not be converted."""

    source: Source
    fields: dict[str, Any] = field(default_factory=dict)  # nested OmniZoo keys, with `data.sources` as a list
    comments: dict[str, str] = field(default_factory=dict)  # OmniZoo's dotted key -> comment on the line of the key
    unconverted: list[tuple[str, Any, str]] = field(default_factory=list)  # key of the other trainer, value, reason
    notices: list[str] = field(default_factory=list)  # lines for the console

    def set(self, key: str, value: Any, comment: str) -> None:
        """Set an OmniZoo key. Numbers in the key are indices of lists."""
        target: Any = self.fields
        *parents, last = key.split(".")
        for parent, following in zip(parents, [*parents[1:], last], strict=True):
            missing: Any = [] if following.isdigit() else {}
            if parent.isdigit():
                while len(target) <= int(parent):
                    target.append({})
                target = target[int(parent)]
            else:
                target = target.setdefault(parent, missing)
        if isinstance(target, list):
            target += [None] * (int(last) + 1 - len(target))
            target[int(last)] = value
        elif isinstance(value, dict) and isinstance(target.get(last), dict):
            target[last] |= value
        else:
            target[last] = value
        line = next((known for known in ("optimizer.options.betas", "train.losses") if key.startswith(known)), key)
        previous = self.comments.get(line)
        self.comments[line] = f"{previous}, {comment}" if previous and comment not in previous else comment

    def get(self, key: str) -> Any:
        """Return the value of an OmniZoo key; None if the key is not set."""
        value: Any = self.fields
        for part in key.split("."):
            if isinstance(value, list) and part.isdigit():
                value = value[int(part)] if int(part) < len(value) else None
            elif isinstance(value, dict):
                value = value.get(part)
            else:
                return None
        return value

    def remove(self, key: str) -> bool:
        """Remove an OmniZoo key, and parents that become empty. Return whether the key was set."""
        parent_key, _, last = key.rpartition(".")
        parent = self.get(parent_key) if parent_key else self.fields
        if isinstance(parent, dict) and last in parent:
            del parent[last]
        elif isinstance(parent, list) and last.isdigit() and int(last) < len(parent):
            del parent[int(last)]
        else:
            return False
        self.comments.pop(key, None)
        if not parent and parent_key.count(".") > 0 and parent_key != "model.adapter":
            self.remove(parent_key)
        return True

    def leave_out(self, key: str, value: Any, reason: str, is_notice: bool = True) -> None:
        """Record that a key of the other trainer is not converted."""
        self.unconverted.append((key, value, reason))
        if is_notice:
            self.notices.append(f"{self.source.place(key)}: {key}: {reason}")


def convert(source: Source) -> Converted:
    """Convert a config. The result is valid, except for keys whose value is `CHOOSE`."""
    converted = Converted(source)
    context = ConversionContext(source.fields, source.file.parent)
    special: dict[str, tuple[str, Any]] = {}
    for key, value in _leaves(source.fields):
        rule = source.trainer.find(key)
        if rule is None:
            converted.leave_out(key, value, f"not a known key of {source.trainer.title}")
        elif rule.status != "copied":
            converted.leave_out(key, value, _reason(rule), rule.status != "not needed")
        else:
            _convert_value(converted, context, rule, key, value, special)

    _combine(converted, special)
    _add_defaults(converted, source.trainer)
    _keep_one_length(converted)
    _check_evaluation(converted)
    _make_valid(converted)
    _record_others(converted)
    return converted


def _record_others(converted: Converted) -> None:
    """Report the keys that no line of the config mentions. For each of them, another key takes precedence."""
    comments = " ".join(converted.comments.values())
    mentioned = {key for key, _, _ in converted.unconverted}
    for key, value in _leaves(converted.source.fields):
        if key not in mentioned and not re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", comments):
            converted.leave_out(key, value, "another key takes precedence", is_notice=False)


def _leaves(fields: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the dotted key and value of each leaf. An empty mapping is a leaf."""
    return list(flatten(fields))


def _reason(rule: Rule) -> str:
    return rule.hint if rule.status != "by hand" else f"set by hand; {rule.hint}"


def _convert_value(
    converted: Converted,
    context: ConversionContext,
    rule: Rule,
    key: str,
    value: Any,
    special: dict[str, tuple[str, Any]],
) -> None:
    """Convert one value with its rule."""
    if value is None:
        converted.leave_out(key, value, "not set", is_notice=False)
        return
    if rule.values:
        plain = _plain(value)
        ours = rule.values.get(plain, rule.values.get("*", NOT_LISTED))
        if ours is NOT_LISTED:
            converted.leave_out(key, value, f"the value has no counterpart; {rule.hint}")
            return
        if ours is None:
            is_notice = plain not in rule.values  # "*" stands for values that the user should check
            reason = rule.hint if is_notice else "this is what OmniZoo does without a key"
            converted.leave_out(key, value, reason, is_notice)
            return
        value = value if ours == KEEP else ours
    if rule.convert:
        try:
            value = CONVERSIONS[rule.convert](value, context)
        except NoCounterpartError as error:
            converted.leave_out(key, value, str(error))
            return
    if rule.key.startswith("@"):
        special[rule.key] = (key, value)
        return
    if rule.key == "train.losses.0.options.beta" and converted.get("train.losses") is None:
        kind = _default_loss(context.fields)
        if kind is None:
            converted.leave_out(key, value, "no loss is set; set train.losses, such as [{kind: dpo}]")
            return
        converted.set("train.losses", [{"kind": kind}], f"{kind}, because {key} is set")
    if rule.key.startswith("train.losses.0.options.") and converted.get("train.losses") is None:
        converted.set("train.losses", [{"kind": "cross_entropy"}], key)
    if rule.key == "train.losses" and isinstance(value, list):
        old = converted.get("train.losses.0")
        value = [dict(item) for item in value]
        if isinstance(old, dict) and old.get("options"):
            value[0]["options"] = {**old["options"], **value[0].get("options", {})}
    converted.set(rule.key, value if not isinstance(value, dict) else dict(value), key)


def _default_loss(fields: Mapping[str, Any]) -> str | None:
    """Return the loss for preferences that the fields name elsewhere."""
    for name in ("stage", "rlhf_type", "command", "rl"):
        value = str(fields.get(name, "")).lower()
        if value in LOSSES:
            return value
    return None


def _plain(value: Any) -> str:
    """Return a value in the notation of the rule tables."""
    return str(value).lower().replace("-", "_") if not isinstance(value, int | float) else str(value).lower()


def _combine(converted: Converted, special: dict[str, tuple[str, Any]]) -> None:
    """Set the keys that several values determine: batch, final learning rate, sources and logging."""
    _combine_batch(converted, special)
    if "@min_lr" in special:
        key, minimum = special["@min_lr"]
        peak = converted.get("train.lr")
        if isinstance(peak, int | float) and isinstance(minimum, int | float) and peak > 0:
            converted.set("train.min_lr_ratio", round(minimum / peak, 9), f"{key} {minimum:g} / {peak:g}")
        else:
            converted.leave_out(key, minimum, "set train.min_lr_ratio (final learning rate / train.lr)")
    if "@wandb_project" in special:
        key, project = special.pop("@wandb_project")
        enabled = special.pop("@wandb", ("", True))
        if enabled[1]:
            converted.set("log.wandb", project, key)
        else:
            converted.leave_out(key, project, "W&B is off", is_notice=False)
    elif "@wandb" in special:
        key, enabled_value = special["@wandb"]
        converted.leave_out(key, enabled_value, "set log.wandb to the project", is_notice=bool(enabled_value))
    _combine_sources(converted, special)


def _combine_batch(converted: Converted, special: dict[str, tuple[str, Any]]) -> None:
    """Set the packs per step from samples per rank and accumulation steps."""
    micro_key, micro = special.get("@micro_batch", ("", 1))
    steps_key, steps = special.get("@accumulation", ("", 1))
    names = [name for name in (micro_key, steps_key) if name]
    if "@batch" in special:
        key, batch = special["@batch"]
        converted.set("train.packs_per_step", batch, f"{key}; in packs")
    elif names:
        if not isinstance(micro, int) or not isinstance(steps, int):
            for key, value in (special[name] for name in ("@micro_batch", "@accumulation") if name in special):
                converted.leave_out(key, value, "set train.packs_per_step")
            return
        comment = f"{' x '.join(names)} of one rank, times the number of ranks; in packs"
        converted.set("train.packs_per_step", max(micro * steps, 1), comment)
    if micro_key and micro != 1:
        converted.set("train.micro_batch", micro, f"{micro_key}; packs per rank")


def _combine_sources(converted: Converted, special: dict[str, tuple[str, Any]]) -> None:
    """Add settings to `data.sources` and derive held-out rows from a fraction."""
    sources = converted.get("data.sources") or []
    for name, ours in (("@media_dir", "media_dir"), ("@split", "split")):
        if name in special:
            key, value = special[name]
            for entry in sources:
                entry.setdefault(ours, value)
            if sources:
                converted.comments["data.sources"] = f"{converted.comments.get('data.sources', '')}, {key}".lstrip(", ")
            else:
                converted.leave_out(key, value, f"set data.sources.N.{ours}")
    if "@text_field" in special:
        key, value = special["@text_field"]
        if value == "text" or not sources:
            converted.leave_out(key, value, "this is what OmniZoo does without a key", is_notice=not sources)
        elif isinstance(value, str) and value != "messages":
            for entry in sources:
                entry["columns"] = {"text": value}
        else:
            converted.leave_out(key, value, "the schema of the rows is inferred", is_notice=False)
    if "@weights" in special:
        _set_weights(converted, *special["@weights"], sources)
    if "@eval_split" in special:
        key, value = special["@eval_split"]
        if sources:
            held_out = [{**entry, "split": value} for entry in sources]
            converted.set("data.eval_sources", held_out, key)
    if "@dataset_dir" in special:
        key, value = special["@dataset_dir"]
        converted.leave_out(key, value, "it is part of the paths in data.sources", is_notice=False)
    if "@val_size" in special:
        _hold_out(converted, *special["@val_size"], sources)


def _set_weights(converted: Converted, key: str, value: Any, sources: list[dict[str, Any]]) -> None:
    """Set the weights of the sources from probabilities."""
    parts = value.split(",") if isinstance(value, str) else value
    try:
        weights = [float(part) for part in parts]
    except (TypeError, ValueError):
        converted.leave_out(key, value, "sources are mixed by size, or by data.sources.N.weight")
        return
    if len(weights) != len(sources):
        converted.leave_out(key, value, f"{len(weights)} probabilities for {len(sources)} sources")
        return
    for entry, weight in zip(sources, weights, strict=True):
        entry["weight"] = weight


def _hold_out(converted: Converted, key: str, value: Any, sources: list[dict[str, Any]]) -> None:
    """Split the sources into training rows and the requested fraction of held-out rows."""
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        converted.leave_out(key, value, "no rows are held out", is_notice=False)
        return
    if value >= 1 or not sources or converted.get("data.eval_sources"):
        converted.leave_out(key, value, "use `take: every 50th` in data.eval_sources")
        return
    every = min(max(2, round(1 / value)), MAX_EVERY)
    ordinal = f"{every}{_ordinal_suffix(every)}"
    held_out = [{**entry, "take": f"every {ordinal}"} for entry in sources]
    for entry in sources:
        entry["take"] = f"all but every {ordinal}"
    converted.set("data.eval_sources", held_out, f"{key} {value:g}")


def _ordinal_suffix(number: int) -> str:
    if number % 100 in (11, 12, 13):
        return "th"
    return {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")


def _add_defaults(converted: Converted, trainer: Trainer) -> None:
    """Set the defaults of the other trainer that differ from ours."""
    defaults = dict(trainer.defaults)
    if converted.get("train.losses.0.kind") in PREFERENCES:
        defaults |= trainer.preference_defaults
    for key, value in defaults.items():
        if key.startswith("model.adapter.") and (
            converted.get("model.adapter") is None or converted.get("model.adapter.path")
        ):
            continue
        if key == "train.epochs" and converted.get("train.steps"):
            continue
        if key == "train.warmup_ratio" and converted.get("train.warmup_steps") is not None:
            continue
        if key == "train.min_lr_ratio" and converted.get("train.schedule") == "constant":
            continue
        if key == "train.lr" and converted.get("model.adapter") is None and trainer.name == "ms-swift":
            value = 1e-5  # ms-swift has another default for full fine-tuning
        if value == TWICE_THE_RANK:
            value = 2 * int(converted.get("model.adapter.rank"))
        if key == "optimizer.options.betas":
            _complete_betas(converted, value)
        elif converted.get(key) is None:
            converted.set(key, value, f"default of {trainer.title}")


def _complete_betas(converted: Converted, defaults: list[float]) -> None:
    """Set missing betas of the optimizer to the defaults of the other trainer."""
    kind = converted.get("optimizer.kind")
    if kind not in (None, "adamw", "muon", "adamw_8bit"):
        return
    betas = converted.get("optimizer.options.betas")
    if betas is None:
        converted.set("optimizer.options.betas", list(defaults), f"default of {converted.source.trainer.title}")
        return
    while len(betas) < len(defaults):
        betas.append(None)
    betas[:] = [beta if beta is not None else default for beta, default in zip(betas, defaults, strict=True)]


def _keep_one_length(converted: Converted) -> None:
    """If two keys exclude each other, remove one of them. Steps take precedence, as in the other trainers."""
    for kept, removed in (("train.steps", "train.epochs"), ("train.warmup_steps", "train.warmup_ratio")):
        value = converted.get(removed)
        if converted.get(kept) and value is not None:
            comment = converted.comments.get(removed, removed)
            converted.remove(removed)
            converted.leave_out(comment, value, f"{kept} is set, too, and takes precedence")


def _check_evaluation(converted: Converted) -> None:
    """Remove evaluation keys if there is no held-out data. If there is some, enable evaluations."""
    has_data = bool(converted.get("data.eval_sources"))
    every = converted.get("evaluation.every")
    if has_data and not every:
        converted.set("evaluation.every", 500, f"default of {converted.source.trainer.title}")
    if has_data:
        return
    for key in ("evaluation.every", "checkpoint.best", "evaluation.early_stop", "evaluation.metrics"):
        value = converted.get(key)
        if value is not None:
            theirs = converted.comments.get(key, key)
            converted.remove(key)
            converted.leave_out(theirs, value, f"{key} needs held-out rows in data.eval_sources")


def _make_valid(converted: Converted) -> None:
    """Set required keys to `CHOOSE`, and turn values that the schema rejects into comments."""
    model = converted.get("model") or {}
    if not {"path", "config", "foundation"} & set(model):
        converted.set("model.path", CHOOSE, "required: the folder or name of the model")
        converted.notices.append(f"{converted.source.file}: no model; set model.path")
    if not converted.get("data.sources"):
        converted.set("data.sources", [{"path": CHOOSE}], "required: the file with the training rows")
        converted.notices.append(f"{converted.source.file}: no data; set data.sources")
    adapter = converted.get("model.adapter")
    if isinstance(adapter, dict) and adapter.get("path"):
        for name in [name for name in adapter if name not in ("path", "dropout", "base")]:
            theirs = converted.comments.get(f"model.adapter.{name}", name)
            converted.leave_out(theirs, adapter.pop(name), "the adapter folder determines it", is_notice=False)

    for _ in range(MAX_ROUNDS):
        try:
            Config.model_validate(_without_notes(converted.fields))
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                _reject(converted, detail["loc"], detail["msg"].removeprefix("Value error, "))
        else:
            return


def _reject(converted: Converted, loc: tuple[int | str, ...], message: str) -> None:
    """Turn the key at `loc`, or the key at the start of `message`, into a comment."""
    named = message.split()[0].rstrip(":") if message.startswith(OURS) else ""
    parts = named.split(".") if named else [str(part) for part in loc]
    for length in range(len(parts), 1, -1):
        key = ".".join(parts[:length])
        value = converted.get(key)
        if value is not None:
            theirs = converted.comments.get(key, key)
            converted.remove(key)
            converted.leave_out(theirs, value, f"{key}: {message}")
            return
    raise AssertionError(f"{loc}: {message}")


def _without_notes(value: Any) -> Any:
    """Return the fields without the notes about sources."""
    if isinstance(value, dict):
        return {key: _without_notes(item) for key, item in value.items() if key != "#"}
    return [_without_notes(item) for item in value] if isinstance(value, list) else value


def shown(value: Any) -> str:
    """Format a value of the other trainer's config for a comment."""
    return show_value(value)


def section_names() -> list[str]:
    """Return the sections of a config in their order in converted files."""
    return list(reference.sections())
