"""One round of GRPO with the model of the digits demo, which reads pictures: rollouts by transformers' `generate` on
weights streamed from the engine, on two ranks."""

import json
import re
import runpy
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from processes import run_on_ranks
from transformers import AutoConfig, AutoTokenizer

from omnizoo.config.load import load_config
from omnizoo.config.sections.model import ModelSection
from omnizoo.data.rendering.renderer import Renderer
from omnizoo.modalities.base import find_module
from omnizoo.models.media.batch import prompt_batch
from omnizoo.models.media.composed import OmniModel, save_model_config
from omnizoo.parallel.mesh import build_mesh
from omnizoo.parallel.process import Process
from omnizoo.rl.engine import Engine
from omnizoo.rl.rollouts import Rollout

DIGITS = Path(__file__).parents[2] / "examples" / "digits"
PICTURES, GROUP, MOST = 10, 24, 3
LOSSES = [{"kind": "grpo", "options": {"beta": 0.01}}, {"kind": "balance", "weight": 0.01}]


def make_demo(folder: Path) -> Path:
    """The config of the demo, its tokenizer, its codebook, and pictures of the ten digits."""
    sys.path.insert(0, str(DIGITS))
    import make_rows
    from sklearn.datasets import load_digits

    pictures, digits = load_digits(return_X_y=True)
    chosen = [pictures[digits == digit][0].reshape(8, 8) for digit in range(PICTURES)]
    make_rows.write_tokenizer(folder / "tokenizer")
    gray = [(picture.reshape(8, 8) * 15.9375).astype("uint8") for picture in pictures[:100]]
    codebook = make_rows.fit_patch_codebook(gray, make_rows.PATCH, make_rows.CODES, seed=0)
    make_rows.save_patch_codebook(folder / "codebook", codebook, make_rows.PATCH, size=8)
    for number, picture in enumerate(chosen):
        (folder / f"{number}.png").write_bytes(make_rows.png(picture))
    config = yaml.safe_load((DIGITS / "digits.yaml").read_text())
    config["model"]["tokenizer"] = str(folder / "tokenizer")
    config["model"]["modalities"]["image"]["decoder"]["path"] = str(folder / "codebook")
    config["data"] = {"pack_tokens": 128}
    config["train"] = {"lr": 3e-3, "schedule": "constant", "losses": LOSSES}
    config.pop("evaluation", None)
    config["log"] = {"dir": str(folder / "run")}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "words.json").write_text(json.dumps(make_rows.NUMBERS))
    return folder


def question(folder: Path, digit: int) -> list[dict[str, Any]]:
    content = [{"type": "text", "text": "Read"}, {"type": "image", "image": str(folder / f"{digit}.png")}]
    return [{"role": "user", "content": content}]


@dataclass(frozen=True)
class Writing:
    """A rollout engine: the model that streamed weights make, whole."""

    model: OmniModel
    tokenizer: Any
    renderer: Renderer

    @classmethod
    def of(cls, weights: dict[str, torch.Tensor], folder: Path) -> "Writing":
        model = OmniModel.from_pretrained(None, config=AutoConfig.from_pretrained(folder), state_dict=weights).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        return cls(model, tokenizer, Renderer(tokenizer, False, model.modalities(ModelSection(path=str(folder)))))

    @torch.no_grad()
    def write(self, messages: list[dict[str, Any]]) -> list[tuple[Rollout, torch.Tensor]]:
        """A group of answers to `messages`, with the log-probability of each token as `generate` saw it."""
        prompt, modalities = self.renderer.prompt(messages), self.renderer.notation.modalities
        items = [replace(item, inputs=find_module(modalities, item.port).prepare(item.media)) for item in prompt.items]
        embeddings = self.model.get_input_embeddings()(torch.from_numpy(prompt.input_ids).long()[None])
        media = prompt_batch(items, self.model.ports, torch.device("cpu"), torch.float32)
        embeddings, _ = self.model.merge_features(embeddings, media)
        out = self.model.foundation.generate(
            inputs_embeds=embeddings.expand(GROUP, -1, -1),
            attention_mask=torch.ones(GROUP, embeddings.shape[1], dtype=torch.int64),
            do_sample=True,
            top_k=0,
            max_new_tokens=MOST,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
            suppress_tokens=self.renderer.placeholders,
            return_dict_in_generate=True,
            output_logits=True,
        )
        each = torch.stack(out.logits, 1).log_softmax(-1).gather(2, out.sequences[..., None]).squeeze(2)
        written = []
        for ids, values in zip(out.sequences.tolist(), each, strict=True):
            count = ids.index(self.tokenizer.eos_token_id) + 1 if self.tokenizer.eos_token_id in ids else len(ids)
            written.append((Rollout(messages, ids[:count]), values[:count]))
        return written


