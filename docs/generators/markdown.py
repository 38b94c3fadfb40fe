"""Helpers that write Markdown."""

from collections.abc import Iterable, Sequence


def cell(text: str) -> str:
    """Return text for a cell of a table: one line, with `|` escaped."""
    return " ".join(text.split()).replace("|", r"\|")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table that ends with a newline."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cell(text) for text in line) + " |\n" for line in lines)


def code(text: str) -> str:
    """Return text as inline code, "" for an empty text. The text may contain backticks."""
    if not text:
        return ""
    return f"`{text}`" if "`" not in text else f"`` {text} ``"


def directive(name: str, argument: str, options: dict[str, str], body: str, colons: int = 3) -> str:
    """Return a MyST directive with colons. A directive that contains another one needs more colons."""
    fence = ":" * colons
    lines = [f"{fence}{{{name}}} {argument}"]
    lines += [f":{option}: {value}" for option, value in options.items()]
    lines += ["", body.strip()] if body.strip() else []
    lines += [fence, ""]
    return "\n".join(lines)


def sentence(text: str) -> str:
    """Return text that starts with a capital letter and ends with a period."""
    text = " ".join(text.split())
    if not text:
        return ""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?", ":")) else ".")
