"""Find the model of a folder: a Hugging Face folder, a PEFT adapter, or a run or checkpoint of OmniZoo."""

import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnizoo.checkpoint.export import export, has_adapter
from omnizoo.checkpoint.merge_adapter import base_weights
from omnizoo.checkpoint.resume import checkpoints_in, is_checkpoint, resolve_checkpoint
from omnizoo.config.errors import UserError
from omnizoo.config.load import read_config_file
from omnizoo.config.plugins import check_allowed, check_plugin_name
from omnizoo.config.sections.model import AdapterSettings, ModelSection
from omnizoo.hub.resolve import fetch_model
from omnizoo.models.adapters.peft_files import CONFIG as ADAPTER_CONFIG
from omnizoo.models.untrusted_folders import read_json

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FolderOptions:
    """Settings for loading a model folder, in addition to its path.

    Args:
        allow_code: Python modules that the folder may import code from.
        trust_remote_code: Whether to run Python code from the folder.
        recipe: `package.module:RECIPE` for a family without a built-in recipe; None for the recipe of the run, if any.
        base: Folder of the base model of an adapter folder; None for the folder that the adapter names.
    """

    allow_code: Sequence[str] = ()
    trust_remote_code: bool = False
    recipe: str | None = None
    base: str | None = None


@contextmanager
def model_section(
    folder: Path, options: FolderOptions, note: Callable[[str], None] = log.info
) -> Iterator[ModelSection]:
    """Context manager: the section `model` of a config that loads the model of a folder.

    A run or checkpoint is exported to a temporary folder. The folder exists until the end of the block.

    Args:
        folder: A Hugging Face folder, a name on the hub, a PEFT adapter, a run folder or a checkpoint.
        options: Settings for loading the folder.
        note: Called with a message about an export or a base model.

    Raises:
        UserError: If the folder contains no model, or names code that is not allowed.
    """
    if options.recipe is not None:
        try:
            check_plugin_name(options.recipe, "a recipe; expected `package.module:RECIPE`")
        except ValueError as error:
            raise UserError(f"--recipe: {error}") from None
    folder = fetch_model(str(folder), "MODEL") or folder
    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    if options.base is not None and not is_adapter:
        raise UserError(f"--base: {folder} is not an adapter folder ({ADAPTER_CONFIG} not found). Remove --base.")
    fields: dict[str, Any] = {
        "allow_code": list(options.allow_code),
        "trust_remote_code": options.trust_remote_code,
        "recipe": options.recipe,
    }
    if is_adapter:
        yield ModelSection.model_validate(fields | _adapter_fields(folder, options, note))
    elif not folder.is_dir() or (folder / "config.json").is_file():
        yield ModelSection.model_validate(fields | {"path": str(folder)})
    else:
        checkpoint = _checkpoint_of(folder)
        fields |= _run_fields(checkpoint, options)
        with tempfile.TemporaryDirectory(prefix="omnizoo-") as temporary:
            exported = Path(temporary) / "model"
            _export(checkpoint, exported, options, note)
            yield ModelSection.model_validate(fields | {"path": str(exported)})


def _adapter_fields(folder: Path, options: FolderOptions, note: Callable[[str], None]) -> dict[str, Any]:
    """Return the keys of `model` for a PEFT adapter and its base model."""
    file = folder / ADAPTER_CONFIG
    base = options.base or read_json(file).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError(f"{file}: base_model_name_or_path is not set. Pass the folder of the base model with --base.")
    key = "--base" if options.base else f"{file}: base_model_name_or_path"
    base = str(fetch_model(base, key) or base)
    if not (Path(base) / "config.json").is_file():
        raise UserError(
            f"{key}: {base} is not a Hugging Face model folder (no config.json in it). Pass the folder of the base "
            "model with --base."
        )
    note(f"{folder} is merged into its base model, {base}")
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    return {
        "path": base,
        "adapter": AdapterSettings(path=str(folder)),
        "tokenizer": str(folder) if has_tokenizer else None,
    }


def _checkpoint_of(folder: Path) -> Path:
    """Return the checkpoint `folder`, or the newest checkpoint of a run folder."""
    if not is_checkpoint(folder) and not any(checkpoints_in(folder).glob("step_*")):
        raise UserError(
            f"{folder}: neither config.json nor {ADAPTER_CONFIG} nor a checkpoint found. Pass a Hugging Face folder, "
            "an adapter folder, a run folder or a checkpoint."
        )
    return resolve_checkpoint(folder)


def _run_fields(checkpoint: Path, options: FolderOptions) -> dict[str, Any]:
    """Return the keys of `model` that an export does not contain: the recipe, and options of encoders and decoders."""
    file = checkpoint / "config.yaml"
    config = read_config_file(file)[0]
    model = config.get("model") if isinstance(config, dict) else None
    if not isinstance(model, dict):
        raise UserError(f"{file}: no section `model`. Pass another checkpoint of the run, or an export.")
    if model.get("foundation"):  # the export of a composed model contains its options
        return {}
    modalities: dict[str, Any] = {}
    for name, modality in (model.get("modalities") or {}).items():
        parts = {role: modality.get(role) for role in ("encoder", "decoder")}
        modalities[name] = {role: {"options": part.get("options", {})} for role, part in parts.items() if part}
    recipe = options.recipe or model.get("recipe")
    if options.recipe is None:
        check_allowed({"recipe": recipe}, options.allow_code, str(file), "pass your recipe with --recipe")
    return {"recipe": recipe, "modalities": modalities}


def _export(checkpoint: Path, out: Path, options: FolderOptions, note: Callable[[str], None]) -> None:
    """Export a checkpoint to the folder `out`. An adapter is merged into its base model."""
    base = base_weights if has_adapter(checkpoint) else None
    exported = export(
        checkpoint, out, allow_code=options.allow_code, trust_remote_code=options.trust_remote_code, base=base
    )
    merged = ", with its adapter merged," if base else ""
    note(f"{exported.checkpoint}{merged} is exported to a temporary folder")
