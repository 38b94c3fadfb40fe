"""Shared pieces of training/losses/test_preference.py and other tests."""

import random
from pathlib import Path
from typing import Any

import torch
from fixtures import TEXT, make_tokenizer
from tiny import model_config, write_config, write_rows
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from omnizoo.balancing.balancer import Balancer
from omnizoo.balancing.prefetch import next_step
from omnizoo.config.load import load_config
from omnizoo.data.loading.loader import build_loader
from omnizoo.models.build import build_model
from omnizoo.models.media.model_inputs import read_modalities
from omnizoo.models.read_config import load_tokenizer
from omnizoo.parallel.mesh import build_mesh
from omnizoo.parallel.process import process_group
from omnizoo.parallelize.parallelize import parallelize_model
from omnizoo.training.losses.preference import ORPO, PairLoss, SimPO
from omnizoo.training.objective import build_objective
from omnizoo.training.optimizers.build import build_optimizer
from omnizoo.training.step import train_step
from omnizoo.verification.trial import full_gradients

USER = {"role": "user", "content": "question"}


# What a loss computes.


def published(kind: PairLoss, c: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """By the formulas of the papers; `c` and `r` are what the answers are compared by."""
    if isinstance(kind, SimPO):
        return -torch.log(torch.sigmoid(kind.beta * c - kind.beta * r - kind.gamma))
    if isinstance(kind, ORPO):
        odds = [p.exp() / (1 - p.exp()) for p in (c, r)]
        return -c - kind.beta * torch.log(torch.sigmoid(torch.log(odds[0] / odds[1])))
    h = c - r
    if kind.loss == "ipo":
        return (h - 1 / (2 * kind.beta)) ** 2
    if kind.loss == "hinge":
        return torch.clamp(1 - kind.beta * h, min=0)
    smoothing = kind.label_smoothing
    right, wrong = torch.sigmoid(kind.beta * h), torch.sigmoid(-kind.beta * h)
    return -(1 - smoothing) * torch.log(right) - smoothing * torch.log(wrong)


# Packs of pairs, one process.


def pair_rows(count: int = 60) -> list[dict[str, Any]]:
    """Pairs of every form, and of many lengths."""
    dice, words = random.Random(0), TEXT.split()

    def say() -> str:
        return " ".join(dice.choices(words, k=dice.randint(1, 5)))

    rows: list[dict[str, Any]] = []
    for i in range(count // 3):
        asked, turns = (
            [{"role": "user", "content": say()}],
            [{"role": "assistant", "content": f"{end} {say()}"} for end in "ab"],
        )
        rows += [
            {"prompt": say(), "chosen": f" {say()} {i}", "rejected": f" {say()}"},
            {"messages": asked, "chosen": f"{say()} {i}", "rejected": say()},
            {
                "chosen": [*asked, turns[0], *asked, {"role": "assistant", "content": f"{i}"}],
                "rejected": [*asked, turns[1]],
            },
        ]
    return rows


def single_rows(count: int) -> list[dict[str, Any]]:
    dice, words = random.Random(1), TEXT.split()
    rows: list[dict[str, Any]] = []
    for i in range(count):
        asked, said = (" ".join(dice.choices(words, k=dice.randint(1, 5))) for _ in range(2))
        if i % 2:
            rows.append({"prompt": f"{i} {asked}", "completion": f" {said}", "label": i % 3 > 0})
        else:
            rows.append({"messages": [USER | {"content": asked}], "completion": said, "label": i % 3 > 0})
    return rows


def pair_config(
    folder: Path, losses: list[dict[str, Any]], rows: list[dict[str, Any]] | None = None, **more: Any
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    source = write_rows(folder / "pairs.jsonl", rows or pair_rows())
    train = {"packs_per_step": 4, "grad_clip": 0.0, "losses": losses}
    data = {"sources": [{"path": str(source)}], "pack_tokens": 128, "workers": 0}
    return write_config(folder, data=data, train=train, **more)


def make_folder(folder: Path, seed: int) -> Path:
    """A model with random weights, as Hugging Face saves it."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**model_config("qwen3")))
    for parameter in model.parameters():
        if parameter.ndim > 1:  # large enough that models differ in what they predict
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def make_scorer(folder: Path, num_labels: int = 1) -> Path:
    """A sequence classification model with random weights, as Hugging Face saves it."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer(folder)
    shape = model_config("qwen3") | {"num_labels": num_labels, "pad_token_id": tokenizer.pad_token_id}
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**shape))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    return folder


def one_step(path: Path, *overrides: str) -> tuple[Any, dict[str, torch.Tensor], Any]:
    """A step: its result, whole gradients, and its data."""
    with process_group() as process:
        config = load_config(path, list(overrides))
        mesh = build_mesh(config, process)
        model = build_model(config.model, config.train.precision)
        media = read_modalities(model, config.model)
        parallelize_model(model, mesh, config)
        objective = build_objective(model, mesh, config)
        data = next_step(
            build_loader(config, load_tokenizer(config.model), 0, 1, **media), Balancer(model, mesh, config)
        )
        model.train()
        result = train_step(objective, build_optimizer(model, config), data, 1)
        return result, full_gradients(model, keep=True), data


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


# On every layout.

KINDS_AT_ONCE = [
    {"kind": "dpo"},
    {"kind": "dpo", "weight": 0.1, "options": {"loss": "ipo", "chunked": True}, "name": "ipo"},
    {"kind": "simpo", "weight": 0.5},
    {"kind": "orpo", "weight": 0.5},
    {"kind": "cross_entropy", "weight": 0.1},
    {"kind": "balance", "weight": 0.01},
]
