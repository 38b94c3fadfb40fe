"""Losses as parts: what the config may name, what each computes (against plain torch and Hugging Face, sample by
sample), the same on every layout, and mistakes in one line."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import CHATML, make_tokenizer
from tiny import SHAPE, model_config, read_steps, write_config, write_rows
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from omnizoo.balancing.balancer import Balancer
from omnizoo.balancing.prefetch import next_step
from omnizoo.cli.main import main
from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.config.schema import Config
from omnizoo.config.sections.loss_options import LOSSES
from omnizoo.data.loading.loader import build_loader
from omnizoo.data.rendering.renderer import Renderer
from omnizoo.data.token_fields import IGNORE_INDEX
from omnizoo.models.build import build_model
from omnizoo.models.interfaces import lm_head
from omnizoo.models.read_config import load_tokenizer
from omnizoo.ops.loss.cross_entropy import cross_entropy_sum
from omnizoo.ops.loss.linear_cross_entropy import linear_cross_entropy_sum
from omnizoo.parallel.mesh import build_mesh
from omnizoo.parallel.process import Process, process_group
from omnizoo.parallelize.parallelize import parallelize_model
from omnizoo.training.losses import text
from omnizoo.training.losses.base import KINDS
from omnizoo.training.objective import build_objective
from omnizoo.training.optimizers.build import build_optimizer
from omnizoo.training.step import StepResult, train_step
from omnizoo.verification.trial import full_gradients

ROOT = Path(__file__).parents[3]
MOE = str(ROOT / "examples/qwen3_moe_tiny.yaml")
EXPERTS = {"model_type": "qwen3_moe", **SHAPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CHUNKED = {"kind": "own_losses:Chunked", "name": "text"}


@pytest.fixture(autouse=True)
def own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (ROOT / "tests", ROOT / "examples" / "distill"):
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")


def first_step(config: Config, process: Process) -> tuple[StepResult, dict[str, torch.Tensor], Any]:
    """A step of `config`: its result, whole gradients, and the data it was on."""
    mesh = build_mesh(config, process)
    model = build_model(config.model, config.train.precision)
    parallelize_model(model, mesh, config)
    objective = build_objective(model, mesh, config)
    loader = build_loader(config, load_tokenizer(config.model), mesh.rank, mesh.layout.world)
    data = next_step(loader, Balancer(model, mesh, config))
    model.train()
    weights = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
    result = train_step(objective, build_optimizer(model, config), data, 1)
    return result, full_gradients(model, keep=True), (data, weights)


def one_step(path: Path, *overrides: str) -> tuple[StepResult, dict[str, torch.Tensor], Any]:
    with process_group() as process:
        return first_step(load_config(path, ["--train.grad_clip", "0", *overrides]), process)


# What a loss computes.


def test_cross_entropy_matches_its_formulas() -> None:
    dice = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 11, generator=dice, dtype=torch.float64)
    targets, weights = torch.randint(0, 11, (5,), generator=dice), torch.rand(5, generator=dice, dtype=torch.float64)
    log_p, lse = logits.log_softmax(1), logits.exp().sum(1).log()
    nll = -log_p[torch.arange(5), targets]
    smoothed = 0.9 * nll + 0.1 * -log_p.mean(1)
    for options, each in (
        ({}, nll),
        ({"label_smoothing": 0.1}, smoothed),
        ({"z_loss": 0.3}, nll + 0.3 * lse**2),
        ({"label_smoothing": 0.1, "z_loss": 0.3}, smoothed + 0.3 * lse**2),
    ):
        torch.testing.assert_close(cross_entropy_sum(logits, targets, **options), each.sum())
        torch.testing.assert_close(cross_entropy_sum(logits, targets, weights, **options), (weights * each).sum())
    assert cross_entropy_sum(logits[:0], targets[:0], weights[:0], 0.1, 0.3) == 0


def reference(config: Config, data: Any, smoothing: float, z: float) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the step by Hugging Face's own forward, one sample after the other."""
    step, weights = data
    fields = dict(config.model.config)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    model.load_state_dict(weights, strict=False)
    total, count = torch.zeros(()), 0.0
    for batch in step.micro_batches:
        of_token = batch.columns.get("loss_weights", torch.ones(1, batch.tokens))[0]
        for first, last in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
            ids, labels = batch.columns["input_ids"][:, first:last], batch.columns["labels"][0, first:last]
            logits = model(ids, use_cache=False).logits[0]
            for row, label, weight in zip(logits, labels, of_token[first:last], strict=True):
                if label != IGNORE_INDEX:
                    log_p = row.log_softmax(0)
                    loss = -(1 - smoothing) * log_p[label] - smoothing * log_p.mean() + z * row.logsumexp(0) ** 2
                    total, count = total + weight * loss, count + weight.item()
    loss = total / count
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], within: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= within * gradient.norm(), name


