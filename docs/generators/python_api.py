"""Python API reference of the names in `omnizoo.__all__`, read statically by griffe."""

import re
from collections.abc import Iterator

import griffe

from generators.markdown import directive, sentence
from generators.source import constant, file_of, member

# Heading -> beginnings of the modules whose names it lists, in this order.
SUBJECTS = {
    "Commands as functions": (
        *("training.loop", "training.evaluation.evaluate_checkpoint", "checkpoint.export_run", "cli.generate"),
        *("reporting.results", "checkpoint.export"),
    ),
    "Training": ("training.step", "training.objective", "training.optimizers", "balancing"),
    "Configuration": ("config",),
    "Models and processes": ("models.build", "models.read_config", "models.interfaces", "parallel", "parallelize"),
    "Losses": ("training.losses", "training.local_batch"),
    "Data": ("data",),
    "Modalities": ("modalities", "models.media"),
    "Callbacks and loggers": ("training.callbacks",),
    "Checkpoints": ("checkpoint",),
    "Evaluation and generation": ("training.evaluation", "generation"),
    "Reinforcement learning": ("rl",),
    "Run folders and reports": ("reporting",),
    "Recipes": ("models.recipe",),
}
CONFIG_SECTIONS = {
    "Config": "",
    "ModelSection": "model",
    "TrainSection": "train",
    "OptimizerSection": "optimizer",
}


def public_names() -> str:
    """Return a section for each subject, with an entry for each public name."""
    home: dict[str, str] = constant("omnizoo", "_HOME")
    by_prefix: dict[str, list[str]] = {}
    for name, module in home.items():
        by_prefix.setdefault(_prefix(module), []).append(name)
    parts = []
    for subject, prefixes in SUBJECTS.items():
        parts.append(f"## {subject}\n")
        for prefix in prefixes:
            parts += [_entry(name, member(home[name], name)) for name in by_prefix.get(prefix, [])]
    return "\n".join(parts)


def _prefix(module: str) -> str:
    """Return the entry of `SUBJECTS` that covers a module: the longest one.

    Raises:
        LookupError: If `SUBJECTS` does not cover the module.
    """
    path = module.removeprefix("omnizoo.")
    known = [prefix for prefixes in SUBJECTS.values() for prefix in prefixes]
    matching = [prefix for prefix in known if f"{path}.".startswith(f"{prefix}.")]
    if not matching:
        raise LookupError(f"{module} exports public names; add it to SUBJECTS of docs/generators/python_api.py")
    return max(matching, key=len)


def _entry(name: str, found: griffe.Object | griffe.Alias) -> str:
    full_name = f"omnizoo.{name}"
    if isinstance(found, griffe.Function):
        kind = "py:function"
        return directive(kind, full_name + _signature(found), {}, _text(found))
    if isinstance(found, griffe.Class):
        return _class(full_name, found)
    assert isinstance(found, griffe.Attribute)
    return directive("py:data", full_name, {}, f"{_comment(found)}\n\n`{found.value}`".strip())


def _class(full_name: str, cls: griffe.Class) -> str:
    """Return a class with its public methods and fields, and those of its bases that are not public themselves."""
    name = full_name.rpartition(".")[2]
    if name in CONFIG_SECTIONS:
        section = CONFIG_SECTIONS[name]
        page = f"configuration/{section}.md" if section else "configuration.md"
        about = f"The section `{section}` of the config." if section else "A checked config, with all defaults."
        return directive("py:class", full_name, {}, f"{about} Its fields are [the keys](../reference/{page}).")
    parts = [_text(cls)]
    for owner in (cls, *cls.mro()):
        if owner is not cls and (owner.name in constant("omnizoo", "_HOME") or not owner.path.startswith("omnizoo.")):
            continue
        for member_name, found in owner.members.items():
            if not member_name.startswith("_") and member_name not in _names_before(cls, owner):
                parts.append(_member(member_name, found))
    is_exception = any(str(base).endswith(("Exception", "Error")) for base in cls.bases)
    kind = "py:exception" if is_exception else "py:class"
    return directive(kind, full_name + _constructor(cls), {}, "\n".join(parts), colons=4)


def _names_before(cls: griffe.Class, owner: griffe.Class) -> set[str]:
    """Return the names that a class and the bases before `owner` define."""
    names: set[str] = set()
    for earlier in (cls, *cls.mro()):
        if earlier is owner:
            break
        names |= earlier.members.keys()
    return names


def _member(name: str, found: griffe.Object | griffe.Alias) -> str:
    if isinstance(found, griffe.Function):
        options = {}
        for label in ("staticmethod", "classmethod"):
            if label in found.labels:
                options[label] = ""
        return directive("py:method", name + _signature(found), options, _text(found))
    if isinstance(found, griffe.Attribute):
        if "property" in found.labels:
            return directive("py:property", name, _annotation(found), _text(found))
        if found.annotation is None:
            return ""
        return directive("py:attribute", name, _annotation(found), _text(found) or sentence(_comment(found)))
    return ""


