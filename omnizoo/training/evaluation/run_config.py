"""Load the config of an evaluation from a YAML file or a run folder, without importing torch.

A run folder may come from an untrusted source. Code that its config names is imported only with permission.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.config.plugins import check_allowed
from omnizoo.config.schema import Config


def load_evaluation_config(
    target: str | Path | Mapping[str, Any] | Config,
    overrides: Sequence[str] = (),
    *,
    allow_code: Sequence[str] = (),
    trust_remote_code: bool = False,
    objects: Mapping[str, Any] | None = None,
) -> tuple[Config, Path | None]:
    """Return the config to evaluate, and the run folder if `target` is one.

    Args:
        target: Run folder, path of a YAML file, mapping or config.
        overrides: Command line arguments, such as `["--evaluation.packs", "4"]`.
        allow_code: Python modules, with submodules, that the config of a run folder may import code from.
        trust_remote_code: Whether code in the model folder of a run may run.
        objects: Python objects that replace config keys (see `load_config`).

    Raises:
        UserError: If the config is not valid, or names code that is not allowed.
    """
    folder = Path(target) if isinstance(target, str | Path) and Path(target).is_dir() else None
    has_changes = bool(overrides) or any(value is not None for value in (objects or {}).values())
    if isinstance(target, Config) and not has_changes:
        return target, None
    if folder is None:
        return load_config(target, overrides, objects), None
    file = folder / "config.yaml"
    if not file.is_file():
        raise UserError(f"{folder}: config.yaml not found. Pass a run folder, or a YAML file.")
    config = load_config(file, overrides, objects)
    _check_code(config, file, allow_code, trust_remote_code)
    permissions = {"allow_code": list(allow_code), "trust_remote_code": trust_remote_code}
    return config.changed(model=permissions), folder


def _check_code(config: Config, file: Path, allow_code: Sequence[str], trust_remote_code: bool) -> None:
    """Raise `UserError` if the config of a run folder names code that is not allowed."""
    settings = config.model_dump(mode="json")
    check_allowed(settings, allow_code, str(file), "pass your config instead of the run folder")
    if config.model.trust_remote_code and not trust_remote_code:
        raise UserError(
            f"{file}: model.trust_remote_code is set. If you trust the code in the model folder, add "
            "--trust-remote-code."
        )
