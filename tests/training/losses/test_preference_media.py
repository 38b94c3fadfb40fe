"""Preferences whose answers are pictures and sounds: against plain torch, one answer at a time, and one process."""

import json
import random
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoder_cases import digits
from omni import CODEC, FOUNDATIONS, MODALITIES, SENSOR, make_media
from PIL import Image
from preference_cases import KINDS_AT_ONCE, assert_same, one_step, published
from tiny import SHAPE, read_steps, write_config, write_rows
from transformers import AutoModelForCausalLM

from omnizoo.cli.main import main
from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.config.schema import Config
from omnizoo.data.loading.inspection import InspectedSample, parts, pieces
from omnizoo.data.loading.prepare import prepare_pack
from omnizoo.data.loading.reader import Reader, build_reader
from omnizoo.data.packing.overlong import split
from omnizoo.data.row import BadRow
from omnizoo.data.rows.preferences import ResponseRow, response_rows
from omnizoo.models.build import build_model
from omnizoo.models.media.model_inputs import read_modalities
from omnizoo.models.read_config import load_tokenizer
from omnizoo.rl.rollouts import Rollout, RolloutReader
from omnizoo.training.losses.preference import DPO, ORPO, PairLoss, SimPO
from omnizoo.verification.compare import gradient_differences, verdict_of
from omnizoo.verification.prepare import prepare

FOUNDATION = {"model_type": "qwen3_moe"} | SHAPE | FOUNDATIONS["qwen3_moe"] | {"vocab_size": 544}
USER = {"role": "user", "content": "question"}


def said(*parts: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "assistant", "content": content}


def part(name: str, value: Any) -> dict[str, Any]:
    return {"type": name, name: value}


def drawing_config(folder: Path, rows: list[dict[str, Any]], losses: list[dict[str, Any]], **more: Any) -> Path:
    """A composed model that reads and produces pictures and sounds, as codes, on `rows`."""
    folder.mkdir(parents=True, exist_ok=True)
    modalities = {
        "image": MODALITIES["image"] | {"decoder": {"kind": "image_tokens", "path": digits(folder / "codebook")}},
        "audio": MODALITIES["audio"] | {"decoder": {"kind": "audio_codec", "config": CODEC, "weight": 0.5}},
    }
    model = {"config": None, "foundation": {"config": FOUNDATION}, "modalities": modalities} | more.pop("model", {})
    data = {"sources": [{"path": str(write_rows(folder / "pairs.jsonl", rows))}], "pack_tokens": 320, "workers": 0}
    train = {"packs_per_step": 4, "grad_clip": 0.0, "losses": losses} | more.pop("train", {})
    return write_config(folder, model=model, data=data | more.pop("data", {}), train=train, **more)


def drawn_rows(folder: Path, count: int = 48) -> list[dict[str, Any]]:
    """Pairs with media in prompts, in one answer or in both, with and without text around them."""
    dice = random.Random(0)
    media = make_media(folder / "media", dice)
    rows = []
    for number in range(count):
        picture, sound, other = (dice.choice(media[name]) for name in ("image", "audio", "image"))
        asked = [{"type": "text", "text": f"question {number}"}]
        asked += [part("image", dice.choice(media["image"]))] * (number % 2)
        answers = [
            (said(part("image", picture)), said("no", part("audio", sound), "sorry")),
            (said("look", part("image", picture)), said(f"none {number}")),
            (said(part("audio", sound), part("image", picture)), said(part("image", other), f"and {number}")),
            (said(f"yes {number}"), said("no")),
        ][number % 4]
        message = {"role": "user", "content": asked}
        rows.append({"messages": [message], "chosen": [answers[0]], "rejected": [answers[1]]})
    return rows


def read(path: Path, *overrides: str) -> Reader:
    config = load_config(path, list(overrides))
    model = build_model(config.model, "fp32")
    return build_reader(config, load_tokenizer(config.model), **read_modalities(model, config.model))


# Against plain torch.


Scores = dict[str, tuple[torch.Tensor, int]]  # of the text, and of each decoder: sum of log-probabilities, how many


