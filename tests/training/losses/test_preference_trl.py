"""Preference tuning against TRL: its trainers and ours, on the same tiny model, the same rows in the same order."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from fixtures import CHATML, TEXT, make_tokenizer
from preference_cases import make_folder, make_scorer, pair_config
from tiny import read_steps
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from omnizoo.cli.main import main
from omnizoo.config.load import load_config
from omnizoo.data.loading.loader import build_loader
from omnizoo.data.loading.row_order import other_rows
from omnizoo.models.read_config import load_tokenizer

STEPS, LR = 10, 1e-3


def rows_of(kind: str) -> list[dict[str, Any]]:
    """Pairs of many lengths: of plain texts, or of chats with one turn or two."""
    dice, words = random.Random(0), TEXT.split()

    def say(role: str) -> Any:
        text = " ".join(dice.choices(words, k=dice.randint(1, 6)))
        if kind == "texts":
            return text if role == "user" else f" {text}"
        return {"role": role, "content": text}

    if kind == "texts":
        return [
            {"prompt": say("user"), "chosen": say("assistant"), "rejected": say("assistant") + " no"} for _ in range(80)
        ]
    rows = []
    for number in range(80):
        prompt = [say("user")] if number % 2 else [say("user"), say("assistant"), say("user")]
        rows.append({"prompt": prompt, "chosen": [say("assistant")], "rejected": [say("assistant")]})
        rows[-1]["rejected"][0]["content"] += " no"
    return rows


def ours(
    folder: Path, model: Path, loss: dict[str, Any], rows: list[dict[str, Any]]
) -> tuple[list[Any], list[list[str]]]:
    """The metrics of each step, and the names of its samples."""
    path = pair_config(
        folder,
        [loss],
        rows,
        model={"path": str(model), "config": None, "tokenizer": None},
        optimizer={"weight_decay": 0.0},
    )
    overrides = ["--train.steps", str(STEPS), "--train.lr", str(LR), "--train.schedule", "constant"]
    overrides += ["--train.warmup_steps", "0"]
    assert main(["train", str(path), *overrides]) == 0
    config = load_config(path, overrides)
    loader = build_loader(config, load_tokenizer(config.model), 0, 1)
    seen = []
    for _ in range(STEPS):
        seen.append([name for pack in loader.next_step().packs for name in pack.sample_ids])
    return read_steps(folder / "run"), seen


def row_of(name: str) -> int:
    return int(name.split("/")[2])


def theirs(trainer: type, config: type, folder: Path, rows: Any, order: list[list[int]], **options: Any) -> list[Any]:
    """The metrics of each step of a trainer of TRL's."""
    options |= {"max_length": None, "report_to": "none", "logging_steps": 1, "save_strategy": "no"}
    options |= {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "remove_unused_columns": False}
    options |= {"learning_rate": LR, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "weight_decay": 0.0}
    options |= {"adam_beta2": 0.95, "max_steps": len(order), "disable_tqdm": True, "output_dir": str(folder / "trl")}

    class InOrder(trainer):  # type: ignore[misc] # one or the other
        def get_train_dataloader(self) -> Any:
            return DataLoader(self.train_dataset, batch_sampler=order, collate_fn=self.data_collator)

    if trainer is trl.RewardTrainer:
        models = [AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)]
    else:
        models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2)]
        options["beta"] = 0.3
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    data = Dataset.from_list(rows)
    running = InOrder(*models, args=config(**options), train_dataset=data, processing_class=tokenizer)
    running.train()
    return [entry for entry in running.state.log_history if "loss" in entry]


# TRL counts what a template writes after the end of a turn to the answer: here it writes nothing.
TEMPLATE = CHATML.replace("<|im_end|>\n", "<|im_end|>")


