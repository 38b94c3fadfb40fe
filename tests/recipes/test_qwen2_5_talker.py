"""The talker of Qwen2.5-Omni through our path against Hugging Face's own forward and `generate`; its voices; in and out
of files. What all talkers share is in recipes/test_qwen3_talker.py."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import torch.nn.functional as F
import yaml
from processes import run_omnizoo, start_omnizoo
from safetensors.torch import load_file, save_file
from spoken import (
    DATA,
    DTYPE,
    OTHER_EXAMPLE,
    check_gradients,
    example,
    learn_packed,
    learning,
    say,
    spoken_answers,
    whole_model,
    write_config,
    write_rows,
)
from spoken_2_5 import VOICES, inputs_of, rows, speech_loss
from tiny import read_steps
from transformers import AutoModelForMultimodalLM, AutoTokenizer

from omnizoo.cli.main import main
from omnizoo.config.errors import UserError
from omnizoo.config.sections.model import ModelSection
from omnizoo.data.rendering.renderer import Renderer
from omnizoo.data.row import BadRow
from omnizoo.data.sources.base import MediaFolder
from omnizoo.generation.chat_model import load_chat_model
from omnizoo.modalities.decoders.precomputed_speech import write_pickled_voices
from omnizoo.modalities.item import MediaItem, MediaSize, Port
from omnizoo.modalities.media import BadMedia, Media
from omnizoo.modalities.sampling import Sampling
from omnizoo.models.build import build_model
from omnizoo.models.component_settings import ComponentSettings
from omnizoo.models.media.hf_model import media_model
from omnizoo.ops.precision import keep_precision
from omnizoo.recipes.shared.qwen2_5_talker import Qwen25Talker
from omnizoo.training.setup import build_bundle

TIMEOUT = 1800


def renderer_of(config: Any) -> Renderer:
    assembled = build_bundle(config)
    return Renderer(assembled.tokenizer, False, assembled.media["modalities"], assembled.media["positions"])


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return renderer_of(example(file=OTHER_EXAMPLE))


@pytest.mark.parametrize(("precision", "error"), [pytest.param("fp32", 1e-5, marks=pytest.mark.long), ("fp64", 1e-9)])
def test_packed_speech_losses_and_gradients_match_separate_frames(
    precision: str, error: float, tmp_path: Path, renderer: Renderer
) -> None:
    config = learning(precision, write_rows(tmp_path, rows()), OTHER_EXAMPLE)
    reference: Any = whole_model(config, DTYPE[precision])
    data, found, gradients, modalities = learn_packed(config, reference)
    samples, sounding = [], 0
    for batch in data.micro_batches:
        parts = zip(batch.sample_ids, batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True)
        for name, start, stop in parts:
            row = rows()[int(name.split("/")[2])]
            items = renderer.render(row, find=MediaFolder(DATA, None).find).items
            sounding += any(item.size.inside for item in items)
            inputs = inputs_of(reference, batch.columns["input_ids"][0, start:stop].tolist(), items, modalities)
            samples.append((row, inputs, batch.columns["labels"][0, start:stop]))
    expected, count = dict.fromkeys(("text", "speech"), torch.zeros((), dtype=DTYPE[precision])), 0
    with keep_precision(precision):
        for row, inputs, labels in samples:
            out = reference.thinker(**inputs, use_cache=False, output_hidden_states=True)
            text = F.cross_entropy(out.logits[0], labels, ignore_index=-100, reduction="sum")
            expected["text"] = expected["text"] + text
            for number, codes, speaker in spoken_answers(row):
                speech = speech_loss(reference, out, inputs, number, codes, speaker)
                expected["speech"] = expected["speech"] + speech
                count += codes.numel() + 1
        sum(expected.values()).backward()
    assert data.totals.targets["speech"] == count > 50
    assert sounding > 0  # clips with their own sound
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert abs(found[name] - value) <= error * abs(value), name
    assert not any(name.startswith("token2wav") for name in gradients)
    check_gradients(gradients, reference, error)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hugging Face's own model and the tokenizer, saved by transformers; its voices."""
    path = tmp_path_factory.mktemp("whole")
    model: Any = whole_model(example(file=OTHER_EXAMPLE))
    with torch.no_grad():
        model.talker.codec_head.weight[64:] = 0  # what is no code; its own `generate` leaves only one of them out
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(DATA / "tokenizer_qwen2_5_omni").save_pretrained(path)
    save_file(load_file(VOICES), path / VOICES.name)
    write_pickled_voices(VOICES, path)
    return path


