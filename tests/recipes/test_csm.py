"""A published model that only speaks (CSM): as transformers' own class and processor have it, and on ranks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import yaml
from dialogues import (
    BOOKS,
    RATE,
    codes_of,
    ours,
    processor,
    publish,
    read,
    reference,
    renderer,
    rows,
    settings,
    theirs,
    tiny_model,
    waves_of,
)
from processes import run_on_ranks, train_in_this_world
from published import gradients, sound
from safetensors.torch import load_file
from transformers import CsmForConditionalGeneration, GenerationConfig
from voices import DATA, ROOT, packed

from omnizoo.cli.main import main
from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.data.row import BadRow
from omnizoo.data.sources.base import MediaFolder
from omnizoo.generation.chat_model import load_chat_model
from omnizoo.modalities.base import find_module
from omnizoo.modalities.sampling import Sampling
from omnizoo.models.build import build_model
from omnizoo.models.media.batch import to_compute
from omnizoo.models.media.hf_model import media_model
from omnizoo.ops.precision import keep_precision
from omnizoo.parallel.process import Process
from omnizoo.training.losses.base import build_losses
from omnizoo.training.objective import without_text

SOUNDS, CODES = (3, 7, 11), (0, 1, 2, 4, 8)  # rows whose sounds are files, and codes; of 2 and 8 one is not learnt


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_tokens_match_published_processor() -> None:
    reader = renderer()
    for row in rows(*SOUNDS):
        given, sample = theirs(row), read(row, reader)
        assert sample.input_ids.tolist() == given["input_ids"][0].tolist()
        learnt = np.zeros(len(sample.input_ids), bool)
        for item in sample.items:
            for first, count in item.spans:
                learnt[first : first + count] = True
        assert learnt.tolist() == (given["labels"][0] != -100).tolist()
        assert not sample.is_target.any()  # of the text


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_pack_losses_and_gradients_match_separate_samples(share: float) -> None:
    """By `forward(labels=...)`; with fewer frames for the depth decoder, others have the label -101."""
    reader, model, single = renderer(residual_frames=share), ours("fp64", residual_frames=share), tiny_model("fp64")
    given = rows(*SOUNDS, *CODES) if share == 1 else rows(*SOUNDS)
    samples = [read(row, reader) for row in given]
    single.zero_grad()
    expected = dict.fromkeys(("audio", "audio/residual"), torch.zeros(()).double())
    learnt = [item for sample in samples for item in sample.items if item.is_target]
    counts = {
        "audio": sum(i.targets for i in learnt),
        "audio/residual": sum(i.size.num_residual_targets for i in learnt),
    }
    found_counts = dict.fromkeys(counts, 0)
    with keep_precision("fp64"):
        for row, sample in zip(given, samples, strict=True):
            own = [item for item in sample.items if item.is_target]
            refined = [
                find_module(reader.notation.modalities, item.port).prepare(item.media)["refined"]
                for item in sample.items
            ]
            out = reference(single, row, sample, None if share == 1 else refined)
            frames = sum(item.targets for item in own)
            codes = out.depth_decoder_logits.shape[0] * (BOOKS - 1)
            sums = {"audio": out.backbone_loss * frames, "audio/residual": out.depth_decoder_loss * codes}
            expected = {name: expected[name] + loss for name, loss in sums.items()}
            found_counts["audio"] += frames
            found_counts["audio/residual"] += codes
        found = model(**packed(samples, reader, model)).losses
        sum(expected.values()).backward()
        sum(found.values()).backward()
    assert counts == found_counts
    assert found.keys() == expected.keys()
    for name, loss in found.items():
        assert abs(loss - expected[name]) <= 1e-11 * abs(expected[name])
    wanted, made = gradients(single), gradients(model)
    assert wanted.keys() == made.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    worst = {name: ((made[name] - value).norm() / value.norm()).item() for name, value in wanted.items()}
    assert max(worst.values()) <= 1e-9, max(worst, key=worst.__getitem__)


def test_codes_match_the_codec_at_any_precision() -> None:
    media, reader = [sound(seconds, seed) for seed, seconds in enumerate((0.31, 1.3, 0.97))], renderer()
    decoder: Any = reader.notation.modalities["audio"].decoder
    model = ours("fp32")
    made: Any = media_model(model).modalities(settings())["audio"].decoder
    model.train()
    items = [to_compute(decoder.prepare(item), torch.device("cpu"), torch.float32) for item in media]
    together, apart = made.targets(items), torch.cat([made.targets([item]) for item in items])
    assert torch.equal(together, apart)
    assert [len(made.targets([item])) for item in items] == [decoder.measure(item).num_placeholders for item in media]
    codec = tiny_model("fp32").codec_model
    with torch.no_grad():
        codes = codec.encode(items[1]["wave"][None, None]).audio_codes[0].T
    assert torch.equal(
        made.targets([items[1]])[:, :BOOKS], torch.cat([codes, torch.zeros(1, BOOKS, dtype=torch.int64)])
    )
    assert len({tuple(frame) for frame in codes.tolist()}) > 1


def test_residual_frames_depend_on_row_and_seed() -> None:
    (row,) = rows(11)

    def chosen(seed: int) -> list[list[int]]:
        reader = renderer(seed, residual_frames=0.5)
        decoder: Any = reader.notation.modalities["audio"].decoder
        return [decoder.prepare(item.media)["refined"].tolist() for item in read(row, reader).items]

    assert chosen(0) == chosen(0) != chosen(1)
    assert all(own[-1] == 1 for own in chosen(0))


WRONG: dict[str, tuple[Any, str]] = {
    "a code out of range": ({"codes": [[1, 2, 3, 64]]}, r"64 in codebook 3 is out of range"),
    "a negative code": ({"codes": [[1, -2, 3, 4]]}, r"-2 in codebook 1"),
    "too few codebooks": ({"codes": [[1, 2, 3]]}, r"1 x 3; .*4 codebooks"),
    "codebooks x frames": ({"codes": [[1], [2], [3], [4]]}, r"4 x 1; .*4 codebooks.*Transpose"),
    "codes of different lengths": ({"codes": [[1, 2, 3, 4], [1]]}, r"codes have different lengths"),
    "no file": ({"audio": "nowhere.wav"}, r"nowhere\.wav"),
    "too long": ({"audio": "long.wav"}, r"long\.wav.*31"),
    "a key that nothing reads": ({"codes": [[1, 2, 3, 4]], "emotion": "glad"}, r"emotion"),
}


@pytest.mark.parametrize("what", WRONG)
def test_bad_audio_raises_one_line(what: str, tmp_path: Path) -> None:
    soundfile.write(tmp_path / "long.wav", np.zeros(RATE * 31, np.float32), RATE)
    part, message = WRONG[what]
    content = [{"type": "text", "text": "Hello."}, {"type": "audio", **part}]
    with pytest.raises(BadRow, match=message):
        read({"messages": [{"role": "0", "content": content}]}, renderer(), tmp_path)


SAID = {"type": "audio", "codes": [[1, 2, 3, 4]]}
TEXT = {"type": "text", "text": "Hello."}
ODD: dict[str, tuple[list[Any], str]] = {
    "sound without text": ([{"role": "0", "content": [SAID]}], r"message 0 has 0 texts; expected one"),
    "an empty text": (
        [{"role": "0", "content": [{"type": "text", "text": " "}, SAID]}],
        r"message 0 has an empty text",
    ),
    "two sounds": ([{"role": "0", "content": [TEXT, SAID, SAID]}], r"message 0 has 2 media items"),
    "text alone": ([{"role": "0", "content": "Hello."}], r"no targets"),
    "an unspoken turn": (
        [{"role": "0", "content": [TEXT]}, {"role": "1", "content": [TEXT, SAID]}],
        r"message 0 has no audio",
    ),
    "an assistant": ([{"role": "assistant", "content": [TEXT, SAID]}], r"`role` of message 0 is 'assistant'; expected"),
    "nothing learnt": ([{"role": "0", "content": [TEXT, SAID], "loss": False}], r"no targets"),
    "a mark in the text": ([{"role": "0", "content": [{"type": "text", "text": "<|audio_eos|>"}, SAID]}], r"audio_eos"),
    "a field of a message": ([{"role": "0", "content": [TEXT, SAID], "mood": "glad"}], r"mood"),
}


@pytest.mark.parametrize("what", ODD)
def test_invalid_conversation_raises_one_line(what: str) -> None:
    messages, message = ODD[what]
    with pytest.raises(BadRow, match=message):
        read({"messages": messages}, renderer())


def test_speaker_number_and_audio_tag_are_accepted() -> None:
    reader = renderer()
    wanted = read({"messages": [{"role": "1", "content": [TEXT, {"type": "audio", "audio": "audio1.flac"}]}]}, reader)
    found = read({"messages": [{"role": 1, "content": "Hello. <audio>"}], "audio": "audio1.flac"}, reader)
    assert found.input_ids.tolist() == wanted.input_ids.tolist()
    with pytest.raises(BadRow, match="`text` is not a list of messages"):
        read({"text": "Hello. <audio>", "audio": "audio1.flac"}, reader)


def test_text_losses_raise() -> None:
    losses = build_losses(load_config(ROOT / "examples/published/csm.yaml", ["--train.losses", "[{kind: dpo}]"]))
    with pytest.raises(UserError, match="is a loss on text"):
        without_text(losses, "it")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("published")
    publish(made)
    return made


def test_generated_speech_matches_transformers(folder: Path, tmp_path: Path) -> None:
    """Greedily, after a turn that was spoken: the same codes by the processor's inputs, and the same sound."""
    (row,) = rows(7)
    messages = [row["messages"][0], {"role": "1", "content": [TEXT]}]
    own = processor()
    text = own.apply_chat_template(messages, tokenize=False)
    given = own(text=text, audio=waves_of(row)[:1])
    model = CsmForConditionalGeneration.from_pretrained(folder).eval()
    no_codes = [64, 65, 66]  # which this random model would draw, and its codec does not know
    how = {"do_sample": False, "suppress_tokens": no_codes}
    how |= {f"depth_decoder_{name}": value for name, value in how.items()} | {"max_new_tokens": 12}
    with torch.no_grad():
        expected = model.generate(**given, **how)[0]
        wave = model.generate(**given, **how, output_audio=True)[0]
    writer = load_chat_model(folder)
    (piece,) = writer.write(messages, Sampling(temperature=0), max_tokens=12, folder=MediaFolder(DATA, None))
    assert piece.modality == "audio"
    assert torch.equal(piece.targets, expected[: len(piece.targets)])
    torch.testing.assert_close(torch.from_numpy(piece.item), wave)
    saved, rate = soundfile.read(writer.save(piece, tmp_path / "said"))
    assert (len(saved), rate) == (len(wave), RATE)
    drawn = [writer.write("Hello.", Sampling(generator=torch.Generator().manual_seed(s)), 5)[0] for s in (1, 1, 2)]
    assert torch.equal(drawn[0].targets, drawn[1].targets)
    assert not torch.equal(drawn[0].targets, drawn[2].targets)


