"""Check that a resumed run uses the same data as its checkpoint.

Checkpoints store a fingerprint: everything that the samples and their order depend on. It is compared key by key.
"""

import logging
from dataclasses import replace
from typing import Any, NoReturn

from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.config.sections.data import SourceSettings, with_weights
from omnizoo.data.loading.fingerprint import content_of, tokenizer_hashes
from omnizoo.data.loading.reader import Reader
from omnizoo.data.rendering.prompt_renderer import PromptRenderer
from omnizoo.data.sources.base import RowSource
from omnizoo.models.read_config import tokenizer_folder

log = logging.getLogger(__name__)

# Keys of a source that determine how its rows are read.
FORMAT_KEYS = ("format", "columns", "json_columns", "take", "untagged_media")
# Keys of the fingerprint. Checkpoints store them, so they must never change.
OVERLONG_CHATS = "data.overlong of chats"
PREFERENCE_PAIRS = "what train.losses makes of preference pairs"
LABELED_RESPONSES = "what train.losses makes of single answers"
LABELS = "model.score_head"  # absent without labels
MIX = "data.mix"  # "rows" if sources are mixed by size; absent otherwise, and in checkpoints of earlier versions
# Names for error messages, for the keys of the fingerprint that are not config keys.
SHOWN_KEYS = {
    "train.global_batch": "train.packs_per_step",
    OVERLONG_CHATS: "data.overlong (for chats)",
    LABELS: "train.losses (labels)",
    PREFERENCE_PAIRS: "train.losses (use of preference pairs)",
    LABELED_RESPONSES: "train.losses (use of labeled responses)",
}


def fingerprint(reader: Reader) -> dict[str, Any]:
    """Return everything that the samples of a run and their order depend on, as values that JSON can represent."""
    config = reader.config
    keys = ("lanes", "pack_tokens", "look_ahead", "shuffle", "shuffle_rows", "append_eos", "min_targets")
    values = {f"data.{key}": getattr(config.data, key) for key in keys}
    overlong = config.data.overlong
    # Defaults are not stored, so that runs of versions without these keys can be resumed. `data.chat_template` and
    # `data.template_options` need no entry: they change the chat template, and the tokenizer hashes include a hash of
    # the template.
    thinking = {
        "data.thinking": config.data.thinking.replace("template", ""),
        "data.thinking_tags": config.data.thinking_tags,
    }
    mix = {MIX: "rows"} if mixes_by_rows(config) else {}
    items = {f"data.{key}": getattr(config.data, key) for key in ("shapes", "frame_rate", "text_tokens")}
    items["data.text_dropout"] = config.data.text_dropout
    items["data.crop"] = config.data.crop.replace("center", "")
    return {
        **values,
        **mix,
        "data.overlong": overlong or "split",
        OVERLONG_CHATS: overlong or "truncate",
        **{key: value for key, value in (thinking | items).items() if value},
        "train.epochs": config.train.epochs,
        "model.modalities": _media_settings(config),
        "train.seed": config.train.seed,
        "train.global_batch": None if config.train.samples_per_step else config.train.packs_per_step,
        **_step_settings(config),
        **_labels(config),
        PREFERENCE_PAIRS: config.preference_pairs.replace("refused", ""),
        LABELED_RESPONSES: _use_of_labeled_responses(config),
        "model.tokenizer": _tokenizer_hashes(reader),
        "sources": [
            _source_fingerprint(spec, source) for spec, source in zip(config.data.sources, reader.sources, strict=True)
        ],
    }


def _tokenizer_hashes(reader: Reader) -> dict[str, Any]:
    """Return hashes of everything that converts rows to tokens; empty for a diffusion transformer."""
    if isinstance(reader.renderer, PromptRenderer):
        return {}
    return tokenizer_hashes(reader.renderer.tokenizer, tokenizer_folder(reader.config.model))


def _step_settings(config: Config) -> dict[str, Any]:
    """Return the settings of the step size that are not set by default."""
    settings: dict[str, Any] = {}
    if config.train.samples_per_step is not None:
        settings["train.samples_per_step"] = config.train.samples_per_step
    if config.train.batch_warmup is not None:
        settings["train.batch_warmup"] = config.train.batch_warmup.model_dump()
    return settings


def mixes_by_rows(config: Config) -> bool:
    """Whether several sources are mixed in proportion to their numbers of rows, because none has a weight.

    Return False for runs with `train.epochs` or with one source, because the weights do not affect them.
    """
    return config.data.weights is None and config.train.epochs is None and len(config.data.sources) > 1


def with_saved_mix(reader: Reader, saved: dict[str, Any]) -> Reader:
    """Return a reader that mixes the sources as the checkpoint does.

    In earlier versions, sources without weights had equal shares. A run that started with such a version keeps them.

    Args:
        reader: The data of the run.
        saved: The fingerprint in the checkpoint.

    Returns:
        The same reader, or one with equal weights.
    """
    if MIX in saved or not mixes_by_rows(reader.config):
        return reader
    sources = with_weights(reader.config.data.sources)
    return replace(reader, config=reader.config.changed(data={"sources": sources}))


