"""Train with transformers' Trainer or TRL's SFTTrainer, set up as in their documentation.

    [torchrun] trainers.py ASSETS MODEL padded|packed|trl [--steps 20]

padded: several documents, padded to the longest. packed: documents concatenated in advance, with positions that restart
at each. trl: best-fit packing of TRL.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import accelerate.state
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

IGNORE = -100
DOCUMENTS = 3  # padded documents per step, with about as many tokens as a pack


def allow_fsdp_on_cpus() -> None:
    """Enable FSDP on CPUs. accelerate 1.15 enables it for accelerators only, and silently uses DDP on CPUs."""
    original_init = accelerate.state.AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original_init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == accelerate.state.DistributedType.MULTI_CPU:
            self.distributed_type = accelerate.state.DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin

    accelerate.state.AcceleratorState.__init__ = init


def packed_rows(documents: list[list[int]], tokens: int) -> list[dict[str, list[int]]]:
    """Concatenate documents to rows of `tokens` tokens."""
    rows: list[dict[str, list[int]]] = []
    ids: list[int] = []
    positions: list[int] = []
    for document in documents:
        while document:
            room = tokens - len(ids)
            ids += document[:room]
            positions += range(min(room, len(document)))
            document = document[room:]
            if len(ids) == tokens:
                rows.append({"input_ids": ids, "position_ids": positions})
                ids, positions = [], []
    return rows


def collate_packed(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Return a batch in which the first token of each document is not a target."""
    ids = torch.tensor([row["input_ids"] for row in rows])
    positions = torch.tensor([row["position_ids"] for row in rows])
    labels = ids.masked_fill(positions == 0, IGNORE)
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def arguments(steps: int, batch: int, blocks: list[str]) -> dict[str, Any]:
    """Return the training arguments that all trainers share."""
    sharding: dict[str, Any] = {}
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        fsdp_config = {"version": 2, "transformer_layer_cls_to_wrap": blocks, "reshard_after_forward": True}
        sharding = {"fsdp": True, "fsdp_config": fsdp_config, "ddp_backend": "gloo"}
    return {
        "output_dir": tempfile.mkdtemp(dir="."),
        "max_steps": steps,
        "per_device_train_batch_size": batch,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "optim": "adamw_torch_fused",
        **sharding,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("assets", type=Path, help="folder with models and data")
    parser.add_argument("model", help="name of the model")
    parser.add_argument("mode", choices=("padded", "packed", "trl"))
    parser.add_argument("--steps", type=int, default=20, help="number of steps (default: 20)")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a pack (default: 1024)")
    args = parser.parse_args()
    folder = args.assets / args.model
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        allow_fsdp_on_cpus()
    shared = arguments(args.steps, DOCUMENTS if args.mode == "padded" else 1, [type(model.model.layers[0]).__name__])
    if args.mode == "trl":
        from datasets import load_dataset
        from trl import SFTConfig, SFTTrainer

        config = SFTConfig(**shared, packing=True, max_length=args.tokens, gradient_checkpointing=False)
        rows = load_dataset("json", data_files=str(folder / "text.jsonl"), split="train")
        SFTTrainer(model=model, args=config, train_dataset=rows, processing_class=tokenizer).train()
        return
    lines = (folder / "text.jsonl").read_text().splitlines()
    documents = [[*tokenizer(json.loads(line)["text"])["input_ids"], tokenizer.eos_token_id] for line in lines]
    data: list[Any] = [{"input_ids": document} for document in documents]
    collate: Any = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    if args.mode == "packed":
        data, collate = packed_rows(documents, args.tokens), collate_packed
    config = TrainingArguments(**shared)
    Trainer(model=model, args=config, train_dataset=data, data_collator=collate, processing_class=tokenizer).train()


if __name__ == "__main__":
    main()