@pytest.mark.parametrize(("loss", "kind"), [("sigmoid", "chats"), ("ipo", "texts"), ("hinge", "texts")])
def test_dpo_matches_trl_over_ten_steps(loss: str, kind: str, tmp_path: Path) -> None:
    model = make_folder(tmp_path / "model", 0)
    make_tokenizer(model, TEMPLATE)
    rows = rows_of(kind)
    options = {"beta": 0.3, "loss": loss, "reference": str(model)}
    own, names = ours(tmp_path / "ours", model, {"kind": "dpo", "options": options}, rows)
    order = [[row_of(name) for name in step[::2]] for step in names]
    assert all(len(numbers) > 4 for numbers in order)
    other = theirs(trl.DPOTrainer, trl.DPOConfig, model, rows, order, loss_type=[loss])
    assert len(own) == len(other) == STEPS
    for step, expected in zip(own, other, strict=True):
        assert step["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-5)
        if loss != "ipo":  # its rewards are of means over tokens here, and of sums there
            for name in ("rewards/chosen", "rewards/rejected"):
                assert step[f"loss/dpo/{name}"] == pytest.approx(expected[name], abs=1e-5)
    assert abs(own[-1]["loss/dpo/margin"]) > 0.1


def test_reference_free_dpo_matches_trl_with_zero_reference_log_probabilities(tmp_path: Path) -> None:
    model = make_folder(tmp_path / "model", 0)
    make_tokenizer(model, TEMPLATE)
    rows = rows_of("texts")
    loss = {"kind": "dpo", "options": {"beta": 0.3, "reference_free": True}}
    own, names = ours(tmp_path / "ours", model, loss, rows)

    class WithoutReference(trl.DPOTrainer):
        def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
            zeros = [0.0] * len(dataset)
            return dataset.add_column("ref_chosen_logps", zeros).add_column("ref_rejected_logps", zeros)

    order = [[row_of(name) for name in step[::2]] for step in names]
    other = theirs(WithoutReference, trl.DPOConfig, model, rows, order, precompute_ref_log_probs=True)
    assert len(own) == len(other) == STEPS
    for step, expected in zip(own, other, strict=True):
        assert step["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-5)
        for name in ("rewards/chosen", "rewards/rejected"):
            assert step[f"loss/dpo/{name}"] == pytest.approx(expected[name], rel=1e-5)


def test_reward_training_matches_trl_over_ten_steps(tmp_path: Path) -> None:
    model = make_scorer(tmp_path / "model")
    dice = random.Random(2)
    rows = [row | {"margin": round(dice.uniform(0, 1), 2)} for row in rows_of("chats")]
    own, names = ours(tmp_path / "ours", model, {"kind": "reward", "options": {"centering": 0.05}}, rows)
    order = [[row_of(name) for name in step[::2]] for step in names]
    options = {"center_rewards_coefficient": 0.05, "disable_dropout": False}
    other = theirs(trl.RewardTrainer, trl.RewardConfig, model, rows, order, **options)
    assert len(own) == len(other) == STEPS
    for step, expected in zip(own, other, strict=True):
        assert step["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-5)
        for name in ("margin", "accuracy"):
            assert step[f"loss/reward/{name}"] == pytest.approx(expected[name], abs=1e-5)
    assert abs(own[-1]["loss/reward/margin"]) > 0.1


def single_rows() -> list[dict[str, Any]]:
    """Answers with a label."""
    dice = random.Random(1)
    return [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": dice.random() < 0.6} for row in rows_of("chats")
    ]


@pytest.mark.parametrize("baseline", ["kl", "zero"])
def test_kto_matches_trl_over_ten_steps(baseline: str, tmp_path: Path) -> None:
    model = make_folder(tmp_path / "model", 0)
    make_tokenizer(model, TEMPLATE)
    rows = single_rows()
    weights = {"desirable_weight": 1.3, "undesirable_weight": 0.8}
    options = {"beta": 0.3, "baseline": baseline, "reference": str(model), **weights}
    own, names = ours(tmp_path / "ours", model, {"kind": "kto", "options": options}, rows)
    order = [[row_of(name) for name in step if not name.endswith("/mismatched")] for step in names]

    class WithOurs(trl.KTOTrainer):
        """TRL takes the answer of the row before, and a batch is fixed: give it the rows that ours took."""

        def _prepare_dataset(self, *given: Any) -> Any:
            dataset = super()._prepare_dataset(*given)
            answers = dataset["completion_ids"]
            others = [answers[other_row(rows, number)] for number in range(len(rows))]
            return dataset.remove_columns("KL_completion_ids").add_column("KL_completion_ids", others)

    kind = {"kl": "kto", "zero": "apo_zero_unpaired"}[baseline]
    trainer = WithOurs if baseline == "kl" else trl.KTOTrainer
    other = theirs(trainer, trl.KTOConfig, model, rows, order, loss_type=kind, **weights)
    assert len(own) == len(other) == STEPS
    for step, expected in zip(own, other, strict=True):
        assert step["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-5)
        for name, theirs_ in (("rewards/desirable", "rewards/chosen"), ("rewards/undesirable", "rewards/rejected")):
            assert step[f"loss/kto/{name}"] == pytest.approx(expected[theirs_], abs=1e-5)
        assert step["loss/kto/kl"] == pytest.approx(expected["kl"], abs=1e-5)
    assert (max(step["loss/kto/kl"] for step in own) > 0.01) == (baseline == "kl")


def other_row(rows: list[dict[str, Any]], number: int) -> int:
    return next(other for other in other_rows(number, len(rows)) if rows[other]["prompt"] != rows[number]["prompt"])
