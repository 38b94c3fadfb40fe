"""A complete training loop that uses only the public API: the core of `omnizoo train`.

python examples/linear_train.py examples/text_tiny.yaml --train.steps 20 --log.dir runs/linear
torchrun --standalone --nproc-per-node 2 examples/linear_train.py examples/text_tiny.yaml
"""

import sys
from pathlib import Path

import omnizoo


def main(path: str, overrides: list[str]) -> None:
    config = omnizoo.load_config(path, overrides)
    checkpoints = Path(config.log.dir) / "checkpoints"

    with omnizoo.process_group() as process:
        # The device mesh: FSDP2/HSDP and the other parallel axes over all ranks.
        mesh = omnizoo.build_mesh(config, process)

        # The unmodified Hugging Face class on the meta device.
        tokenizer = omnizoo.load_tokenizer(config.model)
        model = omnizoo.build_model(config.model, config.train.precision)

        # The loader renders rows to packs and decodes media. Each step has the same packs on every layout.
        media = omnizoo.read_modalities(model, config.model)
        loader = omnizoo.build_loader(config, tokenizer, mesh.rank, mesh.layout.world, **media)
        config = omnizoo.count_steps(config, loader.reader, mesh)  # if train.epochs is set

        # Shard the model, then load its weights.
        starting_point = omnizoo.find_checkpoint(config, checkpoints, mesh)
        omnizoo.parallelize_model(model, mesh, config, load=starting_point.checkpoint is None)
        optimizer = omnizoo.build_optimizer(model, config)

        # The balancer assigns packs to ranks by cost. Losses are means over all targets of the step.
        balancer = omnizoo.Balancer(model, mesh, config)
        objective = omnizoo.build_objective(model, mesh, config)

        start = 0
        state = omnizoo.load_checkpoint(starting_point, model, optimizer)
        if state:
            start = state["step"]
            loader.load_state_dict(state["loader"])

        for step in range(start + 1, config.train.steps + 1):
            data = omnizoo.next_step(loader, balancer)
            result = omnizoo.train_step(objective, optimizer, data, step)
            if mesh.is_first:
                print(f"step {step}/{config.train.steps}  loss {result.loss:.6f}  grad norm {result.grad_norm:.4f}")

        loader_states = mesh.gather(loader.state_dict())
        loader_state = omnizoo.merge_states(loader_states) if mesh.is_first else None
        state = {"run": starting_point.run, "loader": loader_state}
        omnizoo.save_checkpoint(checkpoints, config.train.steps, model, optimizer, state, mesh, config, tokenizer)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
