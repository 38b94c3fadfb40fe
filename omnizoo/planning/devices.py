"""Accelerators, as far as a plan must know them: memory, FLOP/s and bandwidth of data sheets; links are rough."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path

import yaml

from omnizoo.config.errors import UserError


@dataclass(frozen=True)
class Device:
    memory_gb: float  # as it is sold, and taken as GiB: what 80 GB devices have is nearer to that
    per_node: int = 8
    bf16_tflops: float = 0.0  # dense, accumulated in fp32
    inside_gb_per_s: float = 0.0  # to the other devices of a node, one direction
    across_gb_per_s: float = 0.0  # to other nodes, per device, one direction
    memory_gb_per_s: float = 0.0  # between the device and its own memory
    fp32_tflops: float = 0.0  # of matmuls that are not in bf16
    save_gb_per_s: float = 2.0  # of a node to where checkpoints are kept: a guess, put your own in a file


DEVICES = {
    "a100": Device(80, 8, 312.0, 300, 25, 2039, 19.5),
    "h100": Device(80, 8, 989.0, 450, 50, 3350, 67.0),
    "h200": Device(141, 8, 989.0, 450, 50, 4800, 67.0),
    "b200": Device(180, 8, 2250.0, 900, 50, 8000, 80.0),
    "mi300x": Device(192, 8, 1307.4, 448, 50, 5300, 163.4),
}
LARGEST_FILE = 2**16


def read_device(name: str) -> Device:
    """A device by name, or of one's own, from a YAML file with the fields of `Device`."""
    if name in DEVICES:
        return DEVICES[name]
    path = Path(name)
    example = ", ".join(f"{key}: {value:g}" for key, value in asdict(DEVICES["h100"]).items())
    expected = f"expected {', '.join(DEVICES)}, or a YAML file such as `{example}` with one key per line"
    if not path.is_file():
        raise UserError(f"--device is {name!r}; {expected}")
    try:
        with path.open(encoding="utf-8") as file:
            found = yaml.safe_load(file.read(LARGEST_FILE))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--device: cannot read {name}: {str(error).splitlines()[0]}; {expected}") from error
    known = {field.name for field in fields(Device)}
    if not isinstance(found, dict) or set(found) - known or "memory_gb" not in found:
        wrong = ", ".join(sorted(map(str, set(found) - known))) if isinstance(found, dict) else "no mapping"
        raise UserError(f"--device: {name} has {wrong or 'no memory_gb'}; {expected}")
    for key, value in found.items():
        whole = key == "per_node"
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not 0 < value < 1e9:
            raise UserError(
                f"--device: {name}: {key} is {value!r}; expected a {'whole ' if whole else ''}number above 0"
            )
    return Device(**found)
