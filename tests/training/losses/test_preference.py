"""Preference pairs: rows, packs and losses, against the published formulas, transformers' own forward one answer at a
time, and one process."""

import json
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fixtures import make_tokenizer
from omni import SENSOR, make_media, write_omni_config
from PIL import Image
from preference_cases import (
    KINDS_AT_ONCE,
    USER,
    assert_same,
    make_folder,
    one_step,
    pair_config,
    pair_rows,
    published,
    single_rows,
)
from tiny import read_steps, write_rows
from transformers import AutoModelForCausalLM

from omnizoo.balancing.redistribute import redistribute
from omnizoo.cli.main import main
from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.data.loading.prepare import prepare_pack
from omnizoo.data.loading.reader import build_reader
from omnizoo.data.packing.overlong import split
from omnizoo.data.rendering.renderer import Renderer
from omnizoo.data.row import BadRow
from omnizoo.data.rows.preferences import ResponseRow, response_rows
from omnizoo.data.sample import Preferences
from omnizoo.data.token_fields import IGNORE_INDEX
from omnizoo.models.build import build_model
from omnizoo.models.media.hf_model import media_model
from omnizoo.models.media.model_inputs import read_modalities
from omnizoo.models.read_config import load_tokenizer
from omnizoo.parallel.mesh import build_mesh
from omnizoo.parallel.process import process_group
from omnizoo.parallelize.parallelize import parallelize_model
from omnizoo.training.local_batch import LocalBatch, localize, run_model
from omnizoo.training.losses.base import KINDS
from omnizoo.training.losses.kto import KTO
from omnizoo.training.losses.preference import DPO, ORPO, PairLoss, SimPO
from omnizoo.verification.compare import gradient_differences, verdict_of
from omnizoo.verification.prepare import prepare
from omnizoo.verification.trial import full_gradients

ROOT = Path(__file__).parents[3]
YES, NO = ({"role": "assistant", "content": content} for content in ("yes", "no"))


LOSSES = [
    DPO(),
    DPO(beta=0.5, label_smoothing=0.2),
    DPO(beta=0.3, length_normalized=True),
    DPO(loss="ipo"),
    DPO(loss="ipo", length_normalized=False),
    DPO(beta=0.7, loss="hinge"),
    SimPO(),
    SimPO(beta=3.0, gamma=0.2),
    ORPO(),
    ORPO(beta=0.8),
]


def batch_of(roles: list[str], sample: torch.Tensor, targets: torch.Tensor) -> LocalBatch:
    """A micro-batch of targets alone, by the sample of each; and the roles of samples."""
    return LocalBatch(
        {"logits_to_keep": torch.arange(len(sample))},
        {"labels": targets, "sample_of_token": sample},
        num_packs=1,
        num_samples=len(roles),
        preferences=Preferences(roles, [""] * len(roles)),
        samples_by_role={
            role: torch.tensor([i for i, other in enumerate(roles) if other == role]) for role in set(roles)
        },
    )


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_pair_losses_match_published_formulas(loss: PairLoss) -> None:
    dice = torch.Generator().manual_seed(0)
    lengths = [3, 5, 4, 2, 6, 1]  # samples 1 and 2 are a pair, and so are 3 and 4
    sample = torch.arange(6).repeat_interleave(torch.tensor(lengths))
    logits = torch.randn(len(sample), 11, generator=dice, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 11, (len(sample),), generator=dice)
    reference = torch.randn(len(sample), generator=dice, dtype=torch.float64)
    loss.num_sharing, loss.sum_over_sp = 1, lambda tensor: tensor
    if isinstance(loss, DPO):
        loss.reference_scores = torch.stack([part.sum() for part in reference.split(lengths)])
    batch = batch_of(["", "chosen", "rejected", "chosen", "rejected", ""], sample, targets)
    found = loss.from_logits(logits, batch)
    (gradient,) = torch.autograd.grad(found, logits)

    each = torch.log_softmax(logits, 1)[torch.arange(len(sample)), targets]
    each = each - reference if isinstance(loss, DPO) else each
    per_sample = torch.stack([part.mean() if loss.is_normalized else part.sum() for part in each.split(lengths)])
    chosen, rejected = per_sample[[1, 3]], per_sample[[2, 4]]
    expected = published(loss, chosen, rejected).sum()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0], rtol=1e-10, atol=1e-14)
    rewards = [loss.beta * side.sum() for side in (chosen, rejected)]
    for name, value in zip(loss.metrics, (*rewards, rewards[0] - rewards[1]), strict=False):
        torch.testing.assert_close(loss.metric_sums[name], value.detach())
    assert loss.metric_sums["accuracy"] == (chosen > rejected).sum()