def play(process: Process, given: str) -> None:
    folder = Path(given)
    config = load_config(folder / "config.json", ["--parallel.ulysses", "2", "--parallel.ep", "2"], needs_data=False)
    mesh = build_mesh(config, process)
    engine = Engine(config, mesh)
    words = json.loads((folder / "words.json").read_text())

    weights = dict(engine.weights())
    if mesh.is_first:
        save_model_config(engine.model, folder)
        torch.manual_seed(0)
        policy = Writing.of(weights, folder)
        written = [policy.write(question(folder, digit)) for digit in range(PICTURES)]
    rollouts, old = mesh.from_first(
        [list(part) for part in zip(*(pair for group in written for pair in group), strict=True)]
        if mesh.is_first
        else None
    )
    counted: list[int] = []
    encoder = engine.model.get_submodule("encoders.image")
    encode = encoder.encode
    encoder.encode = lambda items: (counted.append(len(items)), encode(items))[1]
    scores = engine.log_probabilities(rollouts)
    encoder.encode = encode
    assert sum(counted) < len(rollouts) / 2  # a picture is encoded once for all rollouts of a pack that ask about it
    torch.testing.assert_close(scores, old, rtol=1e-5, atol=1e-5)  # the engine and `generate` have the same policy

    said = [engine.tokenizer.decode(rollout.answer, skip_special_tokens=True).split() for rollout in rollouts]
    right = [words[number // GROUP] for number in range(len(rollouts))]
    rewards = torch.tensor([float(own[:1] == [word]) for own, word in zip(said, right, strict=True)])
    assert 0 < rewards.mean() < 0.5
    of_group = rewards.view(-1, GROUP)
    advantages = ((of_group - of_group.mean(1, keepdim=True)) / (of_group.std(1, keepdim=True) + 1e-4)).flatten()
    reference = engine.log_probabilities(rollouts, reference=True)
    full = [
        replace(rollout, advantage=advantage, old=own, reference=base)
        for rollout, advantage, own, base in zip(rollouts, advantages.tolist(), scores, reference, strict=True)
    ]
    metrics = engine.step(full)
    assert metrics["loss/grpo/ratio"] == pytest.approx(1, abs=1e-6)
    assert metrics["loss/grpo/clipped"] == metrics["bad_steps"] == 0
    assert metrics["grad_norm"] > 0

    after = engine.log_probabilities(rollouts)
    learnt = [float(new[0] - before[0]) for new, before in zip(after, scores, strict=True)]
    rewarded = [gain for gain, reward in zip(learnt, rewards, strict=True) if reward]
    assert sum(rewarded) / len(rewarded) > 0.05, "what was right is more likely"
    moved = dict(engine.weights())
    if mesh.is_first:
        assert moved.keys() == weights.keys()
        assert any("encoders.image" in name and not torch.equal(moved[name], weights[name]) for name in moved)
        rewarded_first = next(number for number, reward in enumerate(rewards) if reward)
        policy, prompt = Writing.of(moved, folder), question(folder, rewarded_first // GROUP)
        again = policy.write(prompt)
    again = mesh.from_first(again if mesh.is_first else None)
    torch.testing.assert_close(
        engine.log_probabilities([rollout for rollout, _ in again]), [own for _, own in again], rtol=1e-5, atol=1e-5
    )


def test_grpo_round_with_transformers_generate_runs(tmp_path: Path) -> None:
    result = run_on_ranks(play, 2, str(make_demo(tmp_path)))
    assert result.code == 0, result.stderr


@pytest.mark.long
def test_grpo_example_increases_the_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = Path(__file__).parents[2] / "examples" / "grpo_tiny.py"
    main = runpy.run_path(str(script))["main"]
    main(["--log.dir", str(tmp_path)])
    rewards = [float(found) for found in re.findall(r"reward (\S+)", capsys.readouterr().out)]
    assert len(rewards) == 12
    assert sum(rewards[-3:]) > 1.5 * sum(rewards[:3])
