"""The model card of an export: the models and datasets on the hub that a run started from, with their commits."""

from pathlib import Path
from typing import Any

import yaml

from omnizoo.config.hub import HubName, pinned_names
from omnizoo.config.yaml_file import parse_yaml, read_text

CARD = "README.md"


def write_card(folder: Path, checkpoint: Path, library: str) -> None:
    """Write the model card of an export, unless the run used no repository on the hub.

    Args:
        folder: The folder of the export.
        checkpoint: The checkpoint. Its config contains hub names with commits.
        library: Name of the library that loads the folder, for the hub.
    """
    models, datasets = origins(checkpoint)
    if not models and not datasets:
        return
    header: dict[str, Any] = {"library_name": library}
    if models:
        header["base_model"] = sorted({name.repo for name in models})
    if datasets:
        header["datasets"] = sorted({name.repo for name in datasets})
    lines = ["---", yaml.safe_dump(header, sort_keys=False).strip(), "---", "", "Trained with OmniZoo from:", ""]
    for kind, names in (("model", models), ("dataset", datasets)):
        lines += [f"- {kind} `{name.address}` at commit `{name.commit}`" for name in names]
    (folder / CARD).write_text("\n".join(lines) + "\n", encoding="utf-8")


def origins(checkpoint: Path) -> tuple[list[HubName], list[HubName]]:
    """Return the models and the datasets with a commit in the config of a checkpoint."""
    file = checkpoint / "config.yaml"
    config, _ = parse_yaml(read_text(file), str(file)) if file.is_file() else ({}, {})
    sections = config if isinstance(config, dict) else {}
    return pinned_names(sections.get("model")), pinned_names(sections.get("data"))