def _source_fingerprint(spec: SourceSettings, source: RowSource) -> dict[str, Any]:
    """Return the settings of a source that affect its samples, and the hashes of its content."""
    format_settings = {key: getattr(spec, key) for key in FORMAT_KEYS}
    return {
        "path": spec.name,
        "weight": spec.weight or 1.0,
        "split": spec.split,
        "media_dir": spec.media_dir,
        **{key: value for key, value in format_settings.items() if value},
        "rows": len(source),
        **content_of(source),
    }


def _labels(config: Config) -> dict[str, Any]:
    """Return the labels of a classifier. Other runs, including those of earlier versions, have no such entry."""
    head = config.model.score_head
    return {} if head is None or head.problem == "reward" else {LABELS: [head.problem, *head.labels]}


def _use_of_labeled_responses(config: Config) -> str:
    """Return a description of how the losses use labeled responses. Checkpoints store it, so it must never change."""
    if config.mismatched_answers:
        return "each is also tried with another row's prompt"
    return "read" if config.single_answers else ""


def _media_settings(config: Config) -> dict[str, Any]:
    """Return the settings that affect the tokens of media items: the number of placeholder tokens, and the marks."""
    keys = ("kind", "path", "config", "options", "begin", "placeholder", "end")
    settings = {}
    for name, modality in config.model.model_dump(mode="json")["modalities"].items():
        for role, part in modality.items():
            if role in ("encoder", "projector", "decoder", "marks") and part:
                settings[f"{name}/{role}"] = {key: part[key] for key in keys if key in part}
    return settings


def check_fingerprint(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Check that the data has not changed since the checkpoint.

    If the run resumed with different data, samples would silently be lost, repeated or changed.

    Args:
        saved: The fingerprint in the checkpoint.
        now: The fingerprint of the current data.

    Raises:
        UserError: If a difference changes the samples or their order.
    """
    if OVERLONG_CHATS not in saved:
        log.warning("chats longer than a pack were split before this checkpoint; now: %s", now[OVERLONG_CHATS])
        now = {key: value for key, value in now.items() if key != OVERLONG_CHATS}
    has_same_sources = len(saved["sources"]) == len(now["sources"])
    if MIX in saved and MIX not in now and now["train.epochs"] is None and has_same_sources:
        _raise_changed("data.sources: a weight is set, but the checkpoint mixed the sources by their numbers of rows")
    for key in sorted((saved.keys() | now.keys()) - {"sources", "model.tokenizer", MIX}):
        if (saved.get(key) or None) != (now.get(key) or None):
            _raise_changed_value(SHOWN_KEYS.get(key, key), saved.get(key), now.get(key))
    _check_tokenizer(saved["model.tokenizer"], now["model.tokenizer"])
    if len(saved["sources"]) != len(now["sources"]):
        _raise_changed_value("the number of data.sources", len(saved["sources"]), len(now["sources"]))
    for i, (saved_source, source) in enumerate(zip(saved["sources"], now["sources"], strict=True)):
        _check_source(f"data.sources[{i}]", saved_source, source)


def _raise_changed(change: str) -> NoReturn:
    """Raise the error for data that differs from the data of the checkpoint."""
    raise UserError(
        f"{change}, so the data position of the checkpoint is invalid. Restore it, or start a new run from the weights "
        "with model.init_from: CHECKPOINT and another log.dir."
    )


def _raise_changed_value(key: str, saved: Any, now: Any) -> NoReturn:
    """Raise the error for a value that differs from the value in the checkpoint."""
    _raise_changed(f"{key} is {now!r}, but {saved!r} in the checkpoint")


def _check_tokenizer(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Check that the tokenizer has not changed.

    If only its serialized form has changed and another version of `tokenizers` is installed, this is only a warning,
    because another version may serialize the same tokenizer differently.
    """
    changed = [name for name in now if name != "library" and now[name] != saved.get(name)]
    if changed == ["its definition"] and saved["library"] != now["library"]:
        log.warning(
            "model.tokenizer: the definition differs from the checkpoint, which was written with tokenizers %s; now: "
            "%s. The vocabulary is the same, so texts are assumed to be tokenized as before.",
            saved["library"],
            now["library"],
        )
    elif changed:
        names = ", ".join(name.removeprefix("its ") for name in changed)
        _raise_changed(f"model.tokenizer differs from that of the checkpoint (changed: {names})")


def _check_source(key: str, saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Check that a source has not changed. If only its path has changed, only warn."""
    path = now["path"]
    for name in ("weight", "split", *FORMAT_KEYS, "rows", "bytes"):
        if saved.get(name) != now.get(name):
            _raise_changed_value(f"{key}.{name} ({path})", saved.get(name), now.get(name))
    if saved["shape"] != now["shape"]:
        _raise_changed(f"{key} ({path}) has changed since the checkpoint: the lengths of its rows differ")
    if saved["content"] != now["content"]:
        _raise_changed(f"{key} ({path}) has changed since the checkpoint: its rows differ")
    if saved["path"] != path:
        log.warning("%s moved from %s to %s; its content is the same", key, saved["path"], path)
    if saved["media_dir"] != now["media_dir"]:
        log.warning(
            "%s.media_dir is %s, but %s in the checkpoint; the media files are assumed to be the same",
            key,
            now["media_dir"],
            saved["media_dir"],
        )
