"""Published models that hear or draw: as transformers' own classes and processors have them, and on any layout."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import yaml
from PIL import Image
from processes import run_on_ranks, train_in_this_world
from published import gradients, sound
from safetensors.torch import load_file
from transformers import PreTrainedModel
from voices import (
    DRAWING,
    HEARING,
    ROOT,
    labels_of,
    media_of,
    ours,
    packed,
    processor_of,
    read,
    reference_loss,
    renderer,
    rows,
    settings,
    text_loss,
    theirs,
    tiny_model,
    tokenizer_of,
)

from omnizoo.cli.main import main
from omnizoo.config.errors import UserError
from omnizoo.data.row import BadRow
from omnizoo.data.sources.base import MediaFolder
from omnizoo.generation.chat_model import load_chat_model
from omnizoo.modalities.sampling import Sampling
from omnizoo.models.media.batch import to_compute
from omnizoo.models.media.hf_model import media_model
from omnizoo.ops.precision import keep_precision
from omnizoo.parallel.process import Process

FAMILIES = (*HEARING, *DRAWING)
ROWS = {"spoken": (0, 1, 2, 3, 5, 8), "drawn": (0, 1, 2, 3, 6)}


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def rows_of(family: str) -> list[dict[str, Any]]:
    given = rows(family, ROWS["spoken" if family in HEARING else "drawn"])
    few = ("qwen3_asr", "audioflamingo3")  # their processors take one sound in a text
    return [row for row in given if family not in few or len(media_of(row)) < 2]


@pytest.mark.parametrize("family", [family for family in (*HEARING, *DRAWING) if family != "voxtral"])
def test_tokens_match_published_processor(family: str) -> None:
    reader = renderer(family)
    for row in rows_of(family):
        wanted = theirs(family, row)["input_ids"][0].tolist()
        if media_of(row):  # what processors put around a whole text is the chat template's here
            wanted = wanted[family == "emu3" : -1 if family == "chameleon" else None]
        assert read(family, row, reader).input_ids.tolist() == wanted


@pytest.mark.parametrize("family", [*HEARING, *DRAWING])
def test_pack_losses_and_gradients_match_separate_samples(family: str) -> None:
    reader, model, reference = renderer(family), ours(family, "fp64"), tiny_model(family, "fp64")
    given = rows_of(family)
    samples = [read(family, row, reader) for row in given]
    with keep_precision("fp64"):
        reference.zero_grad()
        pairs = zip(samples, given, strict=True)
        expected = sum(reference_loss(family, reference, sample, row) for sample, row in pairs)
        out = model(**packed(samples, reader, model))
        loss = text_loss(out.logits[0], torch.cat([labels_of(sample) for sample in samples]))
        loss = loss + sum((getattr(out, "losses", None) or {}).values())
        expected.backward()
        loss.backward()
    assert abs(loss - expected) <= 1e-11 * abs(expected)
    wanted, found = gradients(reference), gradients(model)
    assert wanted.keys() == found.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    # A bias of keys moves all logits of a query alike, which softmax does not see: its gradient is only rounding.
    scale = {name: wanted[name.replace("k_proj.bias", "q_proj.bias")].norm() for name in wanted}
    worst = {name: ((found[name] - value).norm() / scale[name]).item() for name, value in wanted.items()}
    assert max(worst.values()) <= 1e-9, max(worst, key=worst.__getitem__)


@pytest.mark.parametrize("family", HEARING)
def test_audio_features_do_not_depend_on_other_items(family: str) -> None:
    model = ours(family, "fp64")
    encoder = media_model(model).modalities(settings(family))["audio"].encoder
    assert encoder is not None
    media = [sound(seconds, seed) for seed, seconds in enumerate((0.31, 1.9, 0.97))]
    items = [to_compute(encoder.prepare(item), torch.device("cpu"), torch.float64) for item in media]
    with torch.no_grad(), keep_precision("fp64"):
        alone = [encoder.encode([item]) for item in items]
        together = encoder.encode(items)
        pairs = zip(media, items, strict=True)
        parts = [part for item, inputs in pairs for part in encoder.split(encoder.measure(item), inputs)]
        apart = torch.cat([encoder.encode([inputs]) for _, inputs in parts])
    assert [len(rows) for rows in alone] == [encoder.measure(item).num_placeholders for item in media]
    assert sum(size.num_placeholders for size, _ in parts) == len(together)
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(apart, together, rtol=1e-11, atol=1e-11)
    assert len(encoder.encode([to_compute(encoder.dummy_input(), torch.device("cpu"), torch.float64)])) > 0


def test_audio_beyond_the_window_raises(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "long.wav", np.zeros(16_000 * 3, np.float32), 16_000)
    row = {"messages": [{"role": "user", "content": [{"type": "audio", "audio": "long.wav"}]}]}
    row["messages"].append({"role": "assistant", "content": "No."})
    with pytest.raises(BadRow, match=r"long\.wav.*3\.0 s.*2"):
        renderer("qwen2_audio").render(row, find=MediaFolder(tmp_path, None).find)


def publish(family: str, folder: Path) -> PreTrainedModel:
    """A folder as the family is published in."""
    model = deepcopy(tiny_model(family, "fp32"))
    model.save_pretrained(folder)
    tokenizer_of(family).save_pretrained(folder)
    processor = processor_of(family)
    if hasattr(processor, "image_processor"):
        processor.image_processor.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", ["janus", "emu3"])
def test_generated_codes_match_a_loop_without_cache(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedily, with a cache, against transformers' own forward over all so far; the png is what the VQ part draws."""
    folder = tmp_path / "model"
    model: Any = publish(family, folder)
    writer = load_chat_model(folder)
    begin = {"janus": 11, "emu3": 14}[family]
    text: dict[int, int] = {}  # the first token of text is the one that begins a picture, the next one ends the answer

    def steer(self: Sampling, logits: torch.Tensor) -> torch.Tensor:
        if logits.shape[-1] == 384 + 16 * (family == "emu3"):
            text[len(text)] = 1
            return torch.tensor([begin if len(text) == 1 else 0])
        return logits.argmax(-1)

    monkeypatch.setattr(Sampling, "draw", steer)
    (piece,) = writer.write("Draw a square.", Sampling(temperature=0))
    assert piece.modality == "image"
    prompt = writer.renderer.prompt("Draw a square.").input_ids.tolist()
    decoder: Any = writer.modalities["image"].decoder
    drawn = piece.targets[:, 0]
    with torch.no_grad():
        if family == "janus":
            embeddings = model.get_input_embeddings()(torch.tensor([[*prompt, begin]]))
            for code in drawn:
                hidden = model.model(inputs_embeds=embeddings, use_cache=False).last_hidden_state[0, -1]
                assert model.model.generation_head(hidden).argmax() == code
                fed = model.prepare_embeddings_for_image_generation(code.view(1, 1))
                embeddings = torch.cat([embeddings, fed], 1)
            assert len(drawn) == 16
            values = model.model.vqmodel.decode(drawn[None])[0]
        else:
            lines, row = decoder.generated_grid
            ids = [*prompt, begin, *tokenizer_of(family)(f"{lines}*{row}<|image token|>").input_ids]
            visual = torch.tensor(model.model.vocabulary_mapping.image_tokens)
            for number, code in enumerate(drawn.tolist()):
                logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
                at_end = number % (row + 1) == row
                assert code == (17 if at_end else int(visual[logits[visual].argmax()]))
                ids.append(code)
            assert len(drawn) == lines * (row + 1)
            grid = drawn.view(lines, row + 1)[:, :-1] - 384
            values = model.model.vqmodel.decode(grid[None])[0]
    expected = ((values * 0.5 + 0.5) * 255).clamp(0, 255).permute(1, 2, 0).numpy()
    saved = np.array(Image.open(decoder.save(piece.item, str(tmp_path / "drawn"))))
    assert np.abs(saved - expected).max() <= 1