def score(model: Any, reader: Reader, side: ResponseRow, row: int) -> Scores:
    """One answer by the model's parts, by hand: no pack, no batch, a value after the other."""
    found = partial(reader.sources[0].find, row)
    rendered = reader.renderer._render_response(side, (0, 0, row), found, found)
    ids = torch.from_numpy(rendered.input_ids).long()
    embedded = model.foundation.get_input_embeddings()(ids)
    produced = []
    for item in rendered.items:
        (prepared,) = reader.prepare(item)
        places = torch.cat([torch.arange(first, first + count) for first, count in item.spans])
        if item.port.role == "encoder":
            features = model.encoders[item.port.modality].encode([prepared.inputs])
        else:
            codes = model.decoders[item.port.modality].targets([prepared.inputs])
            features = model.decoders[item.port.modality].embed(codes)
            produced += [(item.port.modality, item.spans[0][0], codes)] if item.is_target else []
        embedded = embedded.index_put((places,), features)
    hidden = model.foundation.base_model(inputs_embeds=embedded[None], use_cache=False).last_hidden_state[0]
    logs: dict[str, list[torch.Tensor]] = {"text": [], "image": [], "audio": []}
    words = model.foundation.lm_head(hidden).log_softmax(-1)
    logs["text"] = [words[at - 1, ids[at]] for at in range(1, len(ids)) if rendered.is_target[at]]
    for name, first, codes in produced:
        logits = model.decoders[name].head(hidden[first - 1 : first - 1 + len(codes)])
        if name == "image":
            logs[name] += [logits[i].log_softmax(-1)[code] for i, code in enumerate(codes[:, 0].tolist())]
            continue
        count = CODEC["codebook_size"]  # of each codebook; the first one has a code to stop, too
        for i, of_books in enumerate(codes.tolist()):
            for book, code in enumerate(of_books):
                begin = 0 if book == 0 else 1 + book * count
                own = logits[i, begin : begin + count + (book == 0)].log_softmax(-1)
                logs[name] += [own[code]] if code <= count else []  # beyond: nothing to predict there
    return {name: (torch.stack(each).sum() if each else torch.zeros(()), len(each)) for name, each in logs.items()}


def draw_weights(model: torch.nn.Module, seed: int) -> None:
    """Large enough that models differ in what they predict; frozen tokenisers stay as they are."""
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and ".tokenizer." not in name and ".codec." not in name:
            torch.nn.init.normal_(parameter, std=0.1)


def initial_model(config: Config) -> Any:
    """The same one every time, frozen tokenisers included."""
    described = build_model(config.model, "fp32").config
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(described)


