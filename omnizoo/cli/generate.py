"""`omnizoo generate`: what a model answers; text on the terminal, everything else as files."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from omnizoo.config.errors import UserError


def generate(
    folder: Path,
    messages: Path | None,
    prompt: str | None,
    out: Path,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    allow_code: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> int:
    if (messages is None) == (prompt is None):
        raise UserError("give one of --messages FILE and --prompt TEXT")
    if not 0 <= temperature < math.inf or not 0 < top_p <= 1 or top_k < 0 or max_tokens < 1 or not 0 <= seed < 2**63:
        raise UserError(
            "--temperature is at least 0, --top-p in (0, 1], --top-k at least 0, --max-tokens at least 1, "
            "--seed 0 to 2^63 - 1"
        )
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is not a folder; expected one for what the model produces")
    conversation = read_messages(messages) if messages is not None else prompt
    assert conversation is not None

    import torch

    from omnizoo.assembly.writer import load_writer
    from omnizoo.data.rows import Folder
    from omnizoo.modalities.base import Sampling
    from omnizoo.ops.device import pick_device

    writer = load_writer(folder, pick_device(0), allow_code=allow_code, trust_remote_code=trust_remote_code)
    generator = torch.Generator(writer.model.device).manual_seed(seed)
    sampling = Sampling(temperature, top_k, top_p, generator)
    where = Folder(messages.parent if messages else Path(), None)
    console = Console(soft_wrap=True)
    for number, piece in enumerate(writer.write(conversation, sampling, max_tokens, where)):
        if piece.modality == "text":
            console.print(writer.decode(piece), markup=False, highlight=False)
        else:
            out.mkdir(parents=True, exist_ok=True)
            decoder = writer.modalities[piece.modality].decoder
            assert decoder is not None
            console.print(f"[{piece.modality}: {decoder.save(piece.item, str(out / f'{number}'))}]", markup=False)
    return 0


def read_messages(path: Path) -> list[dict[str, object]]:
    """A JSON list of messages, or an object with `messages`."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"--messages {path}: cannot be read as JSON: {error}") from None
    value = value.get("messages") if isinstance(value, dict) else value
    if not isinstance(value, list):
        raise UserError(f"--messages {path}: a list of messages was expected, or an object with `messages`")
    return value
