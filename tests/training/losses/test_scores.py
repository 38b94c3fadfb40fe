"""Reward models and sequence classification, against transformers' own classes, scikit-learn and one process."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fixtures import TEXT, make_tokenizer
from peft import AutoPeftModelForSequenceClassification
from preference_cases import assert_same, make_folder, make_scorer, one_step, pair_config, pair_rows
from sklearn.metrics import accuracy_score, f1_score
from tiny import read_steps
from transformers import AutoModelForSequenceClassification

from omnizoo.cli.main import main
from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.config.sections.model import ScoreHead
from omnizoo.data.rendering.renderer import Renderer
from omnizoo.data.row import BadRow
from omnizoo.data.token_fields import CLASSES, pack_labels, unpack_labels

LABELS = ["bad", "fair", "good"]
ROOT = Path(__file__).parents[3]
FIGURES = ("step", "loss", "grad_norm", "tokens")


def of_folder(folder: Path, **more: Any) -> dict[str, Any]:
    return {"path": str(folder), "config": None, "tokenizer": None, **more}


def classification(problem: str) -> dict[str, Any]:
    return {"kind": "classification", "options": {"labels": LABELS, "problem": problem}}


def labeled_rows(problem: str, count: int = 60) -> list[dict[str, Any]]:
    """Texts and chats of many lengths; labels by name and by number."""
    dice, words = random.Random(0), TEXT.split()
    rows: list[dict[str, Any]] = []
    for number in range(count):
        text = " ".join(dice.choices(words, k=dice.randint(1, 9)))
        index = dice.randrange(3)
        label: Any = LABELS[index] if number % 2 else index
        if problem == "multi":
            label = [name for name in LABELS if dice.random() < 0.4]
        if number % 3:
            rows.append({"text": text, "label": label})
        else:
            rows.append({"messages": [{"role": "user", "content": text}], "labels": label})
    return rows


def scores_of(model: Any, data: Any) -> tuple[torch.Tensor, list[str]]:
    """The scores by transformers' own forward, one sample after the other, and the names of the samples."""
    scores, names = [], []
    for batch in data.micro_batches:
        for first, last in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
            scores.append(model(input_ids=batch.columns["input_ids"][:, first:last]).logits[0])
        names += batch.sample_ids
    return torch.stack(scores), names


def targets_of(rows: list[dict[str, Any]], names: list[str]) -> torch.Tensor:
    """Whether each sample has each label, `[samples, labels]`, from the rows."""
    has_label = torch.zeros(len(names), len(LABELS))
    for i, name in enumerate(names):
        row = rows[int(name.split("/")[2])]
        value = row["label"] if "label" in row else row["labels"]
        for label in value if isinstance(value, list) else [value]:
            has_label[i, LABELS.index(label) if isinstance(label, str) else label] = 1
    return has_label


# Losses and gradients.


def test_packed_rewards_match_transformers_on_single_responses(tmp_path: Path) -> None:
    folder = make_scorer(tmp_path / "model")
    path = pair_config(tmp_path / "run", [{"kind": "reward"}], model=of_folder(folder))
    result, gradients, data = one_step(path)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    scores, names = scores_of(model, data)
    assert [name.rpartition("/")[2] for name in names] == ["chosen", "rejected"] * data.totals.pairs
    differences = (scores[::2] - scores[1::2]).squeeze(1)
    loss = -F.logsigmoid(differences).mean()
    loss.backward()
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    assert result.terms["reward/margin"] == pytest.approx(differences.mean().item(), abs=1e-5)
    assert result.terms["reward/accuracy"] == pytest.approx((differences > 0).float().mean().item())
    assert len(differences) > 4
    assert differences.abs().max() > 0.1
    assert_same(gradients, {name: p.grad for name, p in model.named_parameters()})


@pytest.mark.parametrize("problem", ["single", "multi"])
def test_packed_classification_matches_transformers_on_single_samples(problem: str, tmp_path: Path) -> None:
    folder = make_scorer(tmp_path / "model", num_labels=3)
    rows = labeled_rows(problem)
    path = pair_config(tmp_path / "run", [classification(problem)], rows, model=of_folder(folder))
    result, gradients, data = one_step(path)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    scores, names = scores_of(model, data)
    targets = targets_of(rows, names)
    if problem == "multi":
        loss = F.binary_cross_entropy_with_logits(scores, targets)
        is_right = ((scores > 0) == targets.bool()).all(1)
    else:
        loss = F.cross_entropy(scores, targets.argmax(1))
        is_right = scores.argmax(1) == targets.argmax(1)
    loss.backward()
    assert len(names) > 8
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    assert result.terms["classification/accuracy"] == pytest.approx(is_right.float().mean().item())
    assert_same(gradients, {name: p.grad for name, p in model.named_parameters()})


# Runs.