def with_reference(losses: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    return [
        loss | {"options": loss["options"] | {"reference": str(folder)}} if loss["kind"] == "dpo" else loss
        for loss in losses
    ]


LOSSES: list[tuple[dict[str, Any], PairLoss]] = [
    ({"kind": "dpo", "options": {"beta": 0.3}}, DPO(beta=0.3)),
    ({"kind": "dpo", "name": "ipo", "options": {"loss": "ipo", "chunked": True}}, DPO(beta=0.1, loss="ipo")),
    ({"kind": "simpo", "weight": 0.5}, SimPO()),
    ({"kind": "orpo", "weight": 0.5}, ORPO()),
]


def test_losses_of_media_responses_match_plain_torch(tmp_path: Path) -> None:
    specs = [spec for spec, _ in LOSSES]
    path = drawing_config(tmp_path / "run", drawn_rows(tmp_path / "run", 8), specs)
    reader = read(path)
    folders = [tmp_path / "policy", tmp_path / "reference"]
    for seed, folder in enumerate(folders):
        model = initial_model(reader.config)
        draw_weights(model, seed)
        model.save_pretrained(folder)
        load_tokenizer(reader.config.model).save_pretrained(folder)
    losses = [*with_reference(specs, folders[1]), {"kind": "cross_entropy", "weight": 0.2}]
    spec = {"path": str(folders[0]), "config": None, "foundation": None, "modalities": {}, "tokenizer": None}
    overrides = ["--model", json.dumps(spec), "--train.losses", json.dumps(losses)]
    overrides += ["--data.pack_tokens", "1500", "--train.packs_per_step", "1", "--data.lanes", "1"]
    result, gradients, data = one_step(path, *overrides)

    own: list[Scores] = []
    others: list[Scores] = []
    model, frozen = (AutoModelForCausalLM.from_pretrained(folder) for folder in folders)
    names = [name for batch in data.micro_batches for name in batch.sample_ids]
    rows = sorted({int(name.split("/")[2]) for name in names})
    for number in rows:
        for side in response_rows(reader.sources[0].read(number)):
            own.append(score(model, reader, side, number))
            with torch.no_grad():
                others.append(score(frozen, reader, side, number))
    assert len(own) == 2 * data.totals.pairs == len(names) == 16
    assert all(sum(scores[name][1] for scores in own) > 20 for name in ("text", "image", "audio"))
    sums, ofs = (torch.stack([sum(total for total, _ in s.values()) for s in each]) for each in (own, others))
    counts = torch.tensor([sum(count for _, count in scores.values()) for scores in own])
    total = torch.zeros(())
    for spec, loss in LOSSES:
        each = sums - ofs if isinstance(loss, DPO) else sums
        each = each / counts if loss.is_normalized else each
        found = published(loss, each[::2], each[1::2]).mean()
        name = spec.get("name", spec["kind"])
        assert result.terms[name] == pytest.approx(found.item(), rel=1e-5), name
        total = total + spec.get("weight", 1.0) * found
    for name, weight in (("text", 0.2), ("image", 1.0), ("audio", 1.0)):  # of chosen answers only
        chosen = [scores[name] for scores in own[::2]]
        found = -sum(value for value, _ in chosen) / sum(count for _, count in chosen)
        assert result.terms[name] == pytest.approx(found.item(), rel=1e-5), name
        total = total + weight * found
    total.backward()
    assert result.loss == pytest.approx(total.item(), rel=1e-6)
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found = {name: gradient for name, gradient in gradients.items() if name in expected}
    assert any("decoders.image.head" in name for name in expected)
    assert max(gradient_differences(found, expected).values()) <= 1e-5


# On every layout, and from disk.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("losses", "world", "asked"),
    [
        (KINDS_AT_ONCE, 2, "uly2.ep2"),
        # tests/training/losses/test_preference.py has such layouts, without media
        pytest.param(KINDS_AT_ONCE, 4, "dp2.uly2.ep4,uly2.ring2", marks=pytest.mark.long),
        pytest.param([{"kind": "kto"}], 4, "uly2.ring2,dp2.uly2.ep4", marks=pytest.mark.long),
    ],
    ids=["pairs", "pairs on four ranks", "kto"],
)
def test_media_responses_on_ranks_match_one_process(
    losses: list[dict[str, Any]], world: int, asked: str, tmp_path: Path
) -> None:
    path = drawing_config(tmp_path, drawn_rows(tmp_path), losses)
    layouts = prepare(load_config(path, ["--data.pack_tokens", "400"]), world, asked, "fp32", tmp_path / "verify")
    assert {verdict_of(tmp_path / "verify", layout).reason for layout in layouts} == {""}


def test_generated_image_becomes_preferred_and_reference_is_cached(tmp_path: Path) -> None:
    Image.new("L", (8, 8), 0).save(tmp_path / "dark.png")
    Image.new("L", (8, 8), 255).save(tmp_path / "light.png")
    rows = [
        {
            "messages": [USER | {"content": f"draw {i}"}],
            "chosen": [said(part("image", "dark.png"))],
            "rejected": [said(part("image", "light.png"))],
        }
        for i in range(16)
    ]
    loss = {"kind": "dpo", "options": {"beta": 0.5, "reference_cache": str(tmp_path / "cache")}}
    model = drawing_model(tmp_path)
    train = {"steps": 5, "lr": 3e-3, "warmup_steps": 1, "packs_per_step": 2}
    path = drawing_config(tmp_path, rows, [loss], model=model, train=train, data={"pack_tokens": 160})
    runs = []
    for name in ("first", "second"):
        assert main(["train", str(path), "--log.dir", str(tmp_path / name)]) == 0
        runs.append(read_steps(tmp_path / name))
    first, last = runs[0][0], runs[0][-1]
    assert first["loss"] == pytest.approx(0.693147, rel=1e-5)  # the reference is the model as it begins
    assert last["loss/dpo/accuracy"] == 1
    assert last["loss/dpo/margin"] > 1
    assert not any("image" in name for name in last if name.startswith("loss"))  # what is dark is not learnt besides
    figures = ("loss", "grad_norm", "loss/dpo/margin")
    assert [[step[name] for name in figures] for step in runs[1]] == [[s[name] for name in figures] for s in runs[0]]
    kept = list((tmp_path / "cache").rglob("*.arrows"))
    assert len(kept) == 1  # by the first run


