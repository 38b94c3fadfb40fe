"""The engine for reinforcement learning: against transformers in one process, and on layouts of four ranks."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import make_tokenizer
from processes import run_on_ranks
from safetensors.torch import load_file, save_file
from tiny import SHAPE, model_config
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeForCausalLM

from omnizoo.checkpoint.export import export
from omnizoo.checkpoint.merge_adapter import base_weights
from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.parallel.mesh import build_mesh
from omnizoo.parallel.process import Process
from omnizoo.rl.engine import Engine
from omnizoo.rl.rollouts import Rollout
from omnizoo.training.loop import train
from omnizoo.verification.trial import full_gradients

MOE = {"model_type": "qwen3_moe", **SHAPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOSSES = [
    {"kind": "grpo", "options": {"clip_high": 0.28, "beta": 0.05, "aggregation": "sample"}},
    {"kind": "gspo", "weight": 0.5, "options": {"clip_low": 0.01, "clip_high": 0.01}},
    {"kind": "grpo", "weight": 0.3, "name": "dapo", "options": {"chunked": True}},
]


def make_folder(folder: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """A model with random weights, as Hugging Face saves it; large enough that it is sure of some tokens."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def settings(folder: Path, run: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder)},
        "data": {"pack_tokens": 64},
        "train": {"lr": 1e-2, "schedule": "constant", "grad_clip": 0.0, "losses": LOSSES},
        "optimizer": {"options": {"eps": 1e-3}},  # updates are then no steeper than gradients are exact
        "log": {"dir": str(run)},
    }
    for section, keys in sections.items():
        config[section] = config.get(section, {}) | keys
    return config


def make_rollouts(count: int = 11) -> list[Rollout]:
    """Of many lengths; some with tokens in the answer that a tool wrote."""
    dice = random.Random(0)
    rollouts = []
    for number in range(count):
        prompt = [dice.randrange(300) for _ in range(dice.randint(1, 12))]
        answer = [dice.randrange(300) for _ in range(dice.randint(1, 20))]
        mask = [at % 4 != 1 for at in range(len(answer))] if number % 3 == 2 else None
        numbers = [[dice.gauss(-6, 1) for _ in answer] for _ in range(2)]
        advantage = dice.gauss(0, 1) if number % 2 else [dice.gauss(0, 1) for _ in answer]
        rollouts.append(Rollout(prompt, answer, advantage, *numbers, mask=mask))
    return rollouts


def near(rollouts: list[Rollout], values: list[torch.Tensor]) -> list[Rollout]:
    """With old log-probabilities near those of the policy, as they are in practice."""
    moved = [[v + 0.3 * (i % 5 - 2) for i, v in enumerate(own.tolist())] for own in values]
    return [
        Rollout(r.prompt, r.answer, r.advantage, old, [v - 0.1 for v in own.tolist()], r.mask)
        for r, old, own in zip(rollouts, moved, values, strict=True)
    ]


