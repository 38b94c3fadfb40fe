"""Train with transformers' Trainer or TRL's SFTTrainer on rows with images, padded by the model's processor.

[torchrun] vision.py ASSETS vlm transformers|trl [--steps 20]
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from trainers import IGNORE, allow_fsdp_on_cpus, arguments
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    Trainer,
    TrainingArguments,
)

ROWS = 4  # rows per step, with about as many tokens as a pack


def read(folder: Path) -> list[dict[str, Any]]:
    """Read rows and remove the image tag from prompts. The image comes first."""
    rows = []
    for line in (folder / "chat.jsonl").read_text().splitlines():
        row = json.loads(line)
        prompt, response = (message["content"].removeprefix("<image>") for message in row["messages"])
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        rows.append({"messages": messages, "images": [str(folder / name) for name in row["images"]]})
    return rows


def collator(processor: Any, ignored_ids: list[int]) -> Any:
    """Return a function that collates rows. Tokens with `ignored_ids` are not targets."""

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        chats = []
        for row in rows:
            parts = [[{"type": "text", "text": message["content"]}] for message in row["messages"]]
            parts[0].insert(0, {"type": "image"})
            pairs = zip(row["messages"], parts, strict=True)
            chats.append([{"role": message["role"], "content": content} for message, content in pairs])
        images = [Image.open(name) for row in rows for name in row["images"]]
        texts = [processor.apply_chat_template(chat) for chat in chats]
        batch = dict(processor(text=texts, images=images, return_tensors="pt", padding=True))
        labels = batch["input_ids"].clone()
        labels[torch.isin(labels, torch.tensor(ignored_ids))] = IGNORE
        return {**batch, "labels": labels}

    return collate


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("assets", type=Path, help="folder with models and data")
    parser.add_argument("model", help="name of the model")
    parser.add_argument("mode", choices=("transformers", "trl"))
    parser.add_argument("--steps", type=int, default=20, help="number of steps (default: 20)")
    args = parser.parse_args()
    folder = args.assets / args.model
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        allow_fsdp_on_cpus()
    blocks = ["Qwen2_5_VLDecoderLayer", "Qwen2_5_VLVisionBlock"]
    shared = arguments(args.steps, ROWS, blocks)
    rows = read(folder)
    if args.mode == "trl":
        from datasets import Dataset, List
        from datasets import Image as ImageFeature
        from trl import SFTConfig, SFTTrainer

        data = Dataset.from_list(rows).cast_column("images", List(ImageFeature()))
        config = SFTConfig(**shared, max_length=None, gradient_checkpointing=False)
        SFTTrainer(model=model, args=config, train_dataset=data, processing_class=processor).train()
        return
    ignored_ids = [processor.tokenizer.pad_token_id, model.config.image_token_id]
    config = TrainingArguments(**shared, remove_unused_columns=False)
    collate = collator(processor, ignored_ids)
    Trainer(model=model, args=config, train_dataset=rows, data_collator=collate, processing_class=processor).train()


if __name__ == "__main__":
    main()