def test_smoothing_and_z_loss_match_transformers(tmp_path: Path) -> None:
    losses = [{"kind": "cross_entropy", "options": {"label_smoothing": 0.1, "z_loss": 0.01}}]
    path = write_config(tmp_path, train={"losses": losses, "packs_per_step": 2})
    result, gradients, data = one_step(path)
    loss, expected = reference(load_config(path, []), data, 0.1, 0.01)
    assert result.loss == result.terms["text"] == pytest.approx(loss, rel=1e-6)
    assert_same(gradients, expected)


# Weights of messages and rows.


def weighted_rows(factor: float = 1.0) -> list[dict[str, Any]]:
    """Chats of four turns whose answers have weights, some by the row; and texts of weight `factor`."""
    rows: list[dict[str, Any]] = []
    for i in range(60):
        weights = [None, (0.25, 2, 0, 1)[i % 4], None, (3, 1, 0.5, 0.125)[i % 4]]
        said = ["question", "Paris is the capital", "and so on?", f"yes {i} and no"]
        roles = ("user", "assistant") * 2
        messages = [
            {"role": role, "content": text} | ({} if weight is None else {"weight": factor * weight})
            for role, text, weight in zip(roles, said, weights, strict=True)
        ]
        rows.append({"messages": messages} | ({"weight": 0.5} if i % 3 == 0 else {}))
        rows.append({"text": f"any number of ranks {i}", "weight": factor})
    return rows


def weighted_config(folder: Path, factor: float = 1.0, **train: Any) -> Path:
    path = write_config(folder, data={"sources": [{"path": str(folder / "rows.jsonl")}]}, train=train)
    write_rows(folder / "rows.jsonl", weighted_rows(factor))
    return path