@pytest.mark.parametrize("kl", [0.0, 0.7])
def test_kto_matches_published_formula(kl: float) -> None:
    dice = torch.Generator().manual_seed(0)
    lengths = [3, 5, 4, 2]
    sample = torch.arange(4).repeat_interleave(torch.tensor(lengths))
    each = torch.randn(len(sample), generator=dice, dtype=torch.float64, requires_grad=True)
    loss = KTO(beta=0.4, desirable_weight=1.5, undesirable_weight=0.5)
    loss.num_sharing, loss.sum_over_sp, loss.kl = 1, lambda tensor: tensor, torch.tensor(kl, dtype=torch.float64)
    loss.reference_scores = torch.randn(4, generator=dice, dtype=torch.float64)
    roles = ["undesirable", "desirable", "", "undesirable"]  # sample 2 is no answer
    found = loss.loss_of_tokens(each, batch_of(roles, sample, sample))
    rewards = [part.sum() - other for part, other in zip(each.split(lengths), loss.reference_scores, strict=True)]
    value = {1: 1.5 * torch.sigmoid(0.4 * (rewards[1] - kl))} | {
        i: 0.5 * torch.sigmoid(0.4 * (kl - rewards[i])) for i in (0, 3)
    }
    expected = sum((0.5 if i != 1 else 1.5) - v for i, v in value.items())  # lambda - value, formula 8 of the paper
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(total, each)[0] for total in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-14)
    assert loss.metric_sums["rewards/desirable"] == pytest.approx(0.4 * rewards[1].item())
    assert loss.metric_sums["rewards/undesirable"] == pytest.approx(0.4 * (rewards[0] + rewards[3]).item())
    assert loss.metric_sums["kl"] == pytest.approx(3 * kl)


def answers_of(model: Any, data: Any) -> list[tuple[torch.Tensor, int]]:
    """Log-probability and length of each answer, by transformers' own forward, one sample after the other."""
    found = []
    for batch in data.micro_batches:
        for first, last in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
            labels = batch.columns["labels"][0, first:last]
            is_answer = labels != IGNORE_INDEX
            logits = model(batch.columns["input_ids"][:, first:last], use_cache=False).logits[0]
            each = -F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
            found.append((each[is_answer].sum(), int(is_answer.sum())))
    return found