def of_transformers(model: Any, rollout: Rollout, temperature: float = 1.0) -> torch.Tensor:
    ids = torch.tensor([[*rollout.prompt, *rollout.answer]])
    logits = model(ids, use_cache=False).logits[0, len(rollout.prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1)[torch.arange(len(rollout.answer)), torch.tensor(rollout.answer)]


def loss_by_hand(model: Any, rollouts: list[Rollout]) -> torch.Tensor:
    """LOSSES, sample by sample."""
    means, tokens, sequences = [], [], []
    for rollout in rollouts:
        kept = torch.tensor([True] * len(rollout.answer) if rollout.mask is None else rollout.mask)
        advantage = torch.as_tensor(rollout.advantage, dtype=torch.float32).expand(len(kept))[kept]
        new, old, reference = (
            torch.as_tensor(values)[kept]
            for values in (of_transformers(model, rollout), rollout.old, rollout.reference)
        )
        ratio = (new - old).exp()
        kl = (reference - new).exp() - (reference - new) - 1
        means.append((-torch.min(ratio * advantage, ratio.clip(0.8, 1.28) * advantage) + 0.05 * kl).mean())
        tokens.append(-torch.min(ratio * advantage, ratio.clip(0.8, 1.2) * advantage))
        whole, mean = (new - old).mean().exp(), advantage.mean()
        sequences.append(-torch.min(whole * mean, whole.clip(0.99, 1.01) * mean))
    return torch.stack(means).mean() + 0.5 * torch.stack(sequences).mean() + 0.3 * torch.cat(tokens).mean()


def test_scores_and_step_match_transformers_on_single_rollouts(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", model_config("qwen3"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    rollouts = make_rollouts()
    with Engine.start(settings(folder, tmp_path / "run")) as engine:
        found = engine.log_probabilities(rollouts)
        for rollout, values in zip(rollouts, found, strict=True):
            torch.testing.assert_close(values, of_transformers(model, rollout).detach(), rtol=1e-6, atol=1e-6)
        rollouts = near(rollouts, found)
        metrics = engine.step(rollouts)
        gradients = full_gradients(engine.model, keep=True)
        loss = loss_by_hand(model, rollouts)
        loss.backward()
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
        for name, parameter in model.named_parameters():
            assert (gradients[name] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm(), name
        assert 0 < metrics["loss/grpo/clipped"] < 1
        assert metrics["loss/dapo/ratio"] == pytest.approx(1, abs=0.2)
        assert metrics["loss/grpo/reference_kl"] > 0
        assert (metrics["tokens"], metrics["bad_steps"]) == (sum(len(r.prompt) + len(r.answer) for r in rollouts), 0)
        before = engine.log_probabilities(rollouts, reference=True)
        torch.testing.assert_close(before, found, rtol=1e-6, atol=1e-6)
        now = engine.log_probabilities(rollouts)
        assert max((a - b).abs().max() for a, b in zip(now, found, strict=True)) > 1e-3
        on_policy = [Rollout(r.prompt, r.answer, 1.0, own, own) for r, own in zip(rollouts, now, strict=True)]
        metrics = engine.step(on_policy)
        assert metrics["loss/grpo/ratio"] == pytest.approx(1, abs=1e-6)
        assert metrics["loss/gspo/clipped"] == 0
        saved = engine.save()
        last = engine.log_probabilities(rollouts)
    with Engine.start(settings(folder, tmp_path / "run")) as engine:
        assert (engine.steps, saved.name) == (2, "step_00000002")
        torch.testing.assert_close(engine.log_probabilities(rollouts), last, rtol=0, atol=0)
        torch.testing.assert_close(engine.log_probabilities(rollouts, reference=True), before, rtol=0, atol=0)
    rows = [{"text": f"{number} and so on"} for number in range(40)]
    of_rows = settings(folder, tmp_path / "run", train={"losses": [{"kind": "cross_entropy"}]})
    with pytest.raises(UserError, match=r"^checkpoint\.resume: .* was written by omnizoo\.Engine"):
        train(of_rows, data=rows)


def test_temperature_and_cross_entropy_match_transformers(tmp_path: Path) -> None:
    """Log-probabilities at the temperature of the rollouts, of whole logits and in chunks; plain cross entropy."""
    folder = make_folder(tmp_path / "model", model_config("gemma2"))  # which caps its logits, before that
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    rollouts = make_rollouts()
    for chunked in (True, False):
        losses = [{"kind": "grpo", "options": {"temperature": 0.6, "chunked": chunked}}]
        with Engine.start(settings(folder, tmp_path / "run", train={"losses": losses})) as engine:
            found = engine.log_probabilities(rollouts)
        for rollout, values in zip(rollouts, found, strict=True):
            expected = of_transformers(model, rollout, 0.6).detach()
            torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-5)
    with Engine.start(settings(folder, tmp_path / "run", train={"losses": [{"kind": "cross_entropy"}]})) as engine:
        metrics = engine.step([Rollout(r.prompt, r.answer) for r in rollouts])
        each = torch.cat([of_transformers(model, rollout) for rollout in rollouts])
        assert metrics["loss/text"] == pytest.approx(-each.mean().item(), rel=1e-5)
    apart = [{"kind": "grpo"}, {"kind": "gspo", "options": {"temperature": 0.5}}]
    for losses, reason in (
        (apart, r"^train\.losses: .* 1 \(train.losses.0.kind: grpo\), 0.5 \(train.losses.1.kind: gspo\)"),
        ([{"kind": "dpo"}], "^train.losses: a loss on preferences"),
    ):
        with (
            pytest.raises(UserError, match=reason),
            Engine.start(settings(folder, tmp_path / "run", train={"losses": losses})),
        ):
            pass


LAYOUTS = {
    "dp2.uly2": {"ulysses": 2},
    "uly2.ring2": {"ulysses": 2, "ring": 2},
    "rep2.dp2.ep2": {"dp_replicate": 2, "ep": 2},
    "uly2.ep4": {"ulysses": 2, "ep": 4},
}


def play(process: Process, given: str, out: str) -> None:
    """Scores, a step and the weights, by one layout after the other."""
    for name, parallel in json.loads(given).items():
        config = load_config(settings(Path(out) / "model", Path(out) / "run", parallel=parallel), needs_data=False)
        mesh = build_mesh(config, process)
        engine = Engine(config, mesh)
        scores = engine.log_probabilities(make_rollouts())
        metrics = engine.step(near(make_rollouts(), scores))
        gradients = full_gradients(engine.model, keep=mesh.is_first)
        after = engine.log_probabilities(make_rollouts())
        weights = dict(engine.weights())
        assert bool(weights) == mesh.is_first
        everywhere = {key: tensor.sum().item() for key, tensor in engine.weights(everywhere=True)}
        assert len(everywhere) > 30
        if mesh.is_first:
            assert everywhere == {key: tensor.sum().item() for key, tensor in weights.items()}
            (Path(out) / f"{name}.json").write_text(json.dumps(metrics))
            tensors = {"scores": torch.cat(scores), "after": torch.cat(after)}
            tensors |= {f"gradient {key}": gradient for key, gradient in gradients.items()}
            save_file(
                tensors | {f"weight {key}": tensor for key, tensor in weights.items()}, f"{out}/{name}.safetensors"
            )
    if process.world_size > 1:
        with pytest.raises(UserError, match=r"^rollouts: rank 1 "):
            engine.log_probabilities(make_rollouts()[: 3 + (mesh.rank == 1)])
        with pytest.raises(UserError, match=r"^rollouts\[0\]\.answer: \[\]"):
            engine.log_probabilities([Rollout([1], [] if mesh.rank == 2 else [1])])


def test_layouts_of_four_ranks_match_one_process(tmp_path: Path) -> None:
    make_folder(tmp_path / "model", MOE)
    one = run_on_ranks(play, 1, json.dumps({"one": {}}), str(tmp_path))
    assert one.code == 0, one.stderr
    four = run_on_ranks(play, 4, json.dumps(LAYOUTS), str(tmp_path))
    assert four.code == 0, four.stderr
    expected, figures = load_file(tmp_path / "one.safetensors"), json.loads((tmp_path / "one.json").read_text())
    assert 0 < figures["loss/grpo/clipped"] < 1
    assert set(load_file(tmp_path / "model" / "model.safetensors")) == {
        name.removeprefix("weight ") for name in expected if name.startswith("weight ")
    }
    for layout in LAYOUTS:
        found, metrics = (
            load_file(tmp_path / f"{layout}.safetensors"),
            json.loads((tmp_path / f"{layout}.json").read_text()),
        )
        assert found.keys() == expected.keys()
        assert metrics == pytest.approx(figures, rel=1e-6, abs=1e-6), layout
        torch.testing.assert_close(found["scores"], expected["scores"], rtol=1e-6, atol=2e-6)
        torch.testing.assert_close(found["after"], expected["after"], rtol=1e-5, atol=1e-5)
        for name in (name for name in expected if name.startswith("weight")):
            assert (found[name] - expected[name]).norm() <= 1e-5 * expected[name].norm(), (layout, name)
        for name in (name for name in expected if name.startswith("gradient")):
            assert (found[name] - expected[name]).norm() <= 1e-5 * expected[name].norm(), (layout, name)


ADAPTER = {
    "kind": "lora",
    "rank": 4,
    "alpha": 8.0,
    "init": "random",
    "targets": ["all-linear", "experts.gate_up_proj", "experts.down_proj", "embed_tokens"],
}


def stream(process: Process, out: str) -> None:
    """The weights of models after a step, and the checkpoints that they are exported from, on two ranks."""
    root = Path(out)
    dora = {**ADAPTER, "kind": "dora", "targets": ["q_proj"]}
    for name, adapter in (("whole", None), ("lora", ADAPTER), ("dora", dora)):
        spec = {"path": str(root / "model"), "adapter": adapter}
        config = settings(root / "model", root / name, model=spec, parallel={"ep": process.world_size})
        mesh = build_mesh(read := load_config(config, needs_data=False), process)
        engine = Engine(read, mesh)
        engine.log_probabilities(make_rollouts())  # leaves weights gathered, were they not released
        engine.step(make_rollouts())
        engine.save()
        scores = engine.log_probabilities(make_rollouts())
        bases = engine.log_probabilities(make_rollouts(), reference=True)
        weights = dict(engine.weights())
        if mesh.is_first:
            save_file(weights, root / f"{name}.safetensors")
            save_file({"scores": torch.cat(scores), "base": torch.cat(bases)}, root / f"{name}.scores.safetensors")
        if adapter is None:
            halves = dict(engine.weights(torch.bfloat16, everywhere=True))
            assert {tensor.dtype for tensor in halves.values()} == {torch.bfloat16}
            with pytest.raises(UserError, match="adapter_only: the model has no adapter"):
                list(engine.weights(adapter_only=True))
        elif weights := dict(engine.weights(adapter_only=True)):
            save_file(weights, root / f"{name}.adapter.safetensors")


def test_quantized_base_is_trained_but_not_streamed(tmp_path: Path) -> None:
    make_folder(tmp_path / "model", MOE)
    adapter = {"rank": 2, "targets": ["all-linear"], "base": "nf4"}
    config = settings(tmp_path / "model", tmp_path / "run", model={"path": str(tmp_path / "model"), "adapter": adapter})
    with Engine.start(config) as engine:
        metrics = engine.step(make_rollouts())
        assert metrics["grad_norm"] > 0
        assert all("lora" in name for name, _ in engine.weights(adapter_only=True))
        with pytest.raises(UserError, match=r"^weights: .*nf4"):
            engine.weights()


def test_streamed_weights_match_exported_weights_exactly(tmp_path: Path) -> None:
    make_folder(tmp_path / "model", MOE)
    result = run_on_ranks(stream, 2, str(tmp_path))
    assert result.code == 0, result.stderr
    published = load_file(tmp_path / "model" / "model.safetensors")
    assert any(".experts.0.gate_proj.weight" in name for name in published)
    for name in ("whole", "lora", "dora"):
        export(tmp_path / name, tmp_path / f"{name}.out", base=None if name == "whole" else base_weights)
        exported = load_file(tmp_path / f"{name}.out" / "model.safetensors")
        streamed = load_file(tmp_path / f"{name}.safetensors")
        assert exported.keys() == streamed.keys() == published.keys()
        for key, tensor in exported.items():
            assert torch.equal(tensor, streamed[key]), (name, key)
        assert any(not torch.equal(tensor, published[key]) for key, tensor in streamed.items())
        # The model that they are is the one that scores.
        config = AutoConfig.from_pretrained(tmp_path / "model")
        model = Qwen3MoeForCausalLM.from_pretrained(None, config=config, state_dict=streamed)
        scores = load_file(tmp_path / f"{name}.scores.safetensors")
        with torch.no_grad():
            own, base = (
                torch.cat([of_transformers(each, rollout) for rollout in make_rollouts()])
                for each in (model.eval(), AutoModelForCausalLM.from_pretrained(tmp_path / "model"))
            )
        torch.testing.assert_close(scores["scores"], own, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(scores["base"], base, rtol=1e-5, atol=1e-5)
        if name != "whole":
            export(tmp_path / name, tmp_path / f"{name}.peft")
            factors = load_file(tmp_path / f"{name}.peft" / "adapter_model.safetensors")
            alone = load_file(tmp_path / f"{name}.adapter.safetensors")
            assert factors.keys() == alone.keys()
            assert all(torch.equal(factor, alone[key]) for key, factor in factors.items())


GOOD = Rollout([1, 2], [3, 4, 5], 1.0, [-1.0] * 3, [-1.0] * 3)
NUMBERS = "expected one number for each of the 3 response tokens, but got"
BAD: list[tuple[Any, str]] = [
    ({"advantage": [1.0, 2.0]}, f"rollouts[1].advantage: {NUMBERS} 2 numbers"),
    ({"advantage": "high"}, f"rollouts[1].advantage: {NUMBERS} 'high'"),
    ({"advantage": float("nan")}, "rollouts[1].advantage[0]: nan"),
    ({"advantage": None}, "rollouts[1].advantage: not set, but the loss requires it"),
    ({"old": None}, "rollouts[1].old: not set, but the loss requires it"),
    ({"old": [-1.0] * 4}, f"rollouts[1].old: {NUMBERS} 4 numbers"),
    ({"reference": None}, "rollouts[1].reference: not set, but the loss requires it"),
    ({"mask": [False] * 3}, "rollouts[1].mask: no value is true"),
    ({"mask": [True]}, f"rollouts[1].mask: {NUMBERS} 1 numbers"),
    ({"answer": []}, "rollouts[1].answer: []"),
    ({"answer": [3, 4, 512]}, "rollouts[1].answer: token id 512"),
    ({"answer": [3, -1, 5]}, "rollouts[1].answer: token id -1"),
    ({"answer": "three"}, "rollouts[1].answer: 'three'"),
    ({"prompt": []}, "rollouts[1].prompt: []"),
    ({"prompt": [[1, 2]]}, "rollouts[1].prompt: [[1, 2]]"),
    ({"prompt": [1] * 62}, "rollouts[1]: the rollout has 65 tokens, but data.pack_tokens is 64"),
    ({"prompt": [{"role": "user", "content": 7}]}, "rollouts[1].prompt: the prompt cannot be used: "),
    ({"extra": {"value": [0.0] * 3}}, "rollouts[0].value: not set, but other rollouts have it"),
]


def test_invalid_rollouts_raise_one_line(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", model_config("qwen3"))
    with Engine.start(settings(folder, tmp_path / "run")) as engine:
        for changes, reason in BAD:
            with pytest.raises(UserError) as caught:
                engine.step([GOOD, replace(GOOD, **changes)])
            assert str(caught.value).startswith(reason)
            assert "\n" not in str(caught.value)
        for rollouts in ([], GOOD, [{"prompt": [1]}], 7):
            with pytest.raises(UserError, match=r"^rollouts(\[0\])?: .*omnizoo.Rollout"):
                engine.log_probabilities(rollouts)
        assert engine.steps == 0
        metrics = engine.step([replace(GOOD, old=[-1e30] * 3)])  # a ratio without bounds
        assert metrics["bad_steps"] == 1
        chat = [{"role": "user", "content": "What is the capital of France?"}]
        rendered = engine.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        found = engine.log_probabilities([Rollout(chat, [3, 4]), Rollout(rendered, [3, 4])])
        torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-6)
