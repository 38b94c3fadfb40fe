"""Published omni models, weights in and out: their own key layouts, on one rank and with experts spread over ranks."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from processes import run_on_ranks
from published import publish
from safetensors.torch import load_file, save_file
from tiny import write_config
from transformers import AutoModelForMultimodalLM, Qwen2VLImageProcessorPil
from weights import gives, load, logits_of, train_and_keep, train_and_keep_logits

from omnizoo.cli.main import main
from omnizoo.parallel.process import Process, process_group

# How the files of each family call its weights, by the names that transformers has for them; and what else is in them.
LAYOUTS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "qwen2_vl": ({"model.language_model.": "model.", "model.visual.": "visual."}, ()),
    "qwen2_5_vl": ({"model.language_model.": "model.", "model.visual.": "visual."}, ()),
    "qwen2_5_omni_thinker": (
        {
            "model.language_model.": "thinker.model.",
            "model.visual.": "thinker.visual.",
            "model.audio_tower.": "thinker.audio_tower.",
            "lm_head.": "thinker.lm_head.",
        },
        ("talker.model.norm.weight", "token2wav.scale"),
    ),
    "qwen3_5": ({}, ("mtp.norm.weight",)),
    "qwen3_5_moe": ({}, ("mtp.norm.weight",)),
    "glm4v": ({}, ()),
    "glm4v_moe": ({}, ()),
}
MOE = ("qwen3_5_moe", "glm4v_moe")
COVERING = ("qwen2_5_omni_thinker", "qwen3_5_moe")
FAMILIES = [f if f in COVERING else pytest.param(f, marks=pytest.mark.long) for f in LAYOUTS]


def as_published(family: str, folder: Path) -> Path:
    """A folder as the family's authors publish it: their names of weights, each expert by itself."""
    model = publish(family, folder)
    names, others = LAYOUTS[family]
    weights: dict[str, torch.Tensor] = {name: torch.ones(3) for name in others}
    for name, tensor in model.state_dict().items():
        prefix = next((old for old in names if name.startswith(old)), "")
        published = names.get(prefix, prefix) + name.removeprefix(prefix)
        if ".experts." not in name:
            weights[published] = tensor.clone()
            continue
        stem, _, kind = published.rpartition(".")
        halves = {"gate_proj": 0, "up_proj": 1} if kind == "gate_up_proj" else {"down_proj": 0}
        for expert, matrix in enumerate(tensor):
            for part, half in halves.items():
                weights[f"{stem}.{expert}.{part}.weight"] = matrix.chunk(len(halves))[half].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    Qwen2VLImageProcessorPil(image_mean=[0.4] * 3).save_pretrained(folder)
    (folder / "video_preprocessor_config.json").write_text(json.dumps({"fps": 3}))
    return folder


def config_of(folder: Path, path: Path) -> Path:
    model = {"config": None, "path": str(path), "tokenizer": None}
    return write_config(folder, model=model, train={"steps": 2, "packs_per_step": 4})


def check_weights(process: Process, folder: str) -> None:
    """Each rank reads its part of what is published; rank 0 keeps the logits of what was trained from it."""
    for family in MOE:
        own = Path(folder) / family
        given = AutoModelForMultimodalLM.from_pretrained(own / "published").state_dict()
        found = load(process, own / "tiny.yaml", "--parallel.ep", "2")
        assert [name for name in found if not torch.equal(found[name], given[name])] == []
        logits, weights = train_and_keep([own / "tiny.yaml", "--parallel.ep", "2"])
        if process.rank == 0:
            save_file({"logits": logits}, own / "logits.safetensors")
            save_file(weights, own / "trained.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_published_names_and_media_settings_round_trip(family: str, tmp_path: Path) -> None:
    folder = as_published(family, tmp_path / "published")
    path = config_of(tmp_path, folder)
    given = dict(AutoModelForMultimodalLM.from_pretrained(folder).named_parameters())
    with process_group() as process:
        found = load(process, path)
    assert found.keys() == given.keys()
    assert [name for name in found if not torch.equal(found[name], given[name])] == []
    trained = train_and_keep_logits([path])
    out = tmp_path / "exported"
    assert main(["export", str(tmp_path / "run"), str(out)]) == 0
    model = AutoModelForMultimodalLM.from_pretrained(out, attn_implementation="eager", dtype="auto")
    assert gives(model, trained)
    others = re.compile("|".join([*map(re.escape, LAYOUTS[family][1]), "(?!)"]))
    names = {
        name.removeprefix("thinker.") for name in load_file(folder / "model.safetensors") if not others.match(name)
    }
    assert set(load_file(out / "model.safetensors")) == names
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        assert (out / name).read_text() == (folder / name).read_text()


@pytest.mark.slow
@pytest.mark.long
def test_experts_on_two_ranks_load_and_export(tmp_path: Path) -> None:
    for family in MOE:
        config_of(tmp_path / family, as_published(family, tmp_path / family / "published"))
    result = run_on_ranks(check_weights, 2, str(tmp_path))
    assert result.code == 0, result.stdout + result.stderr
    for family in MOE:
        out = tmp_path / family / "exported"
        assert main(["export", str(tmp_path / family / "run"), str(out)]) == 0
        model = AutoModelForMultimodalLM.from_pretrained(out, attn_implementation="eager")
        trained, exported = load_file(tmp_path / family / "trained.safetensors"), model.state_dict()
        assert trained.keys() == exported.keys()
        assert [name for name in trained if not torch.equal(trained[name], exported[name])] == []
        # Not bit for bit: there, an expert multiplied the rows of both ranks at once, which rounds otherwise.
        logits = load_file(tmp_path / family / "logits.safetensors")["logits"]
        difference = float((logits_of(model) - logits).norm() / logits.norm())
        assert difference < 1e-6, difference
        shutil.rmtree(out)
