"""Check on resume that the data is that of the checkpoint.

Checkpoints store everything that the order of samples depends on. It is compared key by key.
"""

import logging
from typing import Any

from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.data.loading.fingerprint import content_of, reading_of
from omnizoo.data.loading.reader import Reader
from omnizoo.models.read_config import tokenizer_folder

log = logging.getLogger(__name__)

SHAPED = ("format", "columns", "json_columns", "take")  # keys of a source that define how its rows are interpreted
OF_CHATS = "data.overlong of chats"
KEYS_TODAY = {"train.global_batch": "train.packs_per_step"}  # stored keys whose config key was renamed


def fingerprint(reader: Reader) -> dict[str, Any]:
    config, sources = reader.config, reader.sources
    keys = ("lanes", "pack_tokens", "look_ahead", "shuffle", "shuffle_rows", "append_eos", "min_targets")
    specs = [
        {
            "path": spec.name,
            **{key: getattr(spec, key) for key in ("weight", "split", "media_dir")},
            **{key: value for key in SHAPED if (value := getattr(spec, key))},
            "rows": len(source),
            **content_of(source),
        }
        for spec, source in zip(config.data.sources, sources, strict=True)
    ]
    values = {f"data.{key}": getattr(config.data, key) for key in keys}
    overlong = config.data.overlong
    return {
        **values,
        "data.overlong": overlong or "split",
        OF_CHATS: overlong or "truncate",
        "train.epochs": config.train.epochs,
        "model.modalities": _reading(config),
        "train.seed": config.train.seed,
        "train.global_batch": config.train.packs_per_step,
        "what train.losses makes of preference pairs": config.preference_pairs.replace("refused", ""),
        "what train.losses makes of single answers": _single_answers(config),
        "model.tokenizer": reading_of(reader.renderer.tokenizer, tokenizer_folder(config.model)),
        "sources": specs,
    }


def _single_answers(config: Config) -> str:
    if config.mismatched_answers:
        return "each is also tried with another row's prompt"
    return "read" if config.single_answers else ""


def _reading(config: Config) -> dict[str, Any]:
    """Return the settings that the tokens of media items depend on: their number and the marks around them."""
    keys = ("kind", "path", "config", "options", "begin", "placeholder", "end")
    return {
        f"{name}/{role}": {key: part[key] for key in keys if key in part}
        for name, modality in config.model.model_dump(mode="json")["modalities"].items()
        for role, part in modality.items()
        if role in ("encoder", "projector", "decoder", "marks") and part
    }


def check_fingerprint(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Check that the data has not changed since the checkpoint.

    On other data, samples would silently be lost, repeated or changed.

    Args:
        saved: The fingerprint in the checkpoint.
        now: The fingerprint of the current data.

    Raises:
        UserError: If they differ in anything that changes the samples or their order.
    """

    def refuse(what: str) -> None:
        raise UserError(
            f"{what}: the checkpoint's place in the data means nothing then; restore it as it was, or start a new run "
            "from its weights (model.init_from: CHECKPOINT, with a log.dir of its own)"
        )

    def refuse_value(key: str, before: Any, after: Any) -> None:
        refuse(f"{KEYS_TODAY.get(key, key)} is {after!r}, but {before!r} in the checkpoint")

    if OF_CHATS not in saved:
        log.warning("chats longer than a pack were cut into pieces before this checkpoint; now: %s", now[OF_CHATS])
        now = {key: value for key, value in now.items() if key != OF_CHATS}
    for key in sorted((saved.keys() | now.keys()) - {"sources", "model.tokenizer"}):
        if (saved.get(key) or None) != (now.get(key) or None):
            refuse_value(key, saved.get(key), now.get(key))
    before, after = saved["model.tokenizer"], now["model.tokenizer"]
    changed = [name for name in after if name != "library" and after[name] != before.get(name)]
    if changed == ["its definition"] and before["library"] != after["library"]:
        log.warning(
            "the tokenizer is written in another way than in the checkpoint, by tokenizers %s and then %s; its "
            "vocabulary is the same, and it is taken to cut texts as before",
            *(before["library"], after["library"]),
        )
    elif changed:
        refuse(f"model.tokenizer is another one than in the checkpoint ({', '.join(changed)} changed)")
    if len(saved["sources"]) != len(now["sources"]):
        refuse_value("the number of data.sources", len(saved["sources"]), len(now["sources"]))
    for i, (before, after) in enumerate(zip(saved["sources"], now["sources"], strict=True)):
        source = f"data.sources[{i}]"
        for key in ("weight", "split", *SHAPED, "rows", "bytes"):
            if before.get(key) != after.get(key):
                refuse_value(f"{source}.{key} ({after['path']})", before.get(key), after.get(key))
        for key, what in (("shape", "the lengths of its rows"), ("content", "its rows")):
            if before[key] != after[key]:
                refuse(f"{source} ({after['path']}) has changed since the checkpoint: {what} are other ones")
        if before["path"] != after["path"]:
            log.warning("%s moved from %s to %s; its content is the same", source, before["path"], after["path"])
        if before["media_dir"] != after["media_dir"]:
            log.warning(
                "%s.media_dir is %s, but %s in the checkpoint; taken to hold the same media",
                *(source, after["media_dir"], before["media_dir"]),
            )
