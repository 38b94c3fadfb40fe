"""Plan the cost of a token (FLOPs, bytes, host syncs, memory) for a config, and predict the speed.

    python benchmarks/expected_speed.py examples/gpu/qwen3_30b_a3b.yaml --world 8
    python benchmarks/expected_speed.py examples/gpu/qwen3_omni_32k.yaml --world 128 \\
        --layers model.config.text_config.num_hidden_layers

The config is planned with 1 and 2 layers and extrapolated linearly to all its layers, because a plan of all layers
(`omnizoo plan`) takes minutes. Config keys can be set as for `train`.
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

CUTS = (1, 2)  # planned numbers of layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="YAML file")
    parser.add_argument("--world", type=int, default=8, help="number of ranks (default: 8)")
    parser.add_argument("--device", default="h100", help="device, as for `omnizoo plan` (default: h100)")
    parser.add_argument(
        "--layers",
        default="model.config.num_hidden_layers",
        help="config key of the number of layers (default: model.config.num_hidden_layers)",
    )
    options, overrides = parser.parse_known_args()
    quiet()
    place = Place(options.world, 0, read_device(options.device))
    config: Any = load_config(options.config, overrides, needs_data=False).model_dump()
    num_layers = int(reduce(lambda section, name: section[name], options.layers.split("."), config))
    cuts = []
    for layers in CUTS:
        # With few layers, the default would keep all weights gathered, unlike with all layers.
        keys = [*overrides, "--parallel.reshard_after_forward", "true", f"--{options.layers}", str(layers)]
        cuts.append(numbers_of(simulate(load_config(options.config, keys, needs_data=False), place), options.world))
    numbers = on_a_line(CUTS, cuts, num_layers)
    counts = counts_in(numbers)
    expected = expect(counts, place.device)
    assert expected is not None
    tokens = counts.tokens
    print(f"{options.config} {' '.join(overrides)} on {options.world}: {tokens:,.0f} tokens per device and step")
    print(f"peak {numbers['peak'] / GIB:.1f} GiB, {counts.syncs} host syncs and {counts.launched:,} operators per step")
    print(f"per token: {sum(counts.matmuls.values()) / tokens / 1e9:.1f} GFLOPs in matmuls, ", end="")
    print(f"{counts.attention / tokens / 1e9:.1f} in attention, {counts.moved / tokens / 1e6:.1f} MB of memory")
    for collective, size in sorted(counts.sent.items(), key=lambda pair: -pair[1]):
        if size / tokens > 1e3:
            reach = "inside a node" if collective.inside_node else "across nodes"
            print(f"  {collective.op} along {collective.axis}: {size / tokens / 1e3:,.0f} kB per token, {reach}")
    for part, seconds in asdict(expected).items():
        if part != "tokens":
            print(f"  {PARTS_OF_A_STEP[part]}: {seconds:.3f} s ({seconds / expected.seconds:.0%})")
    mfu = numbers["flops"] / options.world / expected.seconds / place.device.bf16_tflops / 1e12
    print(f"expected: {expected.tokens_per_second:,.0f} tokens/s per device, MFU {mfu:.1%}; a prediction, ", end="")
    print(CALIBRATION)


if __name__ == "__main__":
    main()