def drawing_model(folder: Path) -> dict[str, Any]:
    """One that draws, and reads nothing but text and what it has drawn."""
    drawing = {"image": {"decoder": {"kind": "image_tokens", "path": digits(folder / "codebook")}}}
    return {"foundation": {"config": {"model_type": "llama"} | SHAPE | {"vocab_size": 544}}, "modalities": drawing}


def test_adapter_base_is_the_reference_of_generated_images(tmp_path: Path) -> None:
    make_media(tmp_path / "media", random.Random(0), 2)
    rows = [{"messages": [USER | {"content": f"draw {i}"}]} | rows_of_both() for i in range(8)]
    path = drawing_config(tmp_path, rows, [{"kind": "dpo"}], model=drawing_model(tmp_path), train={"packs_per_step": 1})
    config, base = load_config(path, []), tmp_path / "base"
    model = initial_model(config)
    draw_weights(model, 0)
    model.save_pretrained(base)
    load_tokenizer(config.model).save_pretrained(base)
    adapter = {"rank": 4, "alpha": 16.0, "init": "random", "targets": ["all-linear", "decoders.image.head"]}
    given = {"path": str(base), "config": None, "foundation": None, "modalities": {}, "adapter": adapter}
    overrides = ["--model", json.dumps(given | {"tokenizer": None})]
    off, gradients, _ = one_step(path, *overrides)
    copy, same, _ = one_step(path, *overrides, "--train.losses", f"[{{kind: dpo, options: {{reference: {base}}}}}]")
    assert off.loss == pytest.approx(copy.loss, rel=1e-6)
    assert abs(off.terms["dpo/margin"]) > 1e-3
    assert any("decoders.image.head.lora" in name for name in gradients)
    assert_same(gradients, same)


# Rows.


def test_prompt_media_are_shared_but_response_media_are_not(tmp_path: Path) -> None:
    path = drawing_config(tmp_path, drawn_rows(tmp_path, 8), [{"kind": "dpo"}])
    reader = read(path)
    for row in range(8):
        given, find = reader.sources[0].read(row), partial(reader.sources[0].find, row)
        rendered = reader.renderer.render(given, (0, 0, row), find)
        inside = [[p for p in given[side][0]["content"] if p["type"] != "text"] for side in ("chosen", "rejected")]
        assert len(rendered.items) == row % 2 + sum(map(len, inside))
        assert [len(item.spans) for item in rendered.items] == [2] * (row % 2) + [1] * sum(map(len, inside))
        first = rendered.responses[0][1]
        own = rendered.items[row % 2 :]
        assert [item.spans[0][0] >= first for item in own] == [False] * len(inside[0]) + [True] * len(inside[1])
        assert all(item.is_target and not item.has_targets and not item.targets for item in own)
        flat, bad = prepare_pack(0, list(split(0, 0, row, rendered, 320)), reader)
        assert not bad
        assert len(flat.items) == len(rendered.items)
    learns = read(path, "--train.losses", "[{kind: dpo}, {kind: cross_entropy}]")
    rendered = learns.renderer.render(given | rows_of_both(), (0, 0, 0), partial(learns.sources[0].find, 0))
    assert [item.has_targets for item in rendered.items if item.is_target] == [True, False]


def rows_of_both() -> dict[str, Any]:
    return {side: [said(part("image", f"media/{i}.png"))] for i, side in enumerate(("chosen", "rejected"))}


def test_kto_baseline_response_has_its_media(tmp_path: Path) -> None:
    path = drawing_config(tmp_path, drawn_rows(tmp_path, 8), [{"kind": "kto"}])
    reader = read(path)
    found: list[list[str]] = [[], []]

    def find(number: int, name: str) -> Path:
        found[number].append(name)
        return tmp_path / name

    own = {"messages": [USER], "completion": [said(part("image", "media/0.png"))], "label": True}
    other = {
        "messages": [USER | {"content": "else"}],
        "completion": [said(part("image", "media/1.png"))],
        "label": False,
    }
    rendered = reader.renderer.render_samples(own, (0, 0, 0), partial(find, 0), other, partial(find, 1))[0]
    assert found == [["media/0.png"], ["media/1.png"]]
    assert [role for role, _ in rendered.responses] == ["desirable", "mismatched"]
    assert [item.media.value.name for item in rendered.items] == ["0.png", "1.png"]


