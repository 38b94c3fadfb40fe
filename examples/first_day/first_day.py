"""A first day with OmniZoo, end to end, on small models that it makes itself: docs/quickstart.md tells it step by step.

    python examples/first_day/first_day.py runs/first_day            # all three; or: ... text | composed | published

Each part takes a Hugging Face folder and rows as people have them, writes a config (`omnizoo new`), trains, evaluates,
exports, and asks transformers itself for the same answer.
"""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, AutoTokenizer, pipeline

EXAMPLES = Path(__file__).parent.parent
MEDIA = EXAMPLES / "published/data"
TEXT = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 16}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
TOWER = {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
TOWER |= {"num_attention_heads": 2, "image_size": 32, "patch_size": 8}


def omnizoo(*args: str | Path) -> str:
    """Run a command as a user would, and show it."""
    command = ["omnizoo", *map(str, args)]
    print(f"\n$ {' '.join(command)}", flush=True)
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
    print("\n".join(done.stdout.splitlines()[-12:]))
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    return done.stdout


def save_text_model(folder: Path) -> Path:
    """Stands for a downloaded model: config, weights, tokenizer."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **TEXT)).save_pretrained(folder)
    shutil.copytree(EXAMPLES / "data/tiny/tokenizer", folder, dirs_exist_ok=True)
    return folder


def write_alpaca(path: Path) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["instruction", "input", "output"])
        for number in range(300):
            a, b = number % 6, number // 6 % 6
            writer.writerow([f"What is {a} plus {b}?", "", f"It is {a + b}."])
    return path


def write_llava(path: Path) -> Path:
    """One JSON array of conversations, a picture by name and `<image>` in the text, as LLaVA's files are."""
    told = [json.loads(line) for line in (MEDIA / "visual.jsonl").read_text().splitlines()]
    rows: list[dict[str, Any]] = []
    for row in told:
        if row.get("images") and len(row["images"]) == 1 and not row.get("videos"):
            said = [message["content"] for message in row["messages"]]
            turns = [{"from": "human", "value": said[0]}, {"from": "gpt", "value": said[1]}]
            rows.append({"id": str(len(rows)), "image": row["images"][0], "conversations": turns})
    path.write_text(json.dumps(rows * 4))
    for picture in MEDIA.glob("*.png"):
        shutil.copy(picture, path.parent)
    return path


def settings(path: Path, **changed: Any) -> Path:
    """The config that `new` wrote, with a few values of one's own."""
    config = yaml.safe_load(path.read_text())
    for key, value in changed.items():
        section, _, name = key.partition("__")
        config.setdefault(section, {})[name] = value
    config["train"].pop("warmup_ratio", None)
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def text(folder: Path) -> None:
    """A text model, rows of a spreadsheet."""
    model, rows, out = save_text_model(folder / "model"), write_alpaca(folder / "sums.csv"), folder / "first.yaml"
    omnizoo("new", model, rows, "--out", out)
    settings(out, train__epochs=12, train__lr=3e-3, log__dir=str(folder / "run"), data__pack_tokens=128)
    settings(out, evaluation__samples=4, evaluation__metrics=["accuracy", "exact_match"], train__packs_per_step=4)
    omnizoo("data", "inspect", out, "--out", folder / "samples.html")
    omnizoo("train", out)
    omnizoo("eval", folder / "run")
    omnizoo("export", folder / "run", folder / "trained")
    prompt = "What is 2 plus 3?"
    ours = omnizoo("generate", folder / "trained", "--prompt", prompt, "--temperature", "0", "--max-tokens", "16")
    asked = AutoTokenizer.from_pretrained(folder / "trained")
    chat = asked.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True)
    end = asked.convert_tokens_to_ids("<|im_end|>")
    answer = pipeline("text-generation", model=str(folder / "trained"), tokenizer=asked)(
        chat, do_sample=False, max_new_tokens=16, return_full_text=False, eos_token_id=end
    )[0]["generated_text"].removesuffix("<|im_end|>")
    print(f"transformers' own pipeline: {answer}")
    assert ours.strip() == answer.strip(), (ours, answer)


def composed(folder: Path) -> None:
    """Eyes for a text model: a vision tower and the text model of above, joined by a projector."""
    rows = write_llava(folder / "rows.json")
    config = {
        "model": {
            "foundation": {"path": str(save_text_model(folder / "model"))},
            "modalities": {"image": {"encoder": {"kind": "vision", "config": TOWER}, "projector": {"kind": "mlp"}}},
        },
        "data": {
            "sources": [{"path": str(rows), "take": "all but every 10th"}],
            "eval_sources": [{"path": str(rows), "take": "every 10th"}],
            "pack_tokens": 128,
        },
        "train": {"epochs": 6, "packs_per_step": 4, "lr": 3e-3},
        "evaluation": {"every": 20, "samples": 4, "metrics": ["accuracy"]},
        "log": {"dir": str(folder / "run")},
    }
    path = folder / "composed.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    omnizoo("train", path)
    omnizoo("export", folder / "run", folder / "trained")
    ask(folder, rows)


def published(folder: Path) -> None:
    """A published vision model, the same rows."""
    rows = write_llava(folder / "rows.json")
    fields = yaml.safe_load((EXAMPLES / "published/qwen3_vl.yaml").read_text())["model"]["config"]
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    model.save_pretrained(folder / "model")
    shutil.copytree(MEDIA / "tokenizer", folder / "model", dirs_exist_ok=True)
    out = folder / "first.yaml"
    omnizoo("new", folder / "model", rows, "--out", out)
    settings(out, train__epochs=3, train__lr=2e-3, log__dir=str(folder / "run"), evaluation__samples=2)
    omnizoo("train", out)
    omnizoo("eval", folder / "run")
    omnizoo("export", folder / "run", folder / "trained")
    AutoModelForMultimodalLM.from_pretrained(folder / "trained")  # as transformers itself loads it
    ask(folder, rows)


def ask(folder: Path, rows: Path) -> None:
    row = json.loads(rows.read_text())[0]
    question = row["conversations"][0]["value"].replace("<image>", "")
    content = [{"type": "image", "image": row["image"]}, {"type": "text", "text": question}]
    (folder / "question.json").write_text(json.dumps([{"role": "user", "content": content}]))
    omnizoo("generate", folder / "trained", "--messages", folder / "question.json", "--temperature", "0")
    print(f"expected: {row['conversations'][1]['value']}")


def main() -> None:
    root, parts = Path(sys.argv[1]), sys.argv[2:] or ["text", "composed", "published"]
    for part in parts:
        (root / part).mkdir(parents=True)
        {"text": text, "composed": composed, "published": published}[part](root / part)


if __name__ == "__main__":
    main()