def test_generate_command_speaks_rows_and_prompts(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    how = ["--temperature", "0", "--max-tokens", "3", "--out", str(tmp_path)]
    assert main(["generate", str(folder), "--prompt", "Hello.", "--speaker", "1", *how]) == 0
    assert soundfile.info(tmp_path / "0.wav").samplerate == RATE
    for odd, message in ((["--speaker", "ada"], "'ada'"), (["--no-speech"], "--no-speech: ")):
        assert main(["generate", str(folder), "--prompt", "Hello.", *odd, *how]) != 0
        assert message in capsys.readouterr().err


def train_on_ranks(process: Process, config: Path) -> None:
    assert train_in_this_world([config]) == 0


@pytest.mark.slow
@pytest.mark.long
def test_published_weights_round_trip(folder: Path, tmp_path: Path) -> None:
    """On two ranks, one step with a rate that moves nothing: what is exported is what was published, bit for bit."""
    example = yaml.safe_load((ROOT / "examples/published/csm.yaml").read_text())
    example["model"] |= {"config": None, "path": str(folder)}
    example |= {"log": {"dir": str(tmp_path / "run")}, "checkpoint": {"every": 1}}
    example["train"] |= {"steps": 1, "lr": 1e-30, "warmup_steps": 0, "packs_per_step": 2}
    config, out = tmp_path / "config.yaml", tmp_path / "exported"
    config.write_text(yaml.safe_dump(example))
    run_on_ranks(train_on_ranks, 2, config)
    assert main(["export", str(tmp_path / "run"), str(out)]) == 0
    stored, exported = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    assert stored.keys() == exported.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in stored.items())
    assert GenerationConfig.from_pretrained(out).depth_decoder_temperature == 0.9
    assert (out / "processor_config.json").is_file()
    models = [CsmForConditionalGeneration.from_pretrained(place).eval() for place in (folder, out)]
    (row,) = rows(3)
    with torch.no_grad():
        given = theirs(row)
        before, after = (model(**given) for model in models)
    assert torch.equal(before.logits, after.logits)
    assert torch.equal(before.depth_decoder_logits, after.depth_decoder_logits)


