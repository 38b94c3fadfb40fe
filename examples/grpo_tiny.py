"""GRPO on a small model, with transformers as the rollout engine: it learns to respond with digits (docs/how-to/rl.md).

    python examples/grpo_tiny.py --log.dir runs/grpo_tiny
    torchrun --standalone --nproc-per-node 2 examples/grpo_tiny.py --parallel.ulysses 2

The model starts from random weights: at first, one in eight of its tokens is a digit. The run takes half a minute on a
laptop.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

import omnizoo

ROUNDS = 12
GROUP = 16  # responses per prompt
TOKENS = 8  # tokens per response
QUESTIONS = ["How many stars?", "What is 7 plus 5?", "Say a number.", "How old is the tree?"]


def settings() -> dict:
    """Return the config: the model of text_tiny.yaml with the GRPO loss."""
    config = yaml.safe_load((Path(__file__).parent / "text_tiny.yaml").read_text())
    losses = [{"kind": "grpo", "options": {"clip_high": 0.28}}]
    train = {"lr": 1e-3, "schedule": "constant", "losses": losses}
    return {"model": config["model"], "data": {"pack_tokens": 512}, "train": train, "log": {"dir": "runs/grpo_tiny"}}


def generate_rollouts(engine: omnizoo.Engine, weights: dict[str, torch.Tensor]) -> list[omnizoo.Rollout]:
    """Generate a group of responses to each question with `weights`, as a rollout engine does."""
    config = AutoConfig.for_model(**engine.config.model.config)
    policy = type(AutoModelForCausalLM.from_config(config)).from_pretrained(None, config=config, state_dict=weights)
    rollouts = []
    for question in QUESTIONS:
        prompt = [{"role": "user", "content": question}]
        ids = engine.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt")
        ids["input_ids"] = ids["input_ids"].repeat(GROUP, 1)
        ids["attention_mask"] = torch.ones_like(ids["input_ids"])
        out = policy.generate(**ids, do_sample=True, top_k=0, min_new_tokens=TOKENS, max_new_tokens=TOKENS)
        rollouts += [omnizoo.Rollout(prompt, response) for response in out[:, -TOKENS:].tolist()]
    return rollouts


def reward(engine: omnizoo.Engine, rollout: omnizoo.Rollout) -> float:
    """Return the fraction of response tokens that are digits."""
    are_digits = [engine.tokenizer.decode([token]).strip().isdigit() for token in rollout.answer]
    return sum(are_digits) / len(are_digits)


def main(overrides: list[str]) -> None:
    torch.manual_seed(0)
    with omnizoo.Engine.start(settings(), overrides) as engine:
        for number in range(1, ROUNDS + 1):
            weights = dict(engine.weights())  # full tensors on rank 0, empty elsewhere; all ranks must call it
            rollouts = engine.mesh.from_first(generate_rollouts(engine, weights) if weights else None)
            rewards = torch.tensor([reward(engine, rollout) for rollout in rollouts]).view(-1, GROUP)
            advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
            old_log_probs = engine.log_probabilities(rollouts)
            results = zip(rollouts, advantages.flatten().tolist(), old_log_probs, strict=True)
            rollouts = [replace(rollout, advantage=advantage, old=old) for rollout, advantage, old in results]
            for _ in range(2):  # the second step is slightly off-policy, so the ratios differ from 1
                metrics = engine.step(rollouts)
            if engine.mesh.is_first:
                figures = "  ".join(f"{name} {metrics[f'loss/grpo/{name}']:.4f}" for name in ("ratio", "clipped", "kl"))
                print(f"round {number:2}  reward {rewards.mean():.3f}  {figures}", flush=True)
        engine.save()


if __name__ == "__main__":
    main(sys.argv[1:])
