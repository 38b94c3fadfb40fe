"""CLIP score and Frechet distance with tiny random models, against transformers' forward and scipy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
import transformers
from PIL import Image
from pipelines import clip_tokenizer

from omnizoo import Answer
from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.modalities.metrics.clip_score import ClipScore
from omnizoo.modalities.metrics.frechet import FrechetDistance
from omnizoo.training.evaluation.answer_metrics import build_metrics, measure


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = transformers.CLIPTextConfig(vocab_size=514, bos_token_id=512, eos_token_id=513, pad_token_id=513, **sizes)
    vision = transformers.CLIPVisionConfig(image_size=16, patch_size=8, **sizes)
    folder = tmp_path_factory.mktemp("clip")
    config = transformers.CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=8)
    transformers.CLIPModel(config).save_pretrained(folder)
    clip_tokenizer().save_pretrained(folder)
    size = {"height": 16, "width": 16}
    transformers.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=size).save_pretrained(folder)
    return folder


def draw(folder: Path, count: int, seed: int) -> list[Path]:
    """Write images of random pixels."""
    rng = np.random.default_rng(seed)
    files = []
    for i in range(count):
        files.append(folder / f"{seed}_{i}.png")
        Image.fromarray(rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(files[-1])
    return files


def test_clip_score_equals_the_logits_of_transformers(clip: Path, tmp_path: Path) -> None:
    [file] = draw(tmp_path, 1, seed=0)
    score = ClipScore(str(clip))(Answer(question="a red cat", text="", expected=None, files=[file]))

    model = transformers.CLIPModel.from_pretrained(clip)
    pixels = transformers.AutoImageProcessor.from_pretrained(clip)(images=Image.open(file), return_tensors="pt")
    tokens = transformers.AutoTokenizer.from_pretrained(clip)("a red cat", return_tensors="pt")
    with torch.no_grad():
        logits = model(**pixels, **tokens).logits_per_image / model.logit_scale.exp()
    assert score == pytest.approx(100 * max(float(logits), 0), abs=1e-4)
    assert ClipScore(str(clip))(Answer(question="a red cat", text="none", expected=None)) is None


def test_frechet_distance_equals_the_one_with_a_matrix_square_root(clip: Path, tmp_path: Path) -> None:
    generated, expected = draw(tmp_path, 12, seed=1), draw(tmp_path, 12, seed=2)
    pairs = zip(generated, expected, strict=True)
    answers = [Answer("a", "", None, files=[first], expected_files=[second]) for first, second in pairs]
    metric = FrechetDistance(str(clip))
    distance = metric.score_all(answers)

    features = [
        np.concatenate([metric.tower.image_features(f).double() for f in side]) for side in (generated, expected)
    ]
    means = [part.mean(0) for part in features]
    covariances = [np.cov(part, rowvar=False) for part in features]
    root = scipy.linalg.sqrtm(covariances[0] @ covariances[1]).real
    reference = ((means[0] - means[1]) ** 2).sum() + np.trace(sum(covariances) - 2 * root)
    assert distance == pytest.approx(reference, rel=1e-6)
    assert metric.score_all([Answer("a", "", None, files=generated, expected_files=generated)]) == pytest.approx(
        0, abs=1e-9
    )
    assert metric.score_all(answers[:1]) is None


def test_metric_without_a_model_folder_raises(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="clip_score: path"):
        ClipScore(str(tmp_path / "missing"))


def test_built_in_metrics_are_averaged_or_computed_once(clip: Path, tmp_path: Path) -> None:
    metrics = [{"kind": kind, "options": {"path": str(clip)}} for kind in ("clip_score", "fid")]
    config = load_config(
        {"model": {"path": "m"}, "data": {"sources": [{"path": "d"}]}, "evaluation": {"samples": 2, "metrics": metrics}}
    )
    assert [settings.improves_upwards for settings in config.evaluation.metrics] == [True, False]
    files = draw(tmp_path, 4, seed=3)
    answers = [Answer("a red cat", "", None, files=[a], expected_files=[b]) for a, b in (files[:2], files[2:])]
    records: list[dict[str, Any]] = [{}, {}]
    means, failures = measure(build_metrics(config), list(zip(answers, records, strict=True)))
    assert failures == []
    scores = [record["metrics"]["eval/clip_score"] for record in records]
    assert means["eval/clip_score"] == pytest.approx(sum(scores) / 2)
    assert means["eval/fid"]
    assert "eval/fid" not in records[0]["metrics"]


@pytest.mark.parametrize("options", [{}, {"path": "m", "layers": 2}])
def test_metric_with_wrong_options_raises(options: dict[str, Any]) -> None:
    metrics = [{"kind": "fid", "options": options}]
    with pytest.raises(UserError, match=r"evaluation.metrics.0: options\.(path|layers)"):
        load_config(
            {
                "model": {"path": "m"},
                "data": {"sources": [{"path": "d"}]},
                "evaluation": {"samples": 2, "metrics": metrics},
            }
        )
