"""Run LLaMA-Factory in this process, with its packing for text and its padding for images.

    [torchrun] llama_factory.py ASSETS dense|moe|vlm [--steps 20]

It needs its own environment (venvs.py). It always imports torchaudio, whose wheel does not load with a CPU build of
torch. An empty module replaces it, because text and images do not use it.
"""

import argparse
import importlib.machinery
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

BLOCKS = {
    "dense": "Qwen3DecoderLayer",
    "dense_152k": "Qwen3DecoderLayer",
    "moe": "Qwen3MoeDecoderLayer",
    "vlm": "Qwen2_5_VLDecoderLayer,Qwen2_5_VLVisionBlock",
}


def add_empty_module(name: str) -> None:
    """Make `import name` return an empty module."""
    module = types.ModuleType(name)
    module.__spec__, module.__version__ = importlib.machinery.ModuleSpec(name, None), "0"  # type: ignore[attr-defined]
    sys.modules[name] = module


def settings(args: argparse.Namespace, data: Path) -> dict[str, Any]:
    """Return the arguments of LLaMA-Factory."""
    text_settings = {"template": "empty", "packing": True, "neat_packing": True, "per_device_train_batch_size": 1}
    image_settings = {"template": "qwen2_vl", "image_max_pixels": 336 * 336, "image_min_pixels": 56 * 56}
    image_settings |= {
        "per_device_train_batch_size": 4,
        "freeze_vision_tower": False,
        "freeze_multi_modal_projector": False,
    }
    return {
        "model_name_or_path": str(args.assets / args.model),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "dataset_dir": str(data),
        "dataset": "bench",
        "cutoff_len": args.tokens,
        "overwrite_cache": True,
        "dataloader_num_workers": 0,
        "output_dir": str(data / "out"),
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "gradient_accumulation_steps": 1,
        "learning_rate": 1.0e-4,
        "lr_scheduler_type": "constant",
        "max_steps": args.steps,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "use_cpu": True,
        "bf16": False,
        "fp16": False,
        "disable_gradient_checkpointing": True,
        "flash_attn": "sdpa",
        **(image_settings if args.model == "vlm" else text_settings),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("assets", type=Path, help="folder with models and data")
    parser.add_argument("model", choices=sorted(BLOCKS))
    parser.add_argument("--steps", type=int, default=20, help="number of steps (default: 20)")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a pack (default: 1024)")
    args = parser.parse_args()
    data = Path(f"llama_factory{os.environ.get('RANK', '0')}").resolve()
    data.mkdir()
    folder = args.assets / args.model
    if args.model == "vlm":
        tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
        columns = {"messages": "messages", "images": "images"}
        bench = {
            "file_name": str(folder / "chat_absolute.jsonl"),
            "formatting": "sharegpt",
            "columns": columns,
            "tags": tags,
        }
    else:
        columns = {"prompt": "instruction", "response": "output"}
        bench = {"file_name": str(folder / "asked.jsonl"), "columns": columns}
    (data / "dataset_info.json").write_text(json.dumps({"bench": bench}))
    add_empty_module("torchaudio")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:  # the variables that `accelerate launch` sets for FSDP2
        os.environ |= {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
            "FSDP_TRANSFORMER_CLS_TO_WRAP": BLOCKS[args.model],
            "FSDP_RESHARD_AFTER_FORWARD": "true",
            "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
        }
        from trainers import allow_fsdp_on_cpus

        allow_fsdp_on_cpus()
    sys.argv = sys.argv[:1]
    from llamafactory.train.tuner import run_exp

    run_exp(settings(args, data))


if __name__ == "__main__":
    main()