def test_packed_pairs_match_transformers_on_single_responses(tmp_path: Path) -> None:
    policy, reference = (make_folder(tmp_path / name, seed) for name, seed in (("policy", 0), ("reference", 1)))
    options = {"beta": 0.3, "reference": str(reference)}
    losses = [{"kind": "dpo", "options": options}, {"kind": "cross_entropy", "weight": 0.5}]
    path = pair_config(tmp_path / "run", losses, model={"path": str(policy), "config": None, "tokenizer": None})
    result, gradients, data = one_step(path)

    model, frozen = (AutoModelForCausalLM.from_pretrained(folder) for folder in (policy, reference))
    own = answers_of(model, data)
    with torch.no_grad():
        other = answers_of(frozen, data)
    assert len(own) == 2 * data.totals.pairs > 8
    names = [name for batch in data.micro_batches for name in batch.sample_ids]
    assert [name.rpartition("/")[2] for name in names] == ["chosen", "rejected"] * data.totals.pairs
    assert all(a.rpartition("/")[0] == b.rpartition("/")[0] for a, b in zip(names[::2], names[1::2], strict=True))
    margins = [0.3 * ((own[i][0] - other[i][0]) - (own[i + 1][0] - other[i + 1][0])) for i in range(0, len(own), 2)]
    dpo = -torch.stack([F.logsigmoid(margin) for margin in margins]).mean()
    text = -torch.stack([value for value, _ in own[::2]]).sum() / sum(count for _, count in own[::2])
    (dpo + 0.5 * text).backward()
    assert result.terms["dpo"] == pytest.approx(dpo.item(), rel=1e-6)
    assert result.terms["text"] == pytest.approx(text.item(), rel=1e-6)  # of chosen answers only
    assert result.terms["dpo/margin"] == pytest.approx(torch.stack(margins).mean().item(), abs=1e-5)
    assert max(map(abs, margins)) > 0.5
    assert result.terms["dpo/accuracy"] == pytest.approx(sum(m > 0 for m in margins).item() / len(margins))
    assert_same(gradients, {name: p.grad for name, p in model.named_parameters()})

    losses[0]["options"]["chunked"] = True
    chunked, at_head, _ = one_step(path, "--train.losses", json.dumps(losses))
    assert chunked.loss == pytest.approx(result.loss, rel=1e-6)
    assert_same(at_head, gradients)


def test_reference_of_an_adapter_is_its_base(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "base", 0)
    adapter = {"rank": 4, "alpha": 16.0, "init": "random", "targets": ["all-linear", "embed_tokens"], "dropout": 0.0}
    model = {"path": str(folder), "config": None, "tokenizer": None, "adapter": adapter}
    path = pair_config(tmp_path / "run", [{"kind": "dpo"}], model=model)
    off, gradients, _ = one_step(path)
    copy, same, _ = one_step(path, "--train.losses", f"[{{kind: dpo, options: {{reference: {folder}}}}}]")
    assert off.loss == pytest.approx(copy.loss, rel=1e-6)
    assert abs(off.terms["dpo/margin"]) > 1e-3
    assert_same(gradients, same)


def test_dpo_run_resumes_exactly_and_learns_preferences(tmp_path: Path) -> None:
    rows = [
        {"messages": [USER | {"content": f"question {i}"}], "chosen": "yes", "rejected": "no, maybe"} for i in range(40)
    ]
    path = pair_config(tmp_path, [{"kind": "dpo"}], rows, checkpoint={"every": 4, "keep": 3})
    overrides = ["--train.steps", "8", "--train.lr", "3e-3", "--data.workers", "0"]
    assert main(["train", str(path), *overrides]) == 0
    steps = read_steps(tmp_path / "run")
    assert steps[0]["loss"] == pytest.approx(0.693147, rel=1e-5)  # the reference is the model as it begins
    assert steps[-1]["loss/dpo/accuracy"] == 1
    assert steps[-1]["loss/dpo/rewards/chosen"] > steps[-1]["loss/dpo/rewards/rejected"]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000008", ignore_errors=False)
    assert main(["train", str(path), *overrides]) == 0
    again = read_steps(tmp_path / "run")
    figures = ("step", "loss", "grad_norm", "tokens", "loss/dpo/margin")
    assert [[step[name] for name in figures] for step in again] == [[step[name] for name in figures] for step in steps]


