"""Composed models as Hugging Face models: components from published folders, export to one folder, and generation."""

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omni import LISTENING, SENSOR, VISION, make_media, write_omni_config
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from omnizoo.checkpoint.export import export
from omnizoo.cli.main import main
from omnizoo.config.load import load_config
from omnizoo.generation.chat_model import ChatModel, load_chat_model
from omnizoo.generation.conversation import Conversation
from omnizoo.modalities.base import find_module
from omnizoo.modalities.sampling import Sampling
from omnizoo.models.build import build_model
from omnizoo.models.media.composed import OmniModel
from omnizoo.parallel.mesh import build_mesh
from omnizoo.parallel.process import process_group
from omnizoo.parallelize.parallelize import parallelize_model
from omnizoo.training.loop import train


@pytest.fixture(scope="module", autouse=True)
def sensor_on_path() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SENSOR))
        yield


def published(fields: dict[str, Any], folder: Path, builder: Any = AutoModel) -> PreTrainedModel:
    rest = dict(fields)
    torch.manual_seed(len(str(folder)))
    model = builder.from_config(AutoConfig.for_model(rest.pop("model_type"), **rest))
    model.save_pretrained(folder)
    return model


def test_each_component_loads_its_published_weights(tmp_path: Path) -> None:
    """The audio encoder is published as part of a larger model; only the encoder is loaded."""
    path = write_omni_config(tmp_path, "qwen3_moe")
    foundation = json.loads(json.dumps(load_config(path, []).model.foundation.config))  # type: ignore[union-attr]
    originals = {
        "foundation": published(foundation, tmp_path / "lm", AutoModelForCausalLM),
        "encoders.image.tower": published(VISION, tmp_path / "seeing"),
        "encoders.audio.tower": published(LISTENING, tmp_path / "listening").get_encoder(),
    }
    overrides = ["--model.foundation", f"{{path: {tmp_path / 'lm'}}}"]
    overrides += ["--model.modalities.image.encoder", f"{{kind: vision, path: {tmp_path / 'seeing'}}}"]
    options = "{sample_rate: 2000, hop_length: 50, n_fft: 100}"
    heard = f"{{kind: audio, path: {tmp_path / 'listening'}, options: {options}}}"
    config = load_config(path, [*overrides, "--model.modalities.audio.encoder", heard])
    with process_group() as process:
        model = build_model(config.model, "fp32")
        parallelize_model(model, build_mesh(config, process), config)
        for name, original in originals.items():
            expected = original.state_dict()
            found = model.get_submodule(name).state_dict()
            assert set(found) <= set(expected), name
            assert len(found) > 10
            for key, tensor in found.items():
                assert torch.equal(getattr(tensor, "full_tensor", lambda t=tensor: t)(), expected[key]), f"{name}.{key}"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a model for a few steps, and export it to a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("exported")
    config = load_config(write_omni_config(folder, "qwen3", train={"steps": 2}), [])
    assert train(config).exit_code == 0
    export(folder / "run", folder / "model", allow_code=["sensor"])
    return folder / "model"


def test_exported_folder_equals_trained_model(exported: Path) -> None:
    model = OmniModel.from_pretrained(exported, allow_code=["sensor"])
    again = AutoModelForCausalLM.from_pretrained(exported, allow_code=["sensor"])
    assert type(again) is OmniModel
    state, other = model.state_dict(), again.state_dict()
    assert all(torch.equal(tensor, other[name]) for name, tensor in state.items())
    assert {"image", "audio", "video", "series"} == set(model.encoders)
    assert {"image", "audio", "series"} == set(model.decoders)
    assert "/" not in json.dumps(json.loads((exported / "config.json").read_text())["modalities"]).replace("\\\\/", "")


@pytest.fixture(scope="module")
def writer(exported: Path) -> ChatModel:
    return load_chat_model(exported, allow_code=["sensor"])


def ask(writer: ChatModel, content: Any, seed: int, **options: Any) -> list[tuple[str, Any]]:
    sampling = Sampling(generator=torch.Generator().manual_seed(seed), **options)
    pieces = writer.write([{"role": "user", "content": content}], sampling, max_tokens=12)
    return [(p.modality, p.ids if p.targets is None else p.targets.tolist()) for p in pieces]


