"""What the source of a chat template says about it: the fields of a message that it looks at, and its own words.

Read off the parsed template, so the answer is the same for every row, whichever rows came before.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import jinja2
from jinja2 import nodes

GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # a tag that plain jinja does not know
FIRST_OR_LAST = ("first", "last", "random")
DUMPS = ("tojson", "items", "string", "pprint", "dictsort", "xmlattr", "urlencode")
READERS = (nodes.Getattr, nodes.Getitem, nodes.Compare, nodes.Call, nodes.Filter, nodes.For, nodes.Output)
ITEM, LIST = "message", "messages"


@dataclass(frozen=True)
class TemplateFacts:
    fields: frozenset[str] | None  # of messages that it looks at; None: it may look at any
    words: frozenset[str]  # strings in its code, such as the roles that it knows
    variables: frozenset[str]  # names in its code


def read_template(source: str) -> TemplateFacts:
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"])
    try:
        tree = environment.parse(GENERATION.sub("", source))
        words = frozenset(node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))
        names = frozenset(node.name for node in tree.find_all(nodes.Name))
        return TemplateFacts(Following(tree).looked_at(), words, names)
    except (jinja2.TemplateError, RecursionError):  # rendering will say what is wrong with it
        return TemplateFacts(None, frozenset(), frozenset({"tools"}))


class Following:
    """Follows messages through loops and assignments, and notes what is taken of them."""

    def __init__(self, tree: nodes.Template) -> None:
        self.tree, self.kinds = tree, {"messages": LIST}
        self.macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
        before = -1
        while len(self.kinds) > before:
            before = len(self.kinds)
            for target, kind in self._assigned():
                if kind is not None:
                    self.kinds.setdefault(target, kind)

    def _assigned(self) -> Iterator[tuple[str, str | None]]:
        for loop in self.tree.find_all(nodes.For):
            if isinstance(loop.target, nodes.Name):
                yield loop.target.name, ITEM if self.kind(loop.iter) == LIST else None
        for call in self.tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name in self.macros:
                for argument, value in zip(self.macros[call.node.name].args, call.args, strict=False):
                    yield argument.name, self.kind(value)
        for assignment in self.tree.find_all(nodes.Assign):
            if isinstance(assignment.target, nodes.Name):
                yield assignment.target.name, self.kind(assignment.node)
            elif isinstance(assignment.target, nodes.NSRef):
                yield f"{assignment.target.name}.{assignment.target.attr}", self.kind(assignment.node)

    def kind(self, node: nodes.Node | None) -> str | None:
        """Whether an expression is a message, a list of them, or something else."""
        if isinstance(node, nodes.Name):
            return self.kinds.get(node.name)
        if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name):
            if node.node.name == "loop" and node.attr in ("previtem", "nextitem"):
                return ITEM
            return self.kinds.get(f"{node.node.name}.{node.attr}")
        if isinstance(node, nodes.Getitem) and self.kind(node.node) == LIST:
            return LIST if isinstance(node.arg, nodes.Slice) else ITEM
        if isinstance(node, nodes.Filter) and self.kind(node.node) == LIST:
            return ITEM if node.name in FIRST_OR_LAST else LIST
        if isinstance(node, nodes.Add):
            return self.kind(node.left) or self.kind(node.right)
        if isinstance(node, nodes.List):
            return LIST if any(self.kind(item) == ITEM for item in node.items) else None
        if isinstance(node, nodes.CondExpr):
            return self.kind(node.expr1) or self.kind(node.expr2)
        return None

    def looked_at(self) -> frozenset[str] | None:
        """Names of fields, or None where a message may be read as a whole."""
        found: set[str] = set()
        for node in self.tree.find_all(READERS):
            names = self._taken(node)
            if names is None:
                return None
            found |= names
        return frozenset(found)

    def _taken(self, node: nodes.Node) -> set[str] | None:
        """Fields that one expression takes of a message; None: all of them."""
        if isinstance(node, nodes.Getattr) and self.kind(node.node) == ITEM:
            return {node.attr}  # the name of a method, too: no harm
        if isinstance(node, nodes.Getitem) and self.kind(node.node) == ITEM:
            return constants(node.arg)
        if isinstance(node, nodes.Compare) and any(self.kind(other.expr) == ITEM for other in node.ops):
            return constants(node.expr)  # "name" in message
        if isinstance(node, nodes.Call):
            method = node.node
            if isinstance(method, nodes.Getattr) and self.kind(method.node) == ITEM:
                return constants(*node.args[:1]) if method.attr == "get" and node.args else None
            is_copied = isinstance(method, nodes.Name) and method.name == "dict"
            return None if is_copied and any(self.kind(argument) == ITEM for argument in node.args) else set()
        if isinstance(node, nodes.Filter) and self.kind(node.node) == LIST:
            given = [*node.args, *(pair.value for pair in node.kwargs)]  # selectattr("role", ...)
            return None if node.name in DUMPS else {str(a.value) for a in given if isinstance(a, nodes.Const)}
        if isinstance(node, nodes.Filter) and self.kind(node.node) == ITEM:
            return None if node.name in (*DUMPS, "list") else set()
        if isinstance(node, nodes.For) and self.kind(node.iter) == ITEM:
            return None
        if isinstance(node, nodes.Output) and any(self.kind(part) is not None for part in node.nodes):
            return None
        return set()


def constants(*expressions: nodes.Expr) -> set[str] | None:
    """Names that are written down; None if one is computed."""
    known = [expression for expression in expressions if isinstance(expression, nodes.Const)]
    return {str(expression.value) for expression in known} if len(known) == len(expressions) else None
