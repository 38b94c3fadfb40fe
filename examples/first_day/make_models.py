"""Make the small models and rows that the tutorials train on. They stand for models and data that you downloaded.

    python examples/first_day/make_models.py first_day           # all of them; or: ... text | vision

FOLDER/models/text      a Qwen3 of two layers, with random weights and a tokenizer
FOLDER/models/tower     a SigLIP vision encoder of two layers, with random weights
FOLDER/models/vision    a Qwen3-VL of three layers, with random weights and a tokenizer
FOLDER/sums.csv         300 questions such as "What is 2 plus 3?", in the Alpaca format
FOLDER/shapes.json      conversations about images of colored squares, in the LLaVA format
"""

import csv
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMultimodalLM
from transformers.utils import logging

EXAMPLES = Path(__file__).parent.parent
MEDIA = EXAMPLES / "published/data"
TEXT_MODEL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}


def save_text_model(folder: Path) -> Path:
    """Save a small Qwen3 with its tokenizer as a Hugging Face folder."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **TEXT_MODEL))
    model.save_pretrained(folder)
    shutil.copytree(EXAMPLES / "data/tiny/tokenizer", folder, dirs_exist_ok=True)
    return folder


def save_tower(folder: Path) -> Path:
    """Save a small SigLIP vision encoder."""
    torch.manual_seed(0)
    AutoModel.from_config(AutoConfig.for_model("siglip_vision_model", **TOWER)).save_pretrained(folder)
    return folder


def save_vision_model(folder: Path) -> Path:
    """Save a small Qwen3-VL with its tokenizer."""
    fields = yaml.safe_load((EXAMPLES / "published/qwen3_vl.yaml").read_text())["model"]["config"]
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    model.save_pretrained(folder)
    shutil.copytree(MEDIA / "tokenizer", folder, dirs_exist_ok=True)
    return folder


def write_sums(path: Path) -> Path:
    """Write sums as a CSV file in the Alpaca format."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["instruction", "input", "output"])
        for number in range(300):
            a, b = number % 6, number // 6 % 6
            writer.writerow([f"What is {a} plus {b}?", "", f"It is {a + b}."])
    return path


def write_shapes(path: Path) -> Path:
    """Write one JSON array of conversations in the LLaVA format, and the images next to it."""
    rows: list[dict[str, Any]] = []
    for line in (MEDIA / "visual.jsonl").read_text().splitlines():
        row = json.loads(line)
        if len(row.get("images") or []) != 1 or row.get("videos"):
            continue
        question, answer = (message["content"] for message in row["messages"])
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        rows.append({"id": str(len(rows)), "image": row["images"][0], "conversations": turns})
    path.write_text(json.dumps(rows * 4))
    for image in MEDIA.glob("*.png"):
        shutil.copy(image, path.parent)
    return path


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit("usage: make_models.py FOLDER [text] [vision]")
    folder = Path(sys.argv[1])
    parts = sys.argv[2:] or ["text", "vision"]
    folder.mkdir(parents=True, exist_ok=True)
    logging.disable_progress_bar()
    made = []
    if "text" in parts:
        made += [save_text_model(folder / "models/text"), write_sums(folder / "sums.csv")]
    if "vision" in parts:
        made += [save_vision_model(folder / "models/vision"), save_tower(folder / "models/tower")]
        made.append(write_shapes(folder / "shapes.json"))
    for path in made:
        print(f"written: {path}")


if __name__ == "__main__":
    main()
