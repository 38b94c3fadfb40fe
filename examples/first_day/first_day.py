"""Run the tutorials on text and vision models end to end, on the small models and rows of make_models.py.

    python examples/first_day/first_day.py runs/first_day            # all three; or: ... text | composed | published

Each part takes a Hugging Face folder and rows, writes a config with `omnizoo new`, trains, evaluates, exports, and
generates. The text part compares the response with that of transformers' own pipeline.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from make_models import save_text_model, save_tower, save_vision_model, write_shapes, write_sums
from transformers import AutoModelForMultimodalLM, AutoTokenizer, pipeline


def omnizoo(*args: str | Path) -> str:
    """Run a command in a new process, print the end of its output and return all of it."""
    command = ["omnizoo", *map(str, args)]
    print(f"\n$ {' '.join(command)}", flush=True)
    result = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
    print("\n".join(result.stdout.splitlines()[-12:]))
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {result.returncode}: {result.stderr}")
    return result.stdout


def edit_config(path: Path, **changes: Any) -> Path:
    """Change values of a config that `omnizoo new` wrote. Keys are written as section__key."""
    config = yaml.safe_load(path.read_text())
    for key, value in changes.items():
        section, _, name = key.partition("__")
        config.setdefault(section, {})[name] = value
    config["train"].pop("warmup_ratio", None)
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def text(folder: Path) -> None:
    """Fine-tune a text model on a CSV file (docs/tutorials/text_model.md)."""
    model = save_text_model(folder / "model")
    rows = write_sums(folder / "sums.csv")
    config = folder / "first.yaml"
    omnizoo("new", model, rows, "--out", config)
    edit_config(config, train__epochs=12, train__lr=3e-3, train__packs_per_step=4, data__pack_tokens=128)
    edit_config(config, evaluation__samples=4, evaluation__metrics=["accuracy", "exact_match"])
    edit_config(config, log__dir=str(folder / "run"))

    omnizoo("data", "inspect", config, "--out", folder / "samples.html")
    omnizoo("train", config)
    omnizoo("eval", folder / "run")
    omnizoo("export", folder / "run", folder / "trained")
    prompt = "What is 2 plus 3?"
    response = omnizoo("generate", folder / "trained", "--prompt", prompt, "--temperature", "0", "--max-tokens", "16")

    expected = transformers_response(folder / "trained", prompt)
    print(f"transformers' own pipeline: {expected}")
    assert response.strip() == expected.strip(), (response, expected)


def transformers_response(model: Path, prompt: str) -> str:
    """Return the response of transformers' text-generation pipeline to a prompt, without sampling."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    messages = [{"role": "user", "content": prompt}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    generate = pipeline("text-generation", model=str(model), tokenizer=tokenizer)
    outputs = generate(chat, do_sample=False, max_new_tokens=16, return_full_text=False, eos_token_id=end_of_turn)
    response: str = outputs[0]["generated_text"]
    return response.removesuffix("<|im_end|>")


def composed(folder: Path) -> None:
    """Add vision to a text model: a vision encoder and a text model, joined by a projector."""
    rows = write_shapes(folder / "shapes.json")
    encoder = {"kind": "vision", "path": str(save_tower(folder / "tower"))}
    config = {
        "model": {
            "foundation": {"path": str(save_text_model(folder / "model"))},
            "modalities": {"image": {"encoder": encoder, "projector": {"kind": "mlp"}}},
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
    ask_about_image(folder, rows)


def published(folder: Path) -> None:
    """Fine-tune a multimodal Hugging Face model (docs/tutorials/vision_model.md)."""
    model = save_vision_model(folder / "model")
    rows = write_shapes(folder / "shapes.json")
    config = folder / "first.yaml"
    omnizoo("new", model, rows, "--out", config)
    edit_config(config, train__epochs=3, train__lr=2e-3, log__dir=str(folder / "run"), evaluation__samples=2)
    omnizoo("train", config)
    omnizoo("eval", folder / "run")
    omnizoo("export", folder / "run", folder / "trained")
    AutoModelForMultimodalLM.from_pretrained(folder / "trained")  # transformers loads the export
    ask_about_image(folder, rows)


def ask_about_image(folder: Path, rows: Path) -> None:
    """Generate a response to the first row, and print the expected one."""
    row = json.loads(rows.read_text())[0]
    question, answer = (turn["value"] for turn in row["conversations"])
    image = {"type": "image", "image": row["image"]}
    content = [image, {"type": "text", "text": question.replace("<image>", "")}]
    (folder / "question.json").write_text(json.dumps([{"role": "user", "content": content}]))
    omnizoo("generate", folder / "trained", "--messages", folder / "question.json", "--temperature", "0")
    print(f"expected: {answer}")


def main() -> None:
    parts = {"text": text, "composed": composed, "published": published}
    root = Path(sys.argv[1])
    for name in sys.argv[2:] or parts:
        (root / name).mkdir(parents=True)
        parts[name](root / name)


if __name__ == "__main__":
    main()
