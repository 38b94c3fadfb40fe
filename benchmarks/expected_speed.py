"""What a token costs, by a plan, and how fast that should be: bytes, FLOPs, waits and memory of a config.

    python benchmarks/expected_speed.py examples/gpu/qwen3_30b_a3b.yaml --world 8
    python benchmarks/expected_speed.py examples/gpu/qwen3_omni_32k.yaml --world 128 \\
        --layers model.config.text_config.num_hidden_layers

Planned with 1 and 2 layers, and taken on along a line to the layers that the config has; the whole plan (`omnizoo
plan`) takes minutes. Further keys of the config can be set as for `train`.
"""

import argparse
from dataclasses import asdict
from functools import reduce
from typing import Any

from calibrate import GIB, counts_in, numbers_of, on_a_line

from omnizoo.cli.plan import PARTS_OF_A_STEP, quiet
from omnizoo.config.load import load_config
from omnizoo.planning.devices import read_device
from omnizoo.planning.dry_run import Place, simulate
from omnizoo.planning.time_model import CALIBRATION, expect

CUTS = (1, 2)  # layers that are planned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--device", default="h100")
    parser.add_argument("--layers", default="model.config.num_hidden_layers", help="the key of their number")
    options, overrides = parser.parse_known_args()
    quiet()
    place = Place(options.world, 0, read_device(options.device))
    config: Any = load_config(options.config, overrides, needs_data=False).model_dump()
    wanted = int(reduce(lambda at, name: at[name], options.layers.split("."), config))
    cuts = []
    for layers in CUTS:
        # Of a few layers all weights would be kept: said, so that it is as with all layers.
        keys = [*overrides, "--parallel.reshard_after_forward", "true", f"--{options.layers}", str(layers)]
        cuts.append(numbers_of(simulate(load_config(options.config, keys, needs_data=False), place), options.world))
    numbers = on_a_line(CUTS, cuts, wanted)
    counts = counts_in(numbers)
    found = expect(counts, place.device)
    assert found is not None
    tokens = counts.tokens
    print(f"{options.config} {' '.join(overrides)} on {options.world}: {tokens:,.0f} tokens per device and step")
    print(f"peak {numbers['peak'] / GIB:.1f} GiB, {counts.syncs} waits and {counts.launched:,} operators a step")
    print(f"per token: {sum(counts.matmuls.values()) / tokens / 1e9:.1f} GFLOPs in matmuls, ", end="")
    print(f"{counts.attention / tokens / 1e9:.1f} in attention, {counts.moved / tokens / 1e6:.1f} MB of memory")
    for each, size in sorted(counts.sent.items(), key=lambda pair: -pair[1]):
        if size / tokens > 1e3:
            reach = "inside a node" if each.inside_node else "across nodes"
            print(f"  {each.op} along {each.axis}: {size / tokens / 1e3:,.0f} kB per token, {reach}")
    for part, seconds in asdict(found).items():
        if part != "tokens":
            print(f"  {PARTS_OF_A_STEP[part]}: {seconds:.3f} s ({seconds / found.seconds:.0%})")
    mfu = numbers["flops"] / options.world / found.seconds / place.device.bf16_tflops / 1e12
    print(f"expected: {found.tokens_per_second:,.0f} tokens/s per device, MFU {mfu:.1%}; a prediction, ", end="")
    print(CALIBRATION)


if __name__ == "__main__":
    main()