def prompts() -> dict[str, list[dict[str, Any]]]:
    """Messages, by what is in them."""
    question = {"type": "text", "text": "What is there?"}
    some: dict[str, list[tuple[str, str]]] = {"text": [], "image": [("image", "image1.png")]}
    some["mixed"] = [("video", "video0.mp4"), ("audio", "audio3.flac"), ("image", "image0.png")]
    asked = {
        name: [{"role": "user", "content": [*({"type": kind, kind: file} for kind, file in items), question]}]
        for name, items in some.items()
    }
    clip = {"type": "video", "video": "scene4.mp4", "use_audio_in_video": True}
    asked["sounding"] = [{"role": "user", "content": [clip, question]}]
    asked["text"] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "no."},
        *asked["text"],
    ]
    return asked


def own_answer(model: Any, inputs: dict[str, Any], tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, codes `[T]` and sound of the model's own `generate`, greedily, for a prompt with one place of padding on the
    left: without any, transformers 5.22.2 takes the mask away. It never feeds the last token."""
    drawn: list[torch.Tensor] = []
    decode = model.token2wav.forward

    def spy(code: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        drawn.append(code)
        torch.manual_seed(0)
        return decode(code, **kwargs)

    model.token2wav.forward = spy
    # Given without the prefix, the talker would get pixels as well, and refuses them (transformers 5.22.2).
    given = {f"thinker_{name}" if name.startswith("pixel") else name: value for name, value in inputs.items()}
    given["input_ids"] = F.pad(inputs["input_ids"], (1, 0), value=0)
    given["attention_mask"] = F.pad(inputs["attention_mask"], (1, 0), value=0)
    lengths = {"thinker_max_new_tokens": tokens + 1, "talker_max_new_tokens": 9, "thinker_eos_token_id": None}
    greedy = {"thinker_do_sample": False, "talker_do_sample": False, "talker_eos_token_id": [64, 66]}
    ids, wave = model.generate(**given, speaker="ben", **lengths, **greedy)
    return ids[0, 1:-1], drawn[0][0], wave


@pytest.mark.parametrize("kind", ["text", pytest.param("image", marks=pytest.mark.long), "mixed", "sounding"])
def test_greedy_speech_matches_transformers_and_teacher_forcing(kind: str, folder: Path) -> None:
    writer = load_chat_model(folder)
    messages, greedy, spec = prompts()[kind], Sampling(temperature=0), ModelSection(path=str(folder))
    prompt = writer.renderer.prompt(messages, MediaFolder(DATA, None).find)
    own = AutoModelForMultimodalLM.from_pretrained(folder)
    inputs = inputs_of(own, prompt.input_ids.tolist(), prompt.items, writer.modalities)
    ids, codes, wave = own_answer(own, inputs, 5)
    text, speech = writer.write(
        messages, greedy, 5, MediaFolder(DATA, None), followed={"speaker": "Ben", "max_frames": 9}
    )
    assert text.ids == ids[len(prompt.input_ids) :].tolist()
    assert torch.equal(speech.targets[:, 0], codes)
    assert len(codes) == 9
    assert np.abs(speech.item - wave.numpy()).max() < 1e-6

    # The same codes as a row's: what is likeliest at each place is what was drawn.
    model = build_model(spec, "fp32", "cpu")
    model.load_state_dict(writer.model.state_dict())
    follower: Any = media_model(model).modalities(spec)["speech"].follower
    follower.read_with(writer.tokenizer)
    seen: list[torch.Tensor] = []
    model.talker.codec_head.register_forward_hook(lambda module, args, out: seen.append(out))
    media = Media("speech", codes.tolist(), {"speaker": "ben"})
    tokens, port = ids.numpy().astype(np.int32), Port("speech", "follower")
    answers = sum(message["role"] == "assistant" for message in messages)
    item = MediaItem(port, MediaSize(0, 0.0, len(codes) + 1), (), True, media, answer=answers)
    item = follower.locate_item(tokens, prompt.items, item, answers + 1)
    with torch.no_grad():
        with follower.capture() as kept:
            lengths = {"cu_seq_lens_q": torch.tensor([0, len(ids)], dtype=torch.int32), "max_length_q": len(ids)}
            positions = media_model(model).positions(tokens, prompt.items)
            given = inputs | {"input_ids": ids[None], "position_ids": torch.from_numpy(positions)[:, None]} | lengths
            model.thinker(**{name: v for name, v in given.items() if name != "attention_mask"}, use_cache=False)
        states = follower.rows_from(kept, ids)
        follower.loss(states[: follower.rows(item.notes)], [follower.prepare(media) | item.notes])
    (logits,) = seen
    logits[:, 64:] = -torch.inf
    for i in range(len(logits)):  # which `generate` makes less likely
        repeated = logits[i, codes[:i]]
        logits[i, codes[:i]] = torch.where(repeated < 0, repeated * 1.05, repeated / 1.05)
    assert torch.equal(logits[:-1].argmax(1), codes)


LOSSES = ("loss", "loss/text", "loss/speech", "grad_norm", "tokens")
FOUR = ("--nproc", 4, "--parallel.ulysses", 2)


def steps_of(run: Path) -> list[list[float]]:
    return [[row[name] for name in LOSSES] for row in read_steps(run)]


@pytest.mark.slow
@pytest.mark.long
def test_four_processes_match_one_also_after_a_kill(tmp_path: Path) -> None:
    train, checkpoint = {"steps": 20, "packs_per_step": 4, "lr": 1e-3}, {"every": 4}
    config = write_config(tmp_path, OTHER_EXAMPLE, rows(), train=train, checkpoint=checkpoint)
    for name, layout in (("one", ()), ("four", FOUR)):
        trained = run_omnizoo(["train", config, "--log.dir", tmp_path / name, *layout], TIMEOUT)
        assert trained.code == 0, trained.stdout + trained.stderr
    alone, together = (np.array(steps_of(tmp_path / run)) for run in ("one", "four"))
    assert alone.shape == (20, len(LOSSES))
    assert (np.abs(together / alone - 1) <= 1e-5).all(), np.abs(together / alone - 1).max(0)

    running = start_omnizoo(["train", config, "--log.dir", tmp_path / "killed", *FOUR])
    assert running.wait_until(lambda: len(read_steps(tmp_path / "killed")) >= 7, TIMEOUT)
    running.ranks()[2].kill()
    running.wait(TIMEOUT)
    resumed = run_omnizoo(["train", config, "--log.dir", tmp_path / "killed", *FOUR], TIMEOUT)
    assert resumed.code == 0, resumed.stdout + resumed.stderr
    assert steps_of(tmp_path / "killed") == steps_of(tmp_path / "four")


def own_sound(model: Any, codes: Any, speaker: str) -> Any:
    torch.manual_seed(0)
    voice = model.speaker_map[speaker]
    with torch.no_grad():
        wave = model.token2wav(torch.tensor([codes]), conditioning=voice["cond"], reference_mel=voice["ref_mel"])
    return wave.reshape(-1).numpy()


@pytest.mark.slow
@pytest.mark.long
def test_tiny_talker_learns_eight_responses(tmp_path: Path) -> None:
    dice = np.random.default_rng(0)
    asked = ("one", "two", "three", "four", "five", "six", "seven", "eight")
    answers = [(dice.integers(0, 64, dice.integers(3, 9)).tolist(), ("ada", "ben")[i % 2]) for i in range(8)]
    conversations = [
        {"messages": [{"role": "user", "content": f"Say {word}."}, say(f"{word}.", codes, speaker)]}
        for word, (codes, speaker) in zip(asked, answers, strict=True)
    ]
    train = {"steps": 120, "packs_per_step": 1, "lr": 3e-3, "warmup_steps": 10}
    data = {"pack_tokens": 512, "lanes": 1}
    path = write_config(tmp_path, OTHER_EXAMPLE, conversations, train=train, data=data, checkpoint={"every": 0})
    assert main(["train", str(path), "--model.modalities.speech.decoder.lr", "3e-3"]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "model")]) == 0
    writer, own = load_chat_model(tmp_path / "model"), AutoModelForMultimodalLM.from_pretrained(tmp_path / "model")
    for word, (codes, speaker) in zip(asked, answers, strict=True):
        text, speech = writer.write(f"Say {word}.", Sampling(temperature=0), 16, followed={"speaker": speaker})
        assert writer.decode(text) == f"{word}."
        assert speech.targets[:, 0].tolist() == codes, word
        assert np.array_equal(speech.item, own_sound(own, codes, speaker))
    asking = ["generate", str(tmp_path / "model"), "--prompt", "Say two.", "--temperature", "0", "--speaker", "ben"]
    assert main([*asking, "--out", str(tmp_path / "out")]) == 0
    samples, rate = soundfile.read(tmp_path / "out" / "1.wav")
    assert rate == 24_000
    assert np.abs(samples - own_sound(own, answers[1][0], "ben")).max() < 1e-4  # of a file with 16 bits


@pytest.mark.slow
@pytest.mark.long
def test_published_folder_round_trips_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    """All but biases of the talker is frozen, so that what comes out is what went in."""
    frozen = [{"match": ["thinker.*", "talker.*weight"], "freeze": True}]
    path = write_config(
        tmp_path, OTHER_EXAMPLE, rows(), train={"steps": 1, "packs_per_step": 2}, optimizer={"groups": frozen}
    )
    fields = yaml.safe_load(path.read_text())
    speech = fields["model"]["modalities"].pop("speech")
    assert "speakers" in speech["decoder"]["options"]  # which the folder has itself
    fields["model"] = {"path": str(folder), "modalities": fields["model"]["modalities"]}
    path.write_text(yaml.safe_dump(fields))
    trained = run_omnizoo(["train", path, "--nproc", 2], TIMEOUT)
    assert trained.code == 0, trained.stdout + trained.stderr
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "model")]) == 0
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    assert {"talker.thinker_to_talker_proj.weight", "thinker.lm_head.weight"} <= before.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.startswith("talker.") and name.endswith("bias") for name in changed)
    models: list[Any] = [AutoModelForMultimodalLM.from_pretrained(path) for path in (folder, tmp_path / "model")]
    ids, rows_read = torch.arange(20, 60)[None], torch.randn(1, 20, 128)
    assert torch.equal(*(model.thinker(input_ids=ids, use_cache=False).logits for model in models))
    for name in changed:
        models[1].get_parameter(name).data.copy_(before[name])
    assert torch.equal(
        *(model.talker(inputs_embeds=rows_read, position_ids=torch.arange(20)[None]).logits for model in models)
    )
    for name, voice in models[0].speaker_map.items():
        other = models[1].speaker_map[name]
        assert voice["bos_token"] == other["bos_token"]
        assert torch.equal(voice["cond"], other["cond"])
        assert torch.equal(voice["ref_mel"], other["ref_mel"])


def test_nothing_of_a_folder_is_unpickled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own class would read spk_dict.pt here."""
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("torch.load was called"))
    follower: Any = load_chat_model(folder).modalities["speech"].follower
    assert follower.speakers == {"ada": 387, "ben": 388}


