"""Find the rule for a key of another trainer, and detect the trainer that a config belongs to."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from omnizoo.config import reference
from omnizoo.config.foreign import axolotl, llama_factory, ms_swift, trl, veomni
from omnizoo.config.foreign.base import Rule, Trainer

TRAINERS: dict[str, Trainer] = {
    module.TRAINER.name: module.TRAINER for module in (veomni, llama_factory, ms_swift, trl, axolotl)
}
MIN_DETECTED = 3  # minimum number of a trainer's keys in a config of this trainer
UNIQUE = 3  # weight of a key that only one trainer has


def flatten(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and value of each leaf of nested mappings."""
    for name, value in fields.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


@cache
def rules_by_name() -> dict[str, list[Rule]]:
    """Return the rules of all trainers by name in lower case.

    The last part of a nested name is a name if it has two words.
    """
    by_name: dict[str, list[Rule]] = {}
    by_last_part: dict[str, list[Rule]] = {}
    for trainer in TRAINERS.values():
        for rule in trainer.rules:
            for rule_name in rule.names:
                name = rule_name.lower()
                by_name.setdefault(name, []).append(rule)
                last = name.rpartition(".")[2]
                if "." in name and "_" in last:
                    by_last_part.setdefault(last, []).append(rule)
    return by_last_part | by_name


def hint_for(key: str, value: Any = None) -> str | None:
    """Return a hint about a key of another trainer, as the continuation of "is not a key"; None if it is unknown.

    For a mapping, the hint describes the nested keys.
    """
    if isinstance(value, Mapping):
        hints = {f"{name}: {hint}": None for name, _ in flatten(value) if (hint := hint_for(f"{key}.{name}"))}
        if hints:
            return "; ".join([*hints][:4])
    rule = _rule_for(key)
    return rule.hint if rule is not None else None


def _rule_for(key: str) -> Rule | None:
    """Return the rule of any trainer for a dotted key, or for its last part in another section."""
    plain = key.lower().replace("-", "_")
    names = [plain]
    if plain.count(".") == 1:  # such as `train.learning_rate`
        names.append(plain.rpartition(".")[2])
    for name in names:
        rules = rules_by_name().get(name)
        if rules:
            return rules[0]
    for name in names:
        for trainer in TRAINERS.values():
            rule = trainer.find(name)
            if rule is not None:
                return rule
    return None


def detect(fields: Mapping[str, Any]) -> Trainer | None:
    """Return the trainer whose keys `fields` contains; None if there is no clear answer."""
    keys = [key for key, _ in flatten(fields)]
    scores = {name: _score(trainer, keys) for name, trainer in TRAINERS.items()}
    ranked = sorted(scores, key=lambda name: scores[name], reverse=True)
    best, second = ranked[:2]
    if scores[best] < MIN_DETECTED or scores[best] == scores[second]:
        return None
    return TRAINERS[best]


def detect_foreign(fields: Mapping[str, Any]) -> Trainer | None:
    """Return the trainer of a config if most of its keys belong to another trainer; None for our own configs."""
    if any(not isinstance(name, str) for name in fields):
        return None
    known = {key.key for key in reference.all_keys()}
    keys = [key for key, _ in flatten(fields)]
    foreign = [key for key in keys if reference.schema_key(key) not in known and not _is_below_known(key, known)]
    if len(foreign) < MIN_DETECTED or 2 * len(foreign) < len(keys):
        return None
    return detect(fields)


def _is_below_known(key: str, known: Collection[str]) -> bool:
    """Whether `key` is inside the value of one of our keys, such as `model.config.hidden_size`."""
    parts = reference.schema_key(key).split(".")
    return any(".".join(parts[:length]) in known for length in range(2, len(parts)))


def _score(trainer: Trainer, keys: Iterable[str]) -> int:
    """Return the number of keys of a trainer. Keys that no other trainer has count more."""
    score = 0
    for key in keys:
        if trainer.find(key) is not None:
            is_unique = all(other is trainer or other.find(key) is None for other in TRAINERS.values())
            score += UNIQUE if is_unique else 1
    return score