def test_model_without_vq_decoder_cannot_generate_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish("chameleon", tmp_path / "model")
    writer = load_chat_model(tmp_path / "model")
    begin = writer.tokenizer.convert_tokens_to_ids("<racm3:break>")
    monkeypatch.setattr(Sampling, "draw", lambda *_: torch.tensor([begin]))
    with pytest.raises(UserError, match=r"^model: .*codes"):
        writer.write("Draw a square.")


def train_on_ranks(process: Process, config: Path) -> None:
    assert train_in_this_world([config]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=() if family == "emu3" else pytest.mark.long) for family in FAMILIES]
)
def test_published_weights_round_trip(family: str, tmp_path: Path) -> None:
    """On two ranks, one step with a rate that moves nothing: what is exported is what was published, bit for bit."""
    folder, out = tmp_path / "published", tmp_path / "exported"
    published = publish(family, folder)
    example = yaml.safe_load((ROOT / f"examples/published/{family}.yaml").read_text())
    example["model"] |= {"config": None, "path": str(folder)}
    example |= {"log": {"dir": str(tmp_path / "run")}, "checkpoint": {"every": 1}}
    example["train"] |= {"steps": 1, "lr": 1e-30, "warmup_steps": 0}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(example))
    run_on_ranks(train_on_ranks, 2, config)
    assert main(["export", str(tmp_path / "run"), str(out)]) == 0
    stored, exported = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    assert stored.keys() == exported.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in stored.items())
    loaded = type(published).from_pretrained(out).eval()
    ids = torch.arange(20, 60)[None]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, published(input_ids=ids).logits)
