"""Static analysis of chat templates: find the message fields that a template reads, and the words in its code.

The result depends only on the source of the template, so it is the same for all rows.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import jinja2
from jinja2 import nodes

GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # tag of transformers; plain jinja2 cannot parse it
FIRST_OR_LAST = ("first", "last", "random")  # filters that return one item of a list
DUMPS = ("tojson", "items", "string", "pprint", "dictsort", "xmlattr", "urlencode")  # filters that read all fields
# Kinds of expressions that may read fields of a message.
READERS = (nodes.Getattr, nodes.Getitem, nodes.Compare, nodes.Call, nodes.Filter, nodes.For, nodes.Output)
# Kinds of values that are tracked through a template: a message, and a list of messages.
ITEM = "message"
LIST = "messages"


@dataclass(frozen=True)
class TemplateFacts:
    """Properties of a chat template that follow from its source."""

    fields: frozenset[str] | None  # message fields that the template reads; None if it may read any field
    words: frozenset[str]  # string constants in the code, such as names of roles
    variables: frozenset[str]  # names of variables in the code


def read_template(source: str) -> TemplateFacts:
    """Analyze the source of a chat template. If it is invalid, assume that it may read any field."""
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"])
    try:
        tree = environment.parse(GENERATION.sub("", source))
        words = frozenset(node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))
        names = frozenset(node.name for node in tree.find_all(nodes.Name))
        return TemplateFacts(MessageTracker(tree).fields_read(), words, names)
    except (jinja2.TemplateError, RecursionError):  # the first rendering reports the error to the user
        return TemplateFacts(None, frozenset(), frozenset({"tools"}))


class MessageTracker:
    """Finds the variables of a template that contain messages, and the fields that the template reads from them.

    Messages are tracked through loops, macros and assignments.
    """

    def __init__(self, tree: nodes.Template) -> None:
        self.tree = tree
        self.kinds = {"messages": LIST}
        self.macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
        num_known = -1
        while len(self.kinds) > num_known:
            num_known = len(self.kinds)
            for target, kind in self._assignments():
                if kind is not None:
                    self.kinds.setdefault(target, kind)

    def _assignments(self) -> Iterator[tuple[str, str | None]]:
        """Yield each variable that a loop, a macro or an assignment sets, with the kind of its value."""
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
        """Return `ITEM` if an expression is a message, `LIST` if it is a list of messages, otherwise None."""
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

    def fields_read(self) -> frozenset[str] | None:
        """Return the names of all fields that the template reads; None if it may read a message as a whole."""
        fields: set[str] = set()
        for node in self.tree.find_all(READERS):
            names = self._fields_of(node)
            if names is None:
                return None
            fields |= names
        return frozenset(fields)

    def _fields_of(self, node: nodes.Node) -> set[str] | None:
        """Return the fields that one expression reads from a message; None if it may read all of them."""
        if isinstance(node, nodes.Getattr) and self.kind(node.node) == ITEM:
            return {node.attr}  # a method, such as `items`, also counts as a field; this does no harm
        if isinstance(node, nodes.Getitem) and self.kind(node.node) == ITEM:
            return constants(node.arg)
        if isinstance(node, nodes.Compare) and any(self.kind(other.expr) == ITEM for other in node.ops):
            return constants(node.expr)  # an expression such as `"name" in message`
        if isinstance(node, nodes.Call):
            return self._fields_of_call(node)
        if isinstance(node, nodes.Filter):
            return self._fields_of_filter(node)
        if isinstance(node, nodes.For) and self.kind(node.iter) == ITEM:
            return None
        if isinstance(node, nodes.Output) and any(self.kind(part) is not None for part in node.nodes):
            return None
        return set()

    def _fields_of_call(self, call: nodes.Call) -> set[str] | None:
        """Return the fields that a call reads, such as `message.get("name")`; None if it may read all of them."""
        method = call.node
        if isinstance(method, nodes.Getattr) and self.kind(method.node) == ITEM:
            return constants(*call.args[:1]) if method.attr == "get" and call.args else None
        is_copy = isinstance(method, nodes.Name) and method.name == "dict"
        if is_copy and any(self.kind(argument) == ITEM for argument in call.args):
            return None
        return set()

    def _fields_of_filter(self, node: nodes.Filter) -> set[str] | None:
        """Return the fields that a filter reads, such as `selectattr`; None if it may read all of them."""
        kind = self.kind(node.node)
        if kind == LIST:
            if node.name in DUMPS:
                return None
            # For a filter such as `selectattr("role", ...)`, the fields are among the constant arguments.
            arguments = [*node.args, *(pair.value for pair in node.kwargs)]
            return {str(argument.value) for argument in arguments if isinstance(argument, nodes.Const)}
        if kind == ITEM and node.name in (*DUMPS, "list"):
            return None
        return set()


def constants(*expressions: nodes.Expr) -> set[str] | None:
    """Return the values of constant expressions as strings; None if an expression is not constant."""
    values = set()
    for expression in expressions:
        if not isinstance(expression, nodes.Const):
            return None
        values.add(str(expression.value))
    return values
