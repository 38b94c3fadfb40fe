"""How long a rank takes to plan a step of a large world: read what all ranks tell, share out, and find its own routes.

    python benchmarks/dealing.py                # 1,024 ranks with 64 items each

Nothing is sent: messages of all ranks are made first, and what one rank does with them is timed.
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
NOTE = {"error": None, "counters": {"skipped_rows": 0, "undecodable_rows": 0}, "bad_rows": []}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--items", type=int, default=64, help="per rank")
    parser.add_argument("--packs", type=int, default=1, help="per rank that has packs of its own")
    parser.add_argument("--ulysses", type=int, default=1)
    args = parser.parse_args()
    layout = Layout(dp_shard=args.ranks // args.ulysses, ulysses=args.ulysses)
    random = np.random.default_rng(0)
    packs = [random_pack(i, args.items * args.ulysses // args.packs, random) for i in range(layout.dp * args.packs)]
    told = [PackTable.from_packs(packs[rank :: args.ranks], PORTS, cost) for rank in range(args.ranks)]
    messages = [np.frombuffer(encode_message(each, NOTE), np.uint8) for each in told]
    best: dict[str, float] = {}
    for _ in range(20):
        times = [time.perf_counter()]
        encode_message(PackTable.from_packs(packs[0 :: args.ranks], PORTS, cost), NOTE)
        times.append(time.perf_counter())
        heard, _ = decode_messages(messages)
        times.append(time.perf_counter())
        plan = plan_step(heard, layout, 1, [[port] for port in PORTS], cost)
        times.append(time.perf_counter())
        for each in plan.rounds:
            each.owned(0)
            each.routes(0)
        times.append(time.perf_counter())
        parts = dict(zip(("tell", "hear", "plan", "routes"), np.diff(times) * 1e3, strict=True))
        if not best or sum(parts.values()) < sum(best.values()):
            best = parts
    figures = {name: round(value, 1) for name, value in best.items()} | {"all": round(sum(best.values()), 1)}
    print(json.dumps(vars(args) | {"ms": figures, "imbalance": {k: round(v, 3) for k, v in plan.imbalance.items()}}))


def random_pack(index: int, items: int, random: np.random.Generator) -> Pack:
    """A pack of 16 samples, whose items take up to 64 places."""
    places = random.integers(4, 64, items)
    lengths = [int(places[i::16].sum() + 100) for i in range(16)]
    held, start = [], 0
    for i, length in enumerate(lengths):
        at = start
        for taken in places[i::16].tolist():
            size = MediaSize(taken, float(taken**2 + 100 * taken))
            held.append(MediaItem(PORTS[int(random.random() < 0.3)], size, ((at, taken),), False))
            at += taken
        start += length
    labels = np.where(np.arange(start) < 500, 0, IGNORE_INDEX)
    columns = make_columns(input_ids=np.zeros(start), labels=labels)
    return Pack(index, columns, lengths, [str(i) for i in range(len(lengths))], tuple(held))


def cost(pack: Pack) -> float:
    return float(sum(length**2 + 1000 * length for length in pack.lengths))


if __name__ == "__main__":
    main()