def test_response_key_depends_on_image_content(tmp_path: Path) -> None:
    path = drawing_config(tmp_path, drawn_rows(tmp_path, 8), [{"kind": "dpo", "options": {"reference_cache": "any"}}])
    reader = read(path)

    def keys(row: dict[str, Any]) -> list[str]:
        rendered = reader.renderer.render(row, (0, 0, 0), partial(reader.sources[0].find, 0))
        flat, bad = prepare_pack(0, list(split(0, 0, 0, rendered, 320)), reader)
        assert not bad
        return list(flat.preferences.keys)

    both = {"messages": [USER]} | rows_of_both()
    before = keys(both)
    after = keys(both | {"rejected": [said(part("image", "media/2.png"))]})
    assert before[0] == after[0]
    assert len({*before, *after}) == 3


def test_inspect_shows_generated_media_of_responses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = drawing_config(tmp_path, drawn_rows(tmp_path, 8), [{"kind": "dpo"}])
    reader = read(path)
    rendered = reader.renderer.render(reader.sources[0].read(0), (0, 0, 0), partial(reader.sources[0].find, 0))
    (sample,) = split(0, 0, 0, rendered, 320)
    shown = {role: "".join(p.text for p in pieces(of, reader.renderer.tokenizer.decode)) for role, of in parts(sample)}
    assert "[image x 16 target]" in shown["chosen"]
    assert "audio" not in shown["chosen"]
    assert re.search(r"no.*\[audio x \d+ target\].*sorry", shown["rejected"])
    places = sum(item.size.num_placeholders for item in rendered.items)
    assert InspectedSample(sample, "").loss_tokens == int(rendered.is_target.sum()) + places
    assert main(["data", "inspect", str(path)]) == 0
    assert "target]" in capsys.readouterr().out


def test_media_without_likelihood_is_a_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SENSOR))
    rows = drawn_rows(tmp_path, 8)
    path = drawing_config(tmp_path, rows, [{"kind": "dpo"}], model={"modalities": MODALITIES})
    reader = read(path)
    no = said("no")
    for chosen, reason in (
        (said(part("image", "media/0.png")), r"image \(item 0\) is in a response .* the whole path of a flow"),
        (said(part("series", [1.0] * 4)), r"series \(item 0\) is in a response .* has no `log_likelihood`"),
        ({"role": "assistant", "content": "<audio>"}, r"<audio> is in a response .*\"type\": \"audio\""),
        (said(part("audio", "media/9.wav")), r"media/9.wav"),
    ):
        row = {"messages": [USER], "chosen": [chosen], "rejected": [no]}
        with pytest.raises(BadRow, match=reason) as caught:
            reader.renderer.render(row, find=partial(reader.sources[0].find, 0))
        assert "\n" not in str(caught.value)
    both = [said(part("series", np.ones(4))) for _ in range(2)]
    with pytest.raises(BadRow, match="`chosen` and `rejected`"):
        reader.renderer.render({"messages": [USER], "chosen": [both[0]], "rejected": [both[1]]})


def test_reference_without_the_models_media_raises(tmp_path: Path) -> None:
    path = drawing_config(tmp_path, drawn_rows(tmp_path, 8), [{"kind": "dpo"}])
    config = load_config(path, [])
    foundation = AutoModelForCausalLM.from_config(build_model(config.model, "fp32").config.foundation)
    foundation.save_pretrained(tmp_path / "text")
    losses = f"[{{kind: dpo, options: {{reference: {tmp_path / 'text'}}}}}]"
    with pytest.raises(UserError, match=r"^train\.losses: .*text has no media, .* audio/encoder, image/enc"):
        one_step(path, "--train.losses", losses)


def test_rollout_with_generated_media_raises(tmp_path: Path) -> None:
    reader = read(drawing_config(tmp_path, drawn_rows(tmp_path, 8), [{"kind": "dpo"}]))
    place = reader.renderer.placeholders[0]
    with pytest.raises(UserError, match=r"^rollouts\[0\]\.answer: '<.*>' is a placeholder"):
        RolloutReader(reader.renderer, 320, 544).to_score([Rollout([1, 2], [3, place])], "place")