def test_kto_and_pair_runs_resume_exactly_and_evaluate(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    for i in range(40):
        asked = [USER | {"content": f"question {i}"}]
        rows += [
            {"prompt": asked, "completion": [YES], "label": True},
            {"messages": asked, "completion": "no, maybe", "label": False},
            {"messages": [USER | {"content": f"what {i}"}], "chosen": "yes", "rejected": "no, maybe"},
        ]
    loss = {"kind": "kto", "options": {"beta": 0.5, "undesirable_weight": 0.1}}
    path = pair_config(tmp_path, [loss], rows, checkpoint={"every": 4, "keep": 3})
    overrides = ["--train.steps", "8", "--train.lr", "3e-3", "--evaluation.every", "8", "--evaluation.packs", "4"]
    overrides += ["--data.eval_sources", f"[{{path: {tmp_path / 'pairs.jsonl'}}}]"]
    assert main(["train", str(path), *overrides]) == 0
    steps = read_steps(tmp_path / "run")
    first, last = steps[0], steps[-1]
    assert first["loss"] == pytest.approx((0.5 + 0.5 * 0.1) / 2, rel=0.2)  # the reference is the model as it begins
    assert first["loss/kto/kl"] == pytest.approx(0, abs=1e-6)
    assert last["loss/kto/kl"] >= 0
    assert last["eval/loss/kto/kl"] >= 0
    assert last["eval/loss/kto/rewards/desirable"] > last["eval/loss/kto/rewards/undesirable"]
    assert last["eval/loss"] < first["loss"]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000008", ignore_errors=False)
    assert main(["train", str(path), *overrides]) == 0
    figures = ("step", "loss", "grad_norm", "tokens", "loss/kto/kl", "loss/kto/rewards/desirable")
    again = read_steps(tmp_path / "run")
    assert [[step[name] for name in figures] for step in again] == [[step[name] for name in figures] for step in steps]


def test_kto_baseline_pairs_each_prompt_with_another_response(tmp_path: Path) -> None:
    path = pair_config(tmp_path, [{"kind": "kto"}], pair_rows(30) + single_rows(30))
    result, _, data = one_step(path, "--data.pack_tokens", "256")
    seen = [(name, batch) for batch in data.micro_batches for name in batch.sample_ids]
    others = [(name, batch) for batch in data.kto_baseline.micro_batches for name in batch.sample_ids]
    roles = [name.rpartition("/")[2] for name, _ in seen]
    assert {"desirable", "undesirable"} == set(roles)
    assert roles.count("desirable") == data.totals.desirable > 4
    assert roles.count("undesirable") == data.totals.undesirable > 4
    assert {name.rpartition("/")[2] for name, _ in others} == {"mismatched"}
    assert len(others) == data.kto_baseline.totals.mismatched > 4
    assert {name.rpartition("/")[0] for name, _ in seen} == {name.rpartition("/")[0] for name, _ in others}
    assert data.totals.mismatched == data.kto_baseline.totals.desirable == 0
    assert result.terms.keys() == {"kto", *(f"kto/{name}" for name in KTO.metrics)}


PAIRS = ["--data.sources", f"[{{path: {ROOT / 'examples/data/tiny/preferences.jsonl'}}}]", "--data.pack_tokens", "160"]


def verify(config: str, losses: list[dict[str, Any]], layouts: str) -> int:
    path = str(ROOT / "examples" / config)
    return main(["verify", path, "--world", "4", "--layouts", layouts, "--train.losses", json.dumps(losses), *PAIRS])


def on_layouts(*first: str) -> pytest.MarkDecorator:
    """On these: all kinds of layouts, for the tests below together. In `make verify-all` on the others, too."""
    others = [layout for layout in ("rep2.dp2", "uly2.ring2", "dp2.uly2.ep4") if layout not in first]
    return pytest.mark.parametrize("layouts", [",".join(first), pytest.param(",".join(others), marks=pytest.mark.long)])


def all_agree(layouts: str, capfd: pytest.CaptureFixture[str]) -> bool:
    count = len(layouts.split(","))
    return f"{count} of {count} layouts of 4 ranks agree with one process (fp32)" in capfd.readouterr().out


@pytest.mark.slow
@on_layouts("uly2.ring2")
def test_verify_passes_with_pairs_and_adapter_base(layouts: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert verify("lora_tiny.yaml", KINDS_AT_ONCE, layouts) == 0
    assert all_agree(layouts, capfd)


@pytest.mark.slow
@on_layouts("dp2.uly2.ep4")
def test_verify_passes_with_pairs_and_frozen_copy(layouts: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert verify("qwen3_moe_tiny.yaml", [{"kind": "dpo"}], layouts) == 0
    assert all_agree(layouts, capfd)


@pytest.mark.slow
@on_layouts("rep2.dp2")
def test_verify_passes_with_labeled_responses_and_kto_baseline(layouts: str, capfd: pytest.CaptureFixture[str]) -> None:
    losses = [{"kind": "kto", "options": {"beta": 0.5}}, {"kind": "cross_entropy", "weight": 0.1}]
    assert verify("lora_tiny.yaml", losses, layouts) == 0
    assert all_agree(layouts, capfd)


# Media in the prompt.


@pytest.fixture
def omni(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A composed model, on pairs with up to two items of any modality in their prompts."""
    monkeypatch.syspath_prepend(str(SENSOR))
    monkeypatch.setenv("PYTHONPATH", str(SENSOR), prepend=":")
    dice = random.Random(0)
    media = make_media(tmp_path / "pairs" / "media", dice)
    rows = []
    for number in range(60):
        names = dice.choices(list(media), k=number % 3)
        asked = [{"type": name, name: dice.choice(media[name])} for name in names]
        message = {"role": "user", "content": [*asked, {"type": "text", "text": f"question {number}"}]}
        rows.append({"messages": [message], "chosen": "yes", "rejected": f"no {number}"})
    source = write_rows(tmp_path / "pairs" / "rows.jsonl", rows)
    losses = [{"kind": "dpo"}, {"kind": "cross_entropy", "weight": 0.2}]
    data = {"sources": [{"path": str(source)}], "pack_tokens": 240}
    return write_omni_config(tmp_path, data=data, train={"losses": losses})


def test_prompt_media_are_encoded_once_for_both_responses(omni: Path) -> None:
    with process_group() as process:
        config = load_config(omni, [])
        mesh = build_mesh(config, process)
        model = build_model(config.model, "fp32")
        reader = build_reader(config, load_tokenizer(config.model), **read_modalities(model, config.model))
        parallelize_model(model, mesh, config)
        media, source = media_model(model), reader.sources[0]
        pairs, apart = [], []
        for row in range(12):
            found = partial(source.find, row)
            pairs.append(reader.renderer.render(source.read(row), (0, 0, row), found))
            for side in response_rows(source.read(row)):
                plain = ResponseRow("", side.row)
                apart.append(reader.renderer._render_response(plain, (0, 0, row), found, found))
        outputs, gradients = [], []
        for rendered in (pairs, apart):
            samples = [sample for i, r in enumerate(rendered) for sample in split(0, 0, i, r, 240)]
            flat, bad = prepare_pack(0, samples, reader)
            assert not bad
            assert len(flat.items) == sum(len(pair.items) for pair in pairs) * (1 if rendered is pairs else 2)
            (batch,), _, _ = redistribute([flat], mesh, 1, media.ports_by_call, lambda pack: 1.0)
            model.zero_grad()
            logits, _ = run_model(model, localize(batch, mesh, config, media.ports))
            logits.square().mean().backward()
            outputs.append(logits.detach())
            gradients.append({name: g for name, g in full_gradients(model, keep=True).items() if g.norm()})
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)
    assert any("encoder" in name for name in gradients[0])
    assert gradients[0].keys() == gradients[1].keys()
    assert max(gradient_differences(*gradients).values()) <= 1e-5  # those of biases of keys vanish but for rounding


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "asked"),
    [
        ([], "uly2.ring2,dp2.uly2.ep4"),
        pytest.param(
            ["--train.losses", "[{kind: kto}]", "--data.pack_tokens", "400"], "dp2.uly2.ep4", marks=pytest.mark.long
        ),
    ],
    ids=["dpo", "kto"],
)
def test_prompt_media_on_ranks_match_one_process(overrides: list[str], asked: str, omni: Path, tmp_path: Path) -> None:
    layouts = prepare(load_config(omni, overrides), 4, asked, "fp32", tmp_path / "verify")
    assert {verdict_of(tmp_path / "verify", layout).reason for layout in layouts} == {""}


def test_response_key_depends_on_tokens_and_media_content(omni: Path) -> None:
    rows = range(12)
    config = load_config(omni, ["--train.losses", "[{kind: dpo, options: {reference_cache: anywhere}}]"])
    model = build_model(config.model, "fp32")
    reader = build_reader(config, load_tokenizer(config.model), **read_modalities(model, config.model))
    source = reader.sources[0]
    files = [[part["image"] for part in source.read(row)["messages"][0]["content"] if "image" in part] for row in rows]
    changed = next(name for names in files for name in names)

    def keys(row: int, epoch: int) -> list[str]:
        rendered = reader.renderer.render(source.read(row), (0, epoch, row), partial(source.find, row))
        flat, bad = prepare_pack(0, list(split(0, epoch, row, rendered, 240)), reader)
        assert not bad
        assert all(len(key) == 32 for key in flat.preferences.keys)
        return list(flat.preferences.keys)

    before = [keys(row, 0) for row in rows]
    assert len({key for each in before for key in each}) == 2 * len(rows)
    assert [keys(row, 1) for row in rows] == before
    path = source.find(0, changed)
    assert isinstance(path, Path)
    Image.eval(Image.open(path), lambda value: 255 - value).save(path)
    after = [keys(row, 0) for row in rows]
    assert [one != other for one, other in zip(before, after, strict=True)] == [changed in names for names in files]


# Rows, and mistakes in one line.


def test_every_row_format_has_targets_on_responses_only(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    renderer = Renderer(tokenizer, True, preferences="required")
    chat = [{"from": "human", "value": "question"}]
    for row in (
        {"messages": [USER], "chosen": "yes", "rejected": "no"},
        {"prompt": [USER], "chosen": [YES], "rejected": [NO]},
        {"prompt": "question", "chosen": YES, "rejected": NO},
        {"prompt": "question", "chosen": [USER, YES], "rejected": [USER, NO]},
        {"chosen": [USER, YES], "rejected": [USER, NO]},
        {"conversations": chat, "chosen": {"from": "gpt", "value": "yes"}, "rejected": {"from": "gpt", "value": "no"}},
    ):
        found = renderer.render(row)
        first = found.responses[0][1]
        halves = slice(0, first), slice(first, None)
        assert [tokenizer.decode(found.input_ids[h][found.is_target[h]]) for h in halves] == [
            "yes<|im_end|>",
            "no<|im_end|>",
        ]
        assert len({tokenizer.decode(found.input_ids[h][~found.is_target[h]]) for h in halves}) == 1
    found = renderer.render({"prompt": "and so on", "chosen": " yes", "rejected": " no"})
    half = slice(0, found.responses[0][1])
    assert tokenizer.decode(found.input_ids[half][found.is_target[half]]) == " yes<|endoftext|>"
    with pytest.raises(BadRow, match=r"more than data.pack_tokens \(8\), and preference rows are never split"):
        list(split(0, 0, 0, found, 8))


BAD_ROWS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "a", "chosen": "b"}, "`rejected` is missing"),
    ({"prompt": "a", "rejected": "b"}, "`chosen` is missing"),
    ({"chosen": "a", "rejected": "b"}, "needs `prompt`"),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, "`chosen` and `rejected`"),
    ({"prompt": "a", "messages": [USER], "chosen": "b", "rejected": "c"}, "`prompt` and `messages`"),
    (
        {"chosen": [USER, YES], "rejected": [USER | {"content": "else"}, NO]},
        "differ at message 0",
    ),
    ({"chosen": [USER, YES], "rejected": [USER, YES, USER, NO]}, "differ at message 2"),
    ({"prompt": "else", "chosen": [USER, YES], "rejected": [USER, NO]}, "`prompt` differs"),
    ({"messages": [USER], "chosen": YES | {"weight": 0.5}, "rejected": NO}, "`weight` other than 0 and 1"),
    ({"messages": [USER], "chosen": YES, "rejected": NO, "weight": 2}, "`weight` is not used"),
    (
        {"messages": [USER], "chosen": YES, "rejected": NO, "rejected_response": "x"},
        "read from `chosen` and `rejected`",
    ),
    ({"messages": [USER], "chosen": 7, "rejected": NO}, "`chosen` is int"),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "system": "d"}, "`system` and `tools`"),
    ({"text": "a"}, "not a preference row"),
]


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS)
def test_bad_preference_pair_raises_one_line(row: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(BadRow) as caught:
        Renderer(make_tokenizer(tmp_path), True, preferences="required").render(row)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


BAD_SINGLE_ROWS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "a", "completion": "b"}, "`label` is missing"),
    ({"prompt": "a", "label": True}, "`completion` is missing"),
    ({"completion": "b", "label": True}, "needs `prompt`"),
    ({"prompt": "a", "completion": "b", "label": 1}, "`label` is 1"),
    ({"prompt": "a", "completion": [USER, YES], "label": True}, "`completion` does not begin"),
    ({"prompt": "a", "completion": "b", "label": True, "score": 2}, "`score` is not used"),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "label": True}, "`label` is not used"),
    ({"text": "a"}, "not a preference row"),
]


@pytest.mark.parametrize(("row", "reason"), BAD_SINGLE_ROWS)
def test_bad_labeled_response_raises(row: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(BadRow) as caught:
        Renderer(make_tokenizer(tmp_path), True, preferences="required", labeled_responses=True).render(row)
    assert reason in str(caught.value)


def test_prompt_without_kto_baseline_response_raises(tmp_path: Path) -> None:
    row = {"prompt": "the same", "completion": " yes", "label": True}
    path = pair_config(tmp_path, [{"kind": "kto"}], [row] * 10)
    with pytest.raises(UserError, match=r"needs the response of another row, .* the other row has the same prompt"):
        one_step(path)
    one_step(path, "--train.losses", "[{kind: kto, options: {baseline: zero}}]")
    with pytest.raises(UserError, match=r"train\.losses: kto .*dpo"):
        load_config(path, ["--train.losses", "[{kind: kto}, {kind: dpo}]"])


def test_pairs_need_a_pair_loss_and_mix_with_other_rows(tmp_path: Path) -> None:
    row = {"messages": [USER], "chosen": "yes", "rejected": "no"}
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(BadRow, match=r"`chosen`, `rejected` .* dpo, orpo, simpo, reward, kto in train.losses"):
        Renderer(tokenizer, True).render(row)
    losses = [{"kind": "dpo"}, {"kind": "cross_entropy"}]
    path = pair_config(tmp_path / "run", losses, [row, {"text": "any number"}] * 40)
    result, _, data = one_step(path, "--data.shuffle", "false")
    assert 0 < data.totals.pairs < sum(len(batch.sample_ids) for batch in data.micro_batches) / 2
    assert result.terms.keys() == {"dpo", "text", *(f"dpo/{name}" for name in DPO.metrics)}


def test_invalid_dpo_options_raise(tmp_path: Path) -> None:
    for options, reason in (
        ({"loss": "kto"}, "train.losses.0.options.loss"),
        ({"beta": 0}, "train.losses.0.options.beta.* 0"),
        ({"label_smoothing": 0.1, "loss": "ipo"}, "^label_smoothing: 0.1 .*ipo"),
    ):
        path = pair_config(tmp_path, [{"kind": "dpo", "options": options}])
        with pytest.raises(UserError, match=reason):
            one_step(path)
    path = pair_config(tmp_path, [{"kind": "dpo"}], model={"init_from": "elsewhere"})
    with pytest.raises(UserError, match=r"model\.init_from: elsewhere: the reference of dpo"):
        one_step(path)
    assert {"dpo", "orpo", "simpo"} <= KINDS.keys()
