"""An export is a folder as published ones are: processor and settings go along, precision as it was published."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exports import from_folder, publish
from fixtures import CHATML, make_tokenizer
from PIL import Image
from published import publish as publish_omni
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import write_config, write_rows
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    pipeline,
)

from omnizoo.checkpoint import export as exports
from omnizoo.cli.main import main

ONE_STEP = {"steps": 1, "packs_per_step": 1}


def dtypes(folder: Path) -> set[str]:
    found = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            found |= {tensors.get_slice(key).get_dtype() for key in tensors.keys()}  # noqa: SIM118
    return found


def test_export_keeps_published_precision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = publish(tmp_path / "model", "gpt_oss")  # with experts, which are fused in the model and not in files
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(model)
    path = write_config(tmp_path, **from_folder(model), train=ONE_STEP)
    assert main(["train", str(path)]) == 0
    run, out, precise = (str(tmp_path / name) for name in ("run", "out", "precise"))
    capsys.readouterr()
    assert main(["export", run, out]) == 0
    said = capsys.readouterr().out
    assert f"wrote {out}: GptOssForCausalLM, " in said
    assert "M parameters in bfloat16" in said
    assert "step_00000001" in said
    assert "model.safetensors (" in said
    assert dtypes(Path(out)) == {"BF16"}
    assert json.loads((Path(out) / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(out, dtype="auto").dtype == torch.bfloat16
    assert main(["export", run, precise, "--dtype", "fp32"]) == 0
    assert dtypes(Path(precise)) == {"F32"}
    rounded, whole = load_file(Path(out) / "model.safetensors"), load_file(Path(precise) / "model.safetensors")
    assert rounded.keys() == whole.keys()
    assert all(torch.equal(rounded[name], whole[name].bfloat16()) for name in whole)


def test_large_export_is_split_like_published_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_config(tmp_path, train=ONE_STEP)
    assert main(["train", str(path)]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "one")]) == 0
    assert exports.MAX_FILE_SIZE == "5GB"
    monkeypatch.setattr(exports, "MAX_FILE_SIZE", "20KB")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "many")]) == 0
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files[0].startswith("model-00001-of-000")
    assert len(files) > 1
    one = load_file(tmp_path / "one" / "model.safetensors")
    many = {key: tensor for file in files for key, tensor in load_file(tmp_path / "many" / file).items()}
    assert one.keys() == many.keys() == index["weight_map"].keys()
    assert all(torch.equal(one[key], many[key]) for key in one)
    for folder in ("one", "many"):
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert config["architectures"] == ["Qwen3ForCausalLM"]
        assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= {
            file.name for file in (tmp_path / folder).iterdir()
        }


def publish_llava(folder: Path) -> Path:
    tokenizer = make_tokenizer(folder, special_tokens=("<image>",))
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
        projection_dim=16,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    place = tokenizer.convert_tokens_to_ids("<image>")
    torch.manual_seed(0)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=place, vision_feature_layer=-1)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    images = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    LlavaProcessor(
        images,
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHATML,
    ).save_pretrained(folder)
    (folder / "modeling_own.py").write_text("raise SystemExit('code of a folder was run')")
    return folder


def picture(folder: Path) -> Path:
    file = folder / "picture.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 56, 3), dtype=np.uint8)).save(file)
    return file


def test_transformers_pipeline_loads_export_with_processor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = publish_llava(tmp_path / "model")
    path = write_config(tmp_path, **from_folder(model), train=ONE_STEP)
    assert main(["train", str(path)]) == 0
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "run"), str(out)]) == 0
    assert not list(out.rglob("*.py"))  # never code
    assert "processor in transformers needs" not in capsys.readouterr().out
    before, after = AutoProcessor.from_pretrained(model), AutoProcessor.from_pretrained(out)
    assert type(after) is type(before)
    assert after.to_dict() == before.to_dict()
    assert after.chat_template == before.chat_template
    image = Image.open(picture(tmp_path))
    pipe = pipeline("image-text-to-text", model=str(out))
    (answer,) = pipe(text="<image> what is it?", images=[image], max_new_tokens=4, do_sample=False)
    inputs = after(text="<image> what is it?", images=[image], return_tensors="pt")
    whole = AutoModelForImageTextToText.from_pretrained(out)
    written = whole.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert (
        answer["generated_text"].removeprefix("<image>").strip()
        == after.decode(written[0], skip_special_tokens=True).strip()
    )


def test_vision_model_keeps_image_processor_through_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is exported answers to a picture as transformers' own processor and model do. A clip needs torchvision."""
    model = tmp_path / "model"
    publish_omni("qwen3_vl", model)
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 16,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 1024, "longest_edge": 4096},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (model / "preprocessor_config.json").write_text(json.dumps(settings))
    (model / "video_preprocessor_config.json").write_text(json.dumps(settings | {"fps": 2}))
    question = [{"type": "image", "image": str(picture(tmp_path))}, {"type": "text", "text": "what is it?"}]
    turns: list[dict[str, Any]] = [{"role": "user", "content": question}]
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": [*turns, {"role": "assistant", "content": "the sea"}]}])
    data = {"sources": [{"path": str(rows)}], "media_outside": True, "lanes": 1}
    assert main(["train", str(write_config(tmp_path, **from_folder(model), data=data, train=ONE_STEP))]) == 0
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "run"), str(out)]) == 0
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        assert (out / name).read_bytes() == (model / name).read_bytes()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "processor in transformers needs" in line]
    assert line.endswith("torchvision: pip install 'omnizoo[processors]'")
    with pytest.raises(ImportError, match=r"(?i)torchvision"):  # the line is true: torchvision is not installed here
        AutoProcessor.from_pretrained(out)

    (tmp_path / "question.json").write_text(json.dumps(turns))
    asked = ["generate", str(out), "--messages", str(tmp_path / "question.json"), "--temperature", "0"]
    assert main([*asked, "--max-tokens", "8", "--out", str(tmp_path / "answer.jsonl")]) == 0
    ours = json.loads((tmp_path / "answer.jsonl").read_text())["answer"]
    images = AutoImageProcessor.from_pretrained(out)(Image.open(picture(tmp_path)), return_tensors="pt")
    tokenizer, reference = AutoTokenizer.from_pretrained(out), AutoModelForImageTextToText.from_pretrained(out)
    config: Any = reference.config
    places = int(images["image_grid_thw"].prod()) // 4
    text = f"<|vision_start|>{'<|image_pad|>' * places}<|vision_end|>what is it?"
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    written = reference.generate(
        **ids,
        **images,
        mm_token_type_ids=(ids["input_ids"] == config.image_token_id).int(),
        do_sample=False,
        max_new_tokens=8,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")],
        suppress_tokens=[config.image_token_id, config.video_token_id],
    )
    theirs = tokenizer.decode(written[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    assert ours.strip() == theirs.strip()