def _annotation(attribute: griffe.Attribute) -> dict[str, str]:
    return {} if attribute.annotation is None else {"type": str(attribute.annotation).strip("'\"")}


def _constructor(cls: griffe.Class) -> str:
    """Return the arguments of a class that is meant to be called, "" for one that is not."""
    if "dataclass" in cls.labels:
        return f"({', '.join(_dataclass_fields(cls))})"
    init = cls.members.get("__init__")
    return _signature(init, is_constructor=True) if isinstance(init, griffe.Function) else ""


def _dataclass_fields(cls: griffe.Class) -> Iterator[str]:
    for name, found in cls.members.items():
        if isinstance(found, griffe.Attribute) and found.annotation is not None and "property" not in found.labels:
            if str(found.annotation).startswith("ClassVar"):
                continue
            value = "..." if len(str(found.value)) > 20 else str(found.value)
            yield name if found.value is None else f"{name}={value}"


def _signature(function: griffe.Function, is_constructor: bool = False) -> str:
    """Return the parameters as in the source. Context managers show what `with` gives."""
    words: list[str] = []
    marks: dict[griffe.ParameterKind, str] = {
        griffe.ParameterKind.var_positional: "*",
        griffe.ParameterKind.var_keyword: "**",
    }
    is_after_star = False
    for parameter in function.parameters:
        if parameter.name in ("self", "cls"):
            continue
        assert parameter.kind is not None
        if parameter.kind == griffe.ParameterKind.keyword_only and not is_after_star:
            words.append("*")
            is_after_star = True
        is_after_star = is_after_star or parameter.kind == griffe.ParameterKind.var_positional
        word = marks.get(parameter.kind, "") + parameter.name
        if parameter.annotation is not None:
            word += f": {str(parameter.annotation).strip(chr(34)).strip(chr(39))}"
        if parameter.default is not None and parameter.kind not in marks:
            word += f" = {parameter.default}"
        words.append(word)
    returns = "" if is_constructor or function.returns is None else f" -> {_returns(function)}"
    return f"({', '.join(words)}){returns}"


def _returns(function: griffe.Function) -> str:
    returned = str(function.returns).strip("'\"")
    decorators = [str(decorator.value) for decorator in function.decorators]
    iterated = re.fullmatch(r"(?:Iterator|Generator)\[(.*)\]", returned)
    if iterated and any(decorator.endswith("contextmanager") for decorator in decorators):
        return f"ContextManager[{iterated[1]}]"
    return returned


def _comment(attribute: griffe.Attribute) -> str:
    """Return the comment on the line of a field, or the comment lines above it."""
    assert attribute.lineno is not None
    lines = file_of(attribute.module.path).read_text(encoding="utf-8").splitlines()
    comment = lines[(attribute.endlineno or attribute.lineno) - 1].partition("  # ")[2].strip()
    if comment:
        return comment
    above: list[str] = []
    number = attribute.lineno - 2
    while number >= 0 and lines[number].strip().startswith("# "):
        above.insert(0, lines[number].strip().removeprefix("# "))
        number -= 1
    return " ".join(above)


def _text(found: griffe.Object | griffe.Alias) -> str:
    """Return a docstring as Markdown, with field lists for arguments, results and errors."""
    if found.docstring is None:
        return ""
    parts: list[str] = []
    for section in found.docstring.parse("google"):
        value = section.value
        match section.kind:
            case griffe.DocstringSectionKind.text:
                parts.append(_plain(value))
            case griffe.DocstringSectionKind.parameters | griffe.DocstringSectionKind.attributes:
                parts.append("\n".join(f":param {entry.name}: {_line(entry.description)}" for entry in value))
            case griffe.DocstringSectionKind.returns | griffe.DocstringSectionKind.yields:
                parts.append(":returns: " + " ".join(_line(entry.description) for entry in value))
            case griffe.DocstringSectionKind.raises:
                parts.append("\n".join(f":raises {entry.annotation}: {_line(entry.description)}" for entry in value))
            case griffe.DocstringSectionKind.examples:
                parts.append("\n".join(_example(text) for _, text in value))
            case griffe.DocstringSectionKind.admonition:
                parts.append(_example(value.description))
            case _:
                raise ValueError(f"{found.path}: a docstring section {section.kind.value} is not handled")
    return "\n\n".join(part for part in parts if part)


def _line(text: str) -> str:
    return " ".join(text.split())


def _plain(text: str) -> str:
    """Return text in which reStructuredText code blocks (`Example::`) are Markdown."""
    head, marker, code_block = text.partition("::\n\n")
    if not marker:
        return text
    body = "\n".join(line.removeprefix("    ") for line in code_block.splitlines())
    return f"{head}:\n\n{_example(body)}"


def _example(text: str) -> str:
    is_session = ">>>" in text
    return f"```{'pycon' if is_session else 'python'}\n{text.strip()}\n```"
