"""Export a checkpoint with plain arguments: `omnizoo.export` and the command `omnizoo export`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from omnizoo.checkpoint.export import Exported
from omnizoo.checkpoint.export import export as export_checkpoint
from omnizoo.checkpoint.export_denoiser import denoiser_run, export_denoiser
from omnizoo.checkpoint.merge_adapter import base_weights
from omnizoo.config.errors import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export(
    checkpoint: str | Path,
    out: str | Path,
    *,
    dtype: Literal["fp32", "bf16", "fp16"] | None = None,
    ema: bool = False,
    best: bool = False,
    merge: bool = False,
    allow_code: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> Exported:
    """Write a checkpoint as a Hugging Face folder for `from_pretrained` and inference engines.

    Args:
        checkpoint: Checkpoint, or run folder whose newest checkpoint is exported.
        out: New or empty folder.
        dtype: Dtype of the weights. Default: the dtype of the initial model; without one, the dtype of the run.
        ema: Whether to export the moving average of the weights (`optimizer.ema`).
        best: Whether to export the best checkpoint of a run folder (`checkpoint.best`).
        merge: Whether to merge the adapter of the run into the base model.
        allow_code: Python modules, with submodules, that the folder may import encoders and decoders from.
        trust_remote_code: Whether Python code in the model folder may run.

    Returns:
        A description of the exported folder.

    Raises:
        UserError: If the checkpoint is damaged, if it does not contain what was requested (such as a moving average),
            or if `out` is not empty.

    Example:
        >>> omnizoo.export("runs/my", "models/trained", dtype="bf16").out
    """
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"dtype: {dtype!r}; expected {', '.join(DTYPES)}")
    torch_dtype = None if dtype is None else DTYPES[dtype]
    run = denoiser_run(Path(checkpoint), best)
    if run is not None:
        return export_denoiser(run, Path(out), torch_dtype, ema=ema, merge_adapter=merge)
    return export_checkpoint(
        Path(checkpoint),
        Path(out),
        dtype=torch_dtype,
        ema=ema,
        allow_code=allow_code,
        trust_remote_code=trust_remote_code,
        best=best,
        base=base_weights if merge else None,
    )
