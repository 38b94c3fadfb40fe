"""Links that the site adds: config keys and public names in code spans, and files outside `docs`."""

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import desc_signature
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode

from omnizoo.config import reference

ROOT = Path(__file__).parents[1]
# A key, or a key with a value: `train.lr`, `--train.lr 1e-3`, `parallel.recompute: full`.
KEY = re.compile(r"(?:--)?([a-z_]+(?:\.\w+)+)(?:(?:: |=| )[^\s:]+)?")
# Markdown files of the repository that are part of a page of the site.
INCLUDED = {
    "README.md": "/index.md",
    "SECURITY.md": "/explanation/security.md",
    "CONTRIBUTING.md": "/project/contributing.md",
    "benchmarks/RESULTS.md": "/project/benchmarks.md",
}
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


class LinkKeysAndNames(SphinxPostTransform):
    """Links code spans that are a config key or a public name to their entry in the reference."""

    default_priority = 700

    def run(self, **kwargs: Any) -> None:
        for literal in list(self.document.findall(nodes.literal)):
            if _is_linked(literal):
                continue
            target = self._target(literal.astext())
            if target is None or target[0] == self.env.current_document.docname:
                continue
            page, anchor = target
            link = make_refnode(self.app.builder, self.env.current_document.docname, page, anchor, literal.deepcopy())
            literal.replace_self(link)

    def _target(self, text: str) -> tuple[str, str] | None:
        """Return the page and the anchor of a key or name, or None."""
        python = self.env.domains.python_domain.objects
        if text in python:
            return python[text].docname, python[text].node_id
        found = KEY.fullmatch(text)
        if found is None:
            return None
        return self.env.domains.standard_domain.objects.get(("confval", reference.schema_key(found[1])))


def _is_linked(node: nodes.Node) -> bool:
    """Whether a node is inside a link, a heading or a signature."""
    parent = node.parent
    while parent is not None:
        if isinstance(parent, nodes.reference | nodes.title | desc_signature):
            return True
        parent = parent.parent
    return False


def link_source_files(app: Sphinx, docname: str, source: list[str]) -> None:
    """Adapt links that leave `docs`: Markdown files that a page includes, and folders, which have no page."""
    folder = (Path(app.srcdir) / docname).parent

    def adapt(link: re.Match[str]) -> str:
        text, path, anchor = link[1], link[2], link[3] or ""
        target = (folder / path).resolve()
        if "://" in path or not target.is_relative_to(ROOT):
            return link[0]
        name = target.relative_to(ROOT).as_posix()
        if name in INCLUDED:
            return f"[{text}]({INCLUDED[name]}{anchor})"
        return text if target.is_dir() else link[0]

    source[0] = LINK.sub(adapt, source[0])