BAD = {
    "two codebooks": ([[1, 2]], {}, "codes are 1 x 2"),
    "of floats": ([0.5], {}, "1 x 1 of float64"),
    "nested": ([[[1]]], {}, "1 x 1 x 1 of int64"),
    "beyond the codebook": ([1, 64], {}, "code 64 in codebook 0 is out of range"),
    "below zero": ([-1], {}, "code -1 in codebook 0"),
    "none": ([], {}, "speech (item 0)"),
    "a speaker nobody knows": ([1], {"speaker": "eve"}, "'eve'. Use one of ada, ben"),
    "no speaker": ([1], {"speaker": None}, "`speaker` is not set. Use one of ada, ben"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_speech_raises_one_line(name: str, renderer: Renderer) -> None:
    codes, changes, match = BAD[name]
    message = say("yes.", codes, "ada")
    message["content"][1] |= changes
    with pytest.raises(BadRow, match=re.escape(match)) as error:
        renderer.render({"messages": [{"role": "user", "content": "Well?"}, message]})
    assert "\n" not in str(error.value)


def test_invalid_or_missing_voices_raise_one_line(tmp_path: Path) -> None:
    model = build_model(example(file=OTHER_EXAMPLE).model, "fp32")
    media = Media("speech", [1, 2], {"speaker": "ada"})
    with pytest.raises(BadMedia, match=r"^speech given as list: .*'ada'.*spk_dict\.safetensors"):
        Qwen25Talker(model).measure(media)
    voices, file = load_file(VOICES), tmp_path / "voices.safetensors"
    changes: dict[str, tuple[dict[str, torch.Tensor], str]] = {
        "half": ({"eve.cond": torch.zeros(1, 8)}, "'eve' is incomplete"),
        "shape": ({"ada.cond": torch.zeros(1, 9)}, "ada.cond: the shape is 1 x 9; expected 1 x 8"),
        "mels": ({"ada.ref_mel": torch.zeros(12, 8)}, "ada.ref_mel: the shape is 12 x 8; expected 1 x frames x 8"),
        "nan": ({"ada.cond": torch.full((1, 8), torch.nan)}, "ada.cond: some values"),
        "token": ({"ada.bos_token": torch.tensor([1.5])}, "ada.bos_token"),
    }
    for change, match in changes.values():
        save_file(voices | change, file)
        with pytest.raises(UserError, match=re.escape(match)):
            Qwen25Talker(model, speakers=str(file))
    save_file(voices | {"ada.bos_token": torch.tensor([999])}, file)
    with pytest.raises(BadMedia, match=r"999.* 391"):
        Qwen25Talker(model, speakers=str(file)).measure(media)
    torch.save({"ada": 1}, file)
    with pytest.raises(
        UserError, match=r"^model\.modalities\.speech\.decoder\.options\.speakers: .*voices\.safetensors"
    ):
        Qwen25Talker(model, speakers=str(file))
    with pytest.raises(UserError, match=r"options\.speakers: 'nowhere'"):
        Qwen25Talker(model, speakers="nowhere")


def test_talker_trains_separately_and_codec_never() -> None:
    config = example("--optimizer.groups", json.dumps([{"match": "thinker.*", "freeze": True}]), file=OTHER_EXAMPLE)
    model = build_bundle(config).model
    ComponentSettings(model, config.model, config.optimizer.groups).apply(model)
    assert {name.partition(".")[0] for name, p in model.named_parameters() if p.requires_grad} == {"talker"}