def test_reward_run_resumes_exactly_evaluates_and_exports_the_same_rewards(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", 0)
    rows = pair_rows(30)
    path = pair_config(
        tmp_path, [{"kind": "reward"}], rows, model=of_folder(folder), checkpoint={"every": 4, "keep": 3}
    )
    overrides = ["--train.steps", "8", "--train.lr", "3e-3", "--evaluation.every", "8", "--evaluation.packs", "50"]
    overrides += ["--data.eval_sources", f"[{{path: {tmp_path / 'pairs.jsonl'}}}]"]
    assert main(["train", str(path), *overrides]) == 0
    steps = read_steps(tmp_path / "run")
    assert steps[-1]["eval/loss/reward/accuracy"] > 0.6
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "exported")]) == 0

    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    assert exported.config.num_labels == 1
    again, _, data = one_step(path, "--model.path", str(tmp_path / "exported"), "--train.packs_per_step", "16")
    scores, _ = scores_of(exported, data)
    chosen, rejected = again.terms["reward/rewards/chosen"], again.terms["reward/rewards/rejected"]
    assert chosen == pytest.approx(scores[::2].mean().item(), abs=1e-5)
    assert rejected == pytest.approx(scores[1::2].mean().item(), abs=1e-5)
    assert abs(chosen - rejected) > 0.01
    assert steps[-1]["eval/loss/reward/margin"] > 0.01

    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000008")
    assert main(["train", str(path), *overrides]) == 0
    resumed = read_steps(tmp_path / "run")
    assert [[step[name] for name in FIGURES] for step in resumed] == [
        [step[name] for name in FIGURES] for step in steps
    ]


@pytest.mark.parametrize("problem", ["single", "multi"])
def test_classification_run_learns_labels_and_reports_accuracy_and_f1(problem: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", 0)
    rows = labeled_rows(problem, 40)
    losses = [classification(problem)]
    path = pair_config(tmp_path, losses, rows, model=of_folder(folder))
    overrides = ["--train.steps", "6", "--train.lr", "3e-3", "--evaluation.every", "6", "--evaluation.packs", "50"]
    overrides += ["--data.eval_sources", f"[{{path: {tmp_path / 'pairs.jsonl'}}}]"]
    assert main(["train", str(path), *overrides]) == 0
    last = read_steps(tmp_path / "run")[-1]
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "exported")]) == 0

    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    assert exported.config.id2label == dict(enumerate(LABELS))
    assert exported.config.problem_type == f"{problem}_label_classification"
    assert exported.config.pad_token_id is not None
    _, _, data = one_step(path, "--model.path", str(tmp_path / "exported"), "--train.packs_per_step", "16")
    with torch.no_grad():
        scores, names = scores_of(exported, data)
    ids = sorted({int(name.split("/")[2]): i for i, name in enumerate(names)}.items())
    assert [row for row, _ in ids] == list(range(len(rows)))
    scores = scores[[i for _, i in ids]]
    targets = targets_of(rows, [f"0/0/{row}" for row, _ in ids])
    truth, predicted = targets.argmax(1), scores.argmax(1)
    if problem == "multi":
        truth, predicted = targets.int(), (scores > 0).int()
    assert last["eval/loss/classification/accuracy"] == pytest.approx(accuracy_score(truth, predicted))
    assert last["eval/f1"] == pytest.approx(f1_score(truth, predicted, average="macro", zero_division=0.0))
    assert last["eval/f1"] > 0.2


def test_adapter_of_a_reward_model_loads_in_peft_with_the_same_rewards(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", 0)
    adapter = {"rank": 4, "targets": ["all-linear"], "dropout": 0.0}
    path = pair_config(tmp_path, [{"kind": "reward"}], model=of_folder(folder, adapter=adapter))
    assert main(["train", str(path), "--train.steps", "4", "--train.lr", "1e-2"]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "adapter")]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "merged"), "--merge"]) == 0
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["task_type"] == "SEQ_CLS"
    assert settings["modules_to_save"] == ["score"]
    peft_model = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapter", num_labels=1)
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    tokens = torch.arange(20, 60)[None]
    with torch.no_grad():
        torch.testing.assert_close(peft_model(tokens).logits, merged(tokens).logits, rtol=1e-5, atol=1e-6)
    assert merged(tokens).logits.abs() > 1e-3


