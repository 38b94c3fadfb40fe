"""Model folders, run folders and data folders that are not what they seem."""

from pathlib import Path

from corpus import Case
from tiny import write_config


def no_such_tokenizer(folder: Path) -> list[object]:
    return ["train", write_config(folder), "--model.tokenizer", folder / "nowhere"]


CASES = [Case("a tokenizer folder that does not exist", no_such_tokenizer, ("model.tokenizer", "nowhere"))]