def test_loss_weights_combine_message_and_row_weights(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    row = weighted_rows()[0]  # 0.25 and 3, in a row of 0.5
    rendered = Renderer(tokenizer, True).render(row)
    weights = rendered.columns["loss_weights"]
    found = {weight: weights == weight for weight in sorted(set(weights.tolist()))}
    texts = {weight: tokenizer.decode(rendered.input_ids[at]) for weight, at in found.items()}
    assert list(texts) == [0, 0.125, 1.5]
    assert texts[0.125] == "Paris is the capital<|im_end|>"
    assert texts[1.5] == "yes 0 and no<|im_end|>"
    assert np.array_equal(rendered.is_target, weights > 0)
    for message in row["messages"]:  # all weights are 1: as if there were none
        message.pop("weight", None)
    assert "loss_weights" not in Renderer(tokenizer, True).render(row | {"weight": 1}).columns
    tagged = CHATML.replace("{{ message['content'] }}", "{% generation %}{{ message['content'] }}{% endgeneration %}")
    both = [{"role": "assistant", "content": "a", "weight": 2}, {"role": "assistant", "content": "b", "weight": 0.5}]
    rendered = Renderer(make_tokenizer(tmp_path, tagged), True).render({"messages": both})
    assert rendered.columns["loss_weights"][rendered.is_target].tolist() == [2, 0.5]


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.01}])
def test_weighted_losses_match_transformers(options: dict[str, float], tmp_path: Path) -> None:
    losses = [{"kind": "cross_entropy", "options": options}]
    path = weighted_config(tmp_path, losses=losses, packs_per_step=4)
    result, gradients, data = one_step(path)
    columns = [batch.columns["loss_weights"] for batch in data[0].micro_batches if "loss_weights" in batch.columns]
    weights = {float(weight) for column in columns for weight in column[0]}
    assert len(weights) > 5
    assert data[0].totals.weight != data[0].totals.targets["text"]
    loss, expected = reference(load_config(path, []), data, *(options.values() or (0, 0)))
    assert result.loss == pytest.approx(loss, rel=1e-6)
    assert_same(gradients, expected)
    # Only what weights are relative to each other matters, also where all of them together are below 1.
    (tmp_path / "less").mkdir()
    less = weighted_config(tmp_path / "less", factor=2.0**-14, losses=losses, packs_per_step=4)
    scaled, same, (step, _) = one_step(less)
    assert 0 < step.totals.weight < 1
    assert scaled.loss == pytest.approx(result.loss, rel=1e-6)
    assert_same(same, gradients)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts",
    [
        "dp2.uly2.ep4",
        pytest.param("rep2.dp2", marks=pytest.mark.long),
        pytest.param("uly2.ring2", marks=pytest.mark.long),
    ],
)
def test_verify_passes_with_weights_of_messages(
    layouts: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = ["--data.sources", f"[{{path: {write_rows(tmp_path / 'rows.jsonl', weighted_rows())}}}]"]
    losses = [
        {"kind": "cross_entropy", "options": {"label_smoothing": 0.1, "z_loss": 0.01}},
        {"kind": "cross_entropy", "options": {"label_smoothing": 0.1, "chunked": True}, "name": "chunks"},
        {"kind": "own_losses:Chunked", "weight": 0.5},
        {"kind": "own_losses:Norm", "weight": 1e-4},
        {"kind": "own_losses:Experts", "weight": 0.01},
        {"kind": "router_z", "weight": 0.01},
    ]
    assert verify(losses, *rows, layouts=layouts) == 0
    assert "1 of 1 layouts of 4 ranks agree with one process (fp32)" in capfd.readouterr().out


# At the head's own place.

CAPPED = {
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": {"final_logit_softcapping": 0.5, "query_pre_attn_scalar": 8},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 3.0},
}


@pytest.mark.parametrize("family", CAPPED)
def test_loss_from_hidden_states_matches_loss_from_logits(family: str, tmp_path: Path) -> None:
    model = {"config": {"model_type": family, **SHAPE, **CAPPED[family]}}
    if family in ("cohere", "granite"):
        del model["config"]["head_dim"]
    path = write_config(tmp_path, model=model, train={"packs_per_step": 2})
    plain, gradients, _ = one_step(path)
    for losses in ([CHUNKED], [{"kind": "cross_entropy", "options": {"chunked": True}}]):
        chunked, at_head, _ = one_step(path, "--train.losses", str(losses))
        assert chunked.loss == pytest.approx(plain.loss, rel=1e-6)
        assert_same(at_head, gradients)
    both, twice, _ = one_step(path, "--train.losses", str([{"kind": "cross_entropy"}, CHUNKED | {"name": "again"}]))
    assert both.terms == {"text": pytest.approx(plain.loss, rel=1e-6), "again": pytest.approx(plain.loss, rel=1e-6)}
    assert_same(twice, {name: 2 * gradient for name, gradient in gradients.items()})


def test_cross_entropy_is_chunked_for_many_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And lets the model make logits where it does more to them than is known."""
    model = {"config": {"model_type": "gemma2", **SHAPE, "final_logit_softcapping": 30.0}}
    path = write_config(tmp_path, model=model, train={"packs_per_step": 2})
    plain, gradients, _ = one_step(path)
    taken: list[int] = []

    def counted(hidden: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        taken.append(len(hidden))
        return linear_cross_entropy_sum(hidden, *rest, **options)

    monkeypatch.setattr(text, "linear_cross_entropy_sum", counted)
    monkeypatch.setattr(text, "max_logits", lambda _: 1)
    chunked, at_head, (data, _) = one_step(path)
    assert sum(taken) == data.totals.targets["text"]
    monkeypatch.setattr(lm_head, "CAPS", ())
    given_way, by_model, _ = one_step(path)
    for result, found in ((chunked, at_head), (given_way, by_model)):
        assert result.loss == pytest.approx(plain.loss, rel=1e-6)
        assert_same(found, gradients)
    with pytest.raises(UserError, match=r"^train\.losses\.0\.kind: .*Gemma2ForCausalLM"):
        one_step(path, "--train.losses", "[{kind: cross_entropy, options: {chunked: true}}]")


def test_unknown_change_of_logits_after_head_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"config": {"model_type": "gemma2", **SHAPE, "final_logit_softcapping": 30.0}}
    path = write_config(tmp_path, model=model, train={"packs_per_step": 2})
    monkeypatch.setattr(lm_head, "CAPS", ())
    with pytest.raises(UserError, match=r"train.losses.0.kind: own_losses:Chunked.* Gemma2ForCausalLM"):
        one_step(path, "--train.losses", str([CHUNKED]))
    own = [
        "--model.module",
        "own_module:TinyModel",
        "--model.config",
        "{vocab_size: 512, width: 32, heads: 4, layers: 2}",
    ]
    with pytest.raises(UserError, match=r"TinyModel .*get_output_embeddings"):
        one_step(path, "--train.losses", str([CHUNKED]), *own)


# On every layout.


def make_teacher(folder: Path, tokenizer: Path) -> Path:
    torch.manual_seed(1)
    fields = model_config("qwen3") | {"hidden_size": 48, "head_dim": 12}
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    model.save_pretrained(folder)
    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
    return folder


def verify(losses: list[dict[str, Any]], *more: str, layouts: str) -> int:
    return main(["verify", MOE, "--world", "4", "--layouts", layouts, "--train.losses", str(losses), *more])


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts",
    [  # those of tests/training/losses/test_preference.py ask a second model, too, on all kinds
        "dp2.uly2.ep4",
        *(pytest.param(layout, marks=pytest.mark.long) for layout in ("rep2.dp2", "uly2.ring2")),
    ],
)
def test_verify_passes_with_distillation(layouts: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    teacher = make_teacher(tmp_path / "teacher", ROOT / "examples/data/tiny/tokenizer")
    distill = {"kind": "distill:Distillation", "weight": 0.5, "options": {"teacher": str(teacher), "temperature": 3.0}}
    losses = [{"kind": "cross_entropy", "weight": 0.5}, distill, {"kind": "balance", "weight": 0.01}]
    assert verify(losses, layouts=layouts) == 0
    assert "1 of 1 layouts of 4 ranks agree with one process (fp32)" in capfd.readouterr().out


def test_distillation_lowers_the_loss(tmp_path: Path) -> None:
    assert len((ROOT / "examples/distill/distill.py").read_text().splitlines()) < 80
    path = write_config(tmp_path, train={"steps": 25, "lr": 1e-2}, evaluation={"every": 25, "packs": 2})
    teacher = make_teacher(tmp_path / "teacher", tmp_path / "tokenizer")
    distill = {"kind": "distill:Distillation", "options": {"teacher": str(teacher)}}
    held_out = ["--data.eval_sources", f"[{{path: {tmp_path / 'chats.jsonl'}}}]"]
    assert main(["train", str(path), "--train.losses", str([distill]), *held_out]) == 0
    steps = read_steps(tmp_path / "run")
    assert {key for key in steps[-1] if "loss/" in key} == {"loss/distillation", "eval/loss/distillation"}
    assert steps[-1]["loss"] == steps[-1]["loss/distillation"] < 0.7 * steps[0]["loss"]
    assert steps[-1]["eval/loss/distillation"] == steps[-1]["eval/loss"]


# The config.


def test_default_loss_is_cross_entropy(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path), [])
    assert [(loss.kind, loss.label, loss.weight) for loss in config.train.losses] == [("cross_entropy", "text", 1.0)]
    assert KINDS.keys() == LOSSES.keys()


def test_router_loss_without_routers_is_ignored_with_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_config(tmp_path, train={"packs_per_step": 2})
    result, _, _ = one_step(path, "--train.losses", "[{kind: cross_entropy}, {kind: balance}]")
    assert result.terms.keys() == {"text"}
    assert "train.losses.1.kind: balance is not used" in caplog.text


LINES = {
    "{kind: cross_entropi}": "train.losses.0.kind: 'cross_entropi' is not a built-in loss (cross_entropy, balance, "
    "router_z, ",
    "{kind: cross_entropy}, {kind: cross_entropy}": "train.losses.1 (cross_entropy): the name 'text'",
    "{options: {label_smoothing: 1}}": "train.losses.0.options.label_smoothing is 1; expected number >= 0, < 1",
    "{options: {smoothing: 0.1}}": "train.losses.0.options.smoothing: unknown option of cross_entropy",
    "{kind: balance, options: {a: 1}}": "train.losses.0.options.a: unknown option of balance; options: none",
    "{name: a/b}": "train.losses.0.name: 'a/b'",
    "{kind: balance}": "train.losses: no loss applies",
    "": "train.losses: no loss applies",
    "{kind: 'own_losses:Nothing'}": "train.losses.0.kind: cannot import own_losses:Nothing",
    "{kind: 'own_losses:NotALoss'}": "own_losses:NotALoss is not a subclass of omnizoo.training.losses.base.Loss",
    "{kind: 'own_losses:SeesNothing'}": "train.losses.0.kind: own_losses:SeesNothing has none of the methods",
    "{kind: 'own_losses:SeesTwice'}": "train.losses.0.kind: own_losses:SeesTwice has from_logits and from_hidden",
    "{kind: 'own_losses:NoBatch'}": "train.losses.0.kind: own_losses:NoBatch.from_logits(logits)",
    "{kind: 'own_losses:NeedsMore'}": "train.losses.0.options: own_losses:NeedsMore(teacher)",
    "{kind: 'own_losses:NeedsMore', options: {teachers: a}}": "did you mean teacher?",
    "{kind: 'own_losses:Refuses'}": "train.losses.0.options: own_losses:Refuses raised ValueError: rate",
    "{kind: 'own_losses:NoTotals'}": "train.losses.0.kind: own_losses:NoTotals.count()",
    "{kind: 'own_losses:CountedInForward'}": "own_losses:CountedInForward: count(totals) raised AttributeError",
    "{kind: 'own_losses:CountsTensors'}": "own_losses:CountsTensors: count(totals) returned a Tensor",
    "{kind: 'own_losses:CountsDown'}": "own_losses:CountsDown: count(totals) returned -1",
    "{kind: 'own_losses:CountsNothing'}": "own_losses:CountsNothing: count(totals) returned a NoneType",
    "{kind: 'own_losses:NotANumber'}": "own_losses:NotANumber: count(totals) returned nan",
    "{kind: 'own_losses:PerToken'}": "own_losses:PerToken: from_logits returned a tensor [",
    "{kind: 'own_losses:PlainNumber'}": "own_losses:PlainNumber: from_logits returned a float",
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("small"), train={"steps": 1, "packs_per_step": 1})


@pytest.mark.parametrize("losses", LINES)
def test_invalid_loss_prints_one_line(
    losses: str, small: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(small), f"--train.losses=[{losses}]", "--log.dir", str(tmp_path / "run")]) == 2
    error = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    assert LINES[losses] in error[0]