# Layouts.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "losses", "layouts"),
    [
        ("lora_tiny.yaml", [{"kind": "reward", "options": {"centering": 0.1}}], "uly2.ring2"),
        ("qwen3_moe_tiny.yaml", [{"kind": "reward"}, {"kind": "balance", "weight": 0.01}], "dp2.uly2.ep4"),
        ("text_tiny.yaml", [classification("multi")], "rep2.dp2,dp2.uly2"),
    ],
)
def test_verify_passes_with_scores(
    config: str, losses: list[dict[str, Any]], layouts: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = pair_rows(60) if losses[0]["kind"] == "reward" else labeled_rows("multi")
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--data.sources", f"[{{path: {source}}}]", "--data.pack_tokens", "160", "--evaluation.every", "0"]
    path = str(ROOT / "examples" / config)
    options = ["--world", "4", "--layouts", layouts, "--train.losses", json.dumps(losses)]
    assert main(["verify", path, *options, *arguments]) == 0
    count = len(layouts.split(","))
    assert f"{count} of {count} layouts of 4 ranks agree with one process (fp32)" in capfd.readouterr().out


# Rows and mistakes.


def test_label_bits_survive_packing_for_any_number_of_labels() -> None:
    sets = [[0, 30, 31, 61, 62, 99], [], [5]]
    words = torch.stack([torch.from_numpy(pack_labels(labels, 100)) for labels in sets], dim=1).long()
    is_set = unpack_labels(words, 100)
    assert [row.nonzero().flatten().tolist() for row in is_set] == sets


@pytest.mark.parametrize(
    ("problem", "row", "message"),
    [
        ("single", {"text": "a"}, "`label` is missing"),
        ("single", {"text": "a", "label": "best"}, "`label` contains 'best'"),
        ("single", {"text": "a", "label": 3}, "`label` contains '3'"),
        ("single", {"text": "a", "label": True}, "`label` contains 'True'"),
        ("single", {"text": "a", "label": 1, "labels": 1}, "`label` and `labels`"),
        ("single", {"text": "a", "label": 1, "score": 0.3}, "`score` is not used"),
        ("single", {"input_ids": [1, 2], "label": 1}, "pre-tokenized"),
        ("multi", {"text": "a", "labels": "good"}, "expected a list"),
        ("multi", {"text": "a", "labels": [0, 1, 1]}, "more than once"),
    ],
)
def test_unusable_label_is_a_bad_row(problem: str, row: dict[str, Any], message: str, tmp_path: Path) -> None:
    head = ScoreHead(labels=LABELS, problem=problem)
    renderer = Renderer(make_tokenizer(tmp_path), append_eos=False, score_head=head)
    with pytest.raises(BadRow, match=message):
        renderer.render(row)


def test_labeled_text_is_truncated_and_scored_as_transformers_tokenizes_it(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    renderer = Renderer(tokenizer, append_eos=False, score_head=ScoreHead(labels=LABELS, problem="multi"))
    rendered = renderer.render({"text": "yes", "labels": ["good", 0]})
    assert rendered.input_ids.tolist() == tokenizer("yes").input_ids
    assert rendered.columns[CLASSES].tolist() == [[0b101] * len(rendered)]
    assert not rendered.is_prose  # it is never split, because the label belongs to the whole text
    chat = [{"role": "user", "content": "yes"}]
    rendered = renderer.render({"messages": chat, "labels": []})
    assert rendered.input_ids.tolist() == tokenizer.apply_chat_template(chat)["input_ids"]


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("train.losses", {"train.losses": [{"kind": "reward"}, {"kind": "cross_entropy"}]}),
        ("train.losses.0.options.labels", {"train.losses": [{"kind": "classification"}]}),
        (
            "train.losses.0.options.labels",
            {"train.losses": [classification("single") | {"options": {"labels": ["a"]}}]},
        ),
        ("model.score_head", {"model.score_head": {"labels": ["a"], "problem": "reward"}}),
        ("evaluation.metrics", {"train.losses": [{"kind": "reward"}], "evaluation.metrics": ["accuracy"]}),
    ],
)
def test_unusable_score_settings_raise(key: str, changes: dict[str, Any], tmp_path: Path) -> None:
    path = pair_config(tmp_path, [{"kind": "dpo"}])
    overrides = [part for name, value in changes.items() for part in (f"--{name}", json.dumps(value))]
    with pytest.raises(UserError, match=rf"(^|: ){key}: "):
        load_config(path, overrides)


def test_resume_with_other_labels_and_generation_with_a_classifier_raise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_scorer(tmp_path / "model", num_labels=3)
    path = pair_config(tmp_path, [classification("single")], labeled_rows("single"), model=of_folder(folder))
    assert main(["train", str(path), "--train.steps", "1"]) == 0
    swapped = classification("single") | {"options": {"labels": LABELS[::-1]}}
    assert main(["train", str(path), "--train.steps", "2", "--train.losses", json.dumps([swapped])]) == 2
    assert "train.losses (labels)" in capsys.readouterr().err
    assert main(["generate", str(folder), "--prompt", "hello"]) == 2
    assert "contains a sequence classification model" in capsys.readouterr().err


def test_unusable_model_for_scores_raises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_scorer(tmp_path / "model", num_labels=2)
    path = pair_config(tmp_path / "run", [{"kind": "reward"}], model=of_folder(folder))
    assert main(["train", str(path)]) == 2
    assert "its scores are LABEL_0, LABEL_1" in capsys.readouterr().err
    assert main(["train", str(path), "--train.losses", "[{kind: dpo}]"]) == 2
    assert "train.losses: the model is a Qwen3ForSequenceClassification" in capsys.readouterr().err