@pytest.mark.long
def test_tiny_model_learns_eight_lines(tmp_path: Path) -> None:
    """What greedy generation draws are the codes that were learnt, and the sound is what the codec makes of them."""
    example = yaml.safe_load((ROOT / "examples/published/csm.yaml").read_text())
    given = [row for row in rows(*range(96)) if len(row["messages"]) == 1 and not waves_of(row)]
    by_text = {row["messages"][0]["content"][0]["text"]: row for row in given}
    known = [*by_text.values()]
    for number in range(8 - len(known)):  # other words for the same codes
        content = known[number]["messages"][0]["content"]
        again = [{"type": "text", "text": f"Again: {content[0]['text']}"}, content[1]]
        known.append({"messages": [{"role": "1", "content": again}]})
    reader = renderer()
    samples = [read(row, reader) for row in known]
    data = tmp_path / "known.jsonl"
    for row, sample in zip(known, samples, strict=True):
        row["messages"][0]["content"][1]["codes"] = codes_of(sample.items[0].media)[:-1].tolist()
    data.write_text("\n".join(json.dumps(row) for row in known))
    example["data"] |= {"sources": [{"path": str(data)}]}
    example["train"] |= {"steps": 250, "packs_per_step": 2, "lr": 3e-3}
    example |= {"log": {"dir": str(tmp_path / "run")}, "checkpoint": {"every": 250}}
    config, out = tmp_path / "config.yaml", tmp_path / "exported"
    config.write_text(yaml.safe_dump(example))
    assert main(["train", str(config)]) == 0
    assert main(["export", str(tmp_path / "run"), str(out)]) == 0
    writer = load_chat_model(out)
    for row, sample in zip(known, samples, strict=True):
        (message,) = row["messages"]
        asked = [{"role": message["role"], "content": message["content"][:1]}]
        (piece,) = writer.write(asked, Sampling(temperature=0), max_tokens=40)
        wanted = torch.from_numpy(codes_of(sample.items[0].media)[:-1])
        assert piece.targets is not None
        assert piece.targets.tolist() == wanted.tolist()
        with torch.no_grad():
            wave = writer.model.codec_model.decode(wanted.T[None]).audio_values[0, 0]
        torch.testing.assert_close(torch.from_numpy(piece.item), wave)


def test_codec_with_other_codebooks_raises() -> None:
    spec = settings()
    assert isinstance(spec.config, dict)
    spec.config["num_codebooks"] = 3
    with pytest.raises(UserError, match=r"^model\.config: num_codebooks.* 3.* 4"):
        media_model(build_model(spec, "fp32")).modalities(spec)