@torch.no_grad()
def first_logits(writer: ChatModel, content: Any) -> torch.Tensor:
    prompt, conversation = (
        writer.renderer.prompt([{"role": "user", "content": content}]),
        Conversation(writer.model, writer.media),
    )
    items = [replace(i, inputs=find_module(writer.modalities, i.port).prepare(i.media)) for i in prompt.items]
    conversation.read(prompt.input_ids.tolist(), items)
    return conversation.logits


def test_generation_depends_on_seed_and_prompt(writer: ChatModel, tmp_path: Path) -> None:
    media = make_media(tmp_path / "media", random.Random(3), count=2)
    picture, other = ({"type": "image", "image": str(tmp_path / name)} for name in media["image"])
    sound = {"type": "audio", "audio": str(tmp_path / media["audio"][0])}
    words = {"type": "text", "text": "what is this?"}
    prompts = ["just words", [words, picture], [words, other], [picture, words, sound, words, picture]]
    answers = [ask(writer, prompt, seed=1) for prompt in prompts]
    assert [ask(writer, prompt, seed=1) for prompt in prompts] == answers
    seen = [first_logits(writer, prompt) for prompt in prompts]  # an untrained model responds similarly to all prompts
    assert min(float((a - b).abs().max()) for a, b in itertools.combinations(seen, 2)) > 1e-6
    assert ask(writer, prompts[0], seed=2) != ask(writer, prompts[0], seed=1)
    assert ask(writer, prompts[0], seed=1, temperature=0) == ask(writer, prompts[0], seed=2, temperature=0)


@pytest.mark.parametrize("modality", ["image", "audio", "series"])
def test_media_items_are_generated_after_begin_token_and_saved(
    writer: ChatModel, modality: str, tmp_path: Path
) -> None:
    """An untrained model rarely generates the begin token, so the head is changed to predict it."""
    begin = writer.tokenizer.convert_tokens_to_ids(writer.modalities[modality].begin)
    calls: list[int] = []

    def first_say_begin(module: Any, inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return logits.index_fill(-1, torch.tensor([begin]), 1e4) if len(calls) == 1 else logits

    def produced() -> Any:
        calls.clear()
        sampling = Sampling(generator=torch.Generator().manual_seed(0))
        return writer.write("words", sampling, max_tokens=3)[0]

    handle = writer.model.get_output_embeddings().register_forward_hook(first_say_begin)
    piece, again = produced(), produced()
    handle.remove()
    assert piece.modality == modality
    assert torch.equal(piece.targets, again.targets)
    decoder = writer.modalities[modality].decoder
    assert decoder is not None
    file = Path(decoder.save(piece.item, str(tmp_path / "item")))
    assert file.stat().st_size > 0


def test_generation_with_cache_matches_full_forward(writer: ChatModel) -> None:
    """Compare greedy tokens with the most likely token of a full forward pass for each position."""
    ids = writer.renderer.prompt("so it is").input_ids.tolist()
    pieces = writer.write("so it is", Sampling(temperature=0), max_tokens=6)
    written = [token for piece in pieces for token in piece.ids]
    never = [writer.tokenizer.convert_tokens_to_ids(m.placeholder) for m in writer.modalities.values()]
    assert isinstance(writer.model, OmniModel)
    for token in written:
        logits = writer.model(torch.tensor([ids])).logits[0, -1]
        logits[never] = -torch.inf
        assert int(logits.argmax()) == token
        ids.append(token)


def test_generate_command_writes_text_and_files(
    exported: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    messages = tmp_path / "messages.json"
    series = {"type": "series", "series": np.linspace(0, 1, 8).tolist()}
    messages.write_text(json.dumps([{"role": "user", "content": [{"type": "text", "text": "go on"}, series]}]))
    command = [
        "generate",
        str(exported),
        "--messages",
        str(messages),
        "--max-tokens",
        "4",
        "--out",
        str(tmp_path / "out"),
        "--allow-code",
        "sensor",
    ]
    assert main(command) == 0
    first = capfd.readouterr().out
    assert main(command) == 0
    assert capfd.readouterr().out == first
    assert main(["generate", str(exported)]) == 2
    assert "--messages" in capfd.readouterr().err
    bad = [{"role": "user", "content": [{"type": "smell", "smell": "rose"}]}]
    messages.write_text(json.dumps(bad))
    assert main(command) == 2
    assert "smell" in capfd.readouterr().err
