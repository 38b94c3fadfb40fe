"""Sphinx settings of the documentation site. `make docs` builds it; viewing it needs no network."""

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

from sphinx.application import Sphinx

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))  # for the packages `generators` and `site_links`

from generators import generate_all  # noqa: E402 (needs the path above)
from site_links import LinkKeysAndNames, link_source_files  # noqa: E402

project = "OmniZoo"
version = release = installed_version("omnizoo")

extensions = ["myst_parser", "sphinx_copybutton", "sphinx_design"]
exclude_patterns = ["_build", "_generated", "generators", "*.md.partial"]
nitpick_ignore_regex = [("py:.*", ".*")]  # types of torch and Python, which are documented elsewhere
toc_object_entries = False  # the sidebar shows sections, not every key and option

myst_enable_extensions = ["alert", "attrs_block", "attrs_inline", "colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 4
myst_ref_domains = ["std"]  # a missing #anchor must not match an attribute of the Python API

html_theme = "furo"
html_title = f"OmniZoo {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
copybutton_prompt_text = "$ "
highlight_language = "text"


def setup(app: Sphinx) -> None:
    """Write the generated pages before the sources are read, so that they match the code."""
    app.connect("builder-inited", lambda app: generate_all(DOCS))
    app.connect("source-read", link_source_files)
    app.add_post_transform(LinkKeysAndNames)
