"""Time that a rank needs to plan a step with many ranks: decode metadata, assign packs and items, find its routes.

    python benchmarks/dealing.py                # 1,024 ranks with 64 items each

Nothing is sent. The messages of all ranks are created first, and the work of one rank on them is timed.
"""

import argparse
import json
import time

import numpy as np

from omnizoo.balancing.pack_metadata import PackTable, decode_messages, encode_message
from omnizoo.balancing.step_plan import plan_step
from omnizoo.data.packing.pack import Pack
from omnizoo.data.token_fields import IGNORE_INDEX, make_columns
from omnizoo.modalities.item import MediaItem, MediaSize, Port
from omnizoo.parallel.layout import Layout

PORTS = [Port("image", "encoder"), Port("audio", "encoder")]
STATUS = {"error": None, "counters": {"skipped_rows": 0, "undecodable_rows": 0}, "bad_rows": []}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024, help="world size (default: 1024)")
    parser.add_argument("--items", type=int, default=64, help="media items per rank (default: 64)")
    parser.add_argument("--packs", type=int, default=1, help="packs per data-parallel rank (default: 1)")
    parser.add_argument("--ulysses", type=int, default=1, help="ranks that share a pack (default: 1)")
    args = parser.parse_args()
    layout = Layout(dp_shard=args.ranks // args.ulysses, ulysses=args.ulysses)
    random = np.random.default_rng(0)
    packs = [random_pack(i, args.items * args.ulysses // args.packs, random) for i in range(layout.dp * args.packs)]
    tables = [PackTable.from_packs(packs[rank :: args.ranks], PORTS, cost) for rank in range(args.ranks)]
    messages = [np.frombuffer(encode_message(table, STATUS), np.uint8) for table in tables]
    best: dict[str, float] = {}
    for _ in range(20):
        times = [time.perf_counter()]
        encode_message(PackTable.from_packs(packs[0 :: args.ranks], PORTS, cost), STATUS)
        times.append(time.perf_counter())
        table, _ = decode_messages(messages)
        times.append(time.perf_counter())
        plan = plan_step(table, layout, 1, [[port] for port in PORTS], cost)
        times.append(time.perf_counter())
        for micro_batch in plan.rounds:
            micro_batch.owned(0)
            micro_batch.routes(0)
        times.append(time.perf_counter())
        parts = dict(zip(("encode", "decode", "plan", "routes"), np.diff(times) * 1e3, strict=True))
        if not best or sum(parts.values()) < sum(best.values()):
            best = parts
    figures = {name: round(value, 1) for name, value in best.items()} | {"total": round(sum(best.values()), 1)}
    print(json.dumps(vars(args) | {"ms": figures, "imbalance": {k: round(v, 3) for k, v in plan.imbalance.items()}}))


def random_pack(index: int, items: int, random: np.random.Generator) -> Pack:
    """Return a pack of 16 samples, whose items have up to 64 placeholder tokens each."""
    num_placeholders = random.integers(4, 64, items)
    lengths = [int(num_placeholders[i::16].sum() + 100) for i in range(16)]
    media: list[MediaItem] = []
    start = 0
    for i, length in enumerate(lengths):
        position = start
        for count in num_placeholders[i::16].tolist():
            size = MediaSize(count, float(count**2 + 100 * count))
            port = PORTS[int(random.random() < 0.3)]
            media.append(MediaItem(port, size, ((position, count),), False))
            position += count
        start += length
    labels = np.where(np.arange(start) < 500, 0, IGNORE_INDEX)
    columns = make_columns(input_ids=np.zeros(start), labels=labels)
    return Pack(index, columns, lengths, [str(i) for i in range(len(lengths))], tuple(media))


def cost(pack: Pack) -> float:
    """Return a cost with a quadratic part, as attention has."""
    return float(sum(length**2 + 1000 * length for length in pack.lengths))


if __name__ == "__main__":
    main()
