"""Memory, FLOP/s and bandwidth of accelerators, from data sheets. The bandwidths of links are approximate."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path

import yaml

from omnizoo.config.errors import UserError


@dataclass(frozen=True)
class Device:
    """Properties of an accelerator. 0 means unknown."""

    memory_gb: float  # advertised size, used as GiB, which is closer to the real size of 80 GB devices
    per_node: int = 8  # devices per node
    bf16_tflops: float = 0.0  # dense peak, accumulated in fp32
    inside_gb_per_s: float = 0.0  # bandwidth to the other devices of a node, one direction
    across_gb_per_s: float = 0.0  # bandwidth to other nodes, per device, one direction
    memory_gb_per_s: float = 0.0  # bandwidth of the device memory
    fp32_tflops: float = 0.0  # peak of matmuls that are not in 16 bits
    save_gb_per_s: float = 2.0  # bandwidth of a node to the checkpoint storage; a guess, which a device file can set


DEVICES = {
    "a100": Device(80, 8, 312.0, 300, 25, 2039, 19.5),
    "h100": Device(80, 8, 989.0, 450, 50, 3350, 67.0),
    "h200": Device(141, 8, 989.0, 450, 50, 4800, 67.0),
    "b200": Device(180, 8, 2250.0, 900, 50, 8000, 80.0),
    "mi300x": Device(192, 8, 1307.4, 448, 50, 5300, 163.4),
}
LARGEST_FILE = 2**16


def read_device(name: str) -> Device:
    """Return the device with this name, or read it from a YAML file with the fields of `Device`.

    Raises:
        UserError: If `name` is neither a known device nor a valid file.
    """
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
