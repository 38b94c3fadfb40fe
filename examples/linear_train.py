"""The whole training loop by hand, from the public API alone: what `omnizoo train` does, without its comforts.

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
        # Who is where: FSDP2/HSDP axes over all processes.
        mesh = omnizoo.build_mesh(config, process)

        # The untouched Hugging Face class on meta.
        tokenizer = omnizoo.load_tokenizer(config.model)
        model = omnizoo.build_model(config.model, config.train.precision)

        # Rows -> packs, media decoded: the same packs at the same step for any layout.
        media = omnizoo.read_modalities(model, config.model)
        loader = omnizoo.build_loader(config, tokenizer, mesh.rank, mesh.layout.world, **media)
        config = omnizoo.count_steps(config, loader.reader, mesh)  # of train.epochs, if that is set

        # Shards, then weights.
        origin = omnizoo.find_checkpoint(config, checkpoints, mesh)
        omnizoo.parallelize_model(model, mesh, config, load=origin.checkpoint is None)
        optimizer = omnizoo.build_optimizer(model, config)

        # Packs are assigned to ranks by cost; losses are means over the whole step.
        balancer = omnizoo.Balancer(model, mesh, config)
        objective = omnizoo.build_objective(model, mesh, config)
        start, state = 0, omnizoo.load_checkpoint(origin, model, optimizer)
        if state:
            start = state["step"]
            loader.load_state_dict(state["loader"])

        for step in range(start + 1, config.train.steps + 1):
            data = omnizoo.next_step(loader, balancer)
            result = omnizoo.train_step(objective, optimizer, data, step)
            if mesh.is_first:
                print(f"step {step}/{config.train.steps}  loss {result.loss:.6f}  grad norm {result.grad_norm:.4f}")

        lanes = mesh.gather(loader.state_dict())
        state = {"run": origin.run, "loader": omnizoo.merge_states(lanes) if mesh.is_first else None}
        omnizoo.save_checkpoint(checkpoints, config.train.steps, model, optimizer, state, mesh, config, tokenizer)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
