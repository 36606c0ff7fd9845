"""Sphinx: numpydoc, the theme furo, and extensions of our own in docs/_ext."""

import sys
from pathlib import Path

import mpidist

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "mpidist"
author = "mpidist developers"
copyright = "2026, mpidist developers"
release = version = mpidist.__version__
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "sphinx_design",  # cards and tabs
    "numpydoc",
    "elsewhere",  # docs/_ext: the names of other projects that the pages link to
    "back_links",  # corrects the links from the sources back to the pages
    "message_links",  # an address for each message of Troubleshooting
    "number_columns",  # right-aligns columns of numbers
    "page_head",  # adds the description of each page
    "rooms",  # draws the layers of setup.cfg
    "catalogue",  # writes docs/generated from the registry and the commands
    "first_uses",  # links the first use of each term of the glossary
    "gallery",  # draws every schedule on every number of ranks for the gallery
    "plots",  # draws the plots from the tables of the pages
    "sample_report",  # writes the report that the gallery links to
]
highlight_language = "none"  # literal blocks are pictures and output
exclude_patterns = ["_build", "_ext"]
html_theme = "furo"
html_title = f"mpidist {release}"
html_theme_options = {"navigation_with_keys": True}
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_css_files = ["mpidist.css"]
# Commands are copied without their prompt, and without their output.
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
copybutton_line_continuation_character = "\\"
copybutton_selector = "div.highlight-console pre, div.highlight-python pre, div.highlight-text pre"

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "none"  # the types stand in the docstrings
numpydoc_show_class_members = False
numpydoc_xref_param_type = True  # the types of parameters are links, other words are text
numpydoc_xref_ignore = "all"
classes = [name for name in mpidist.__all__ if name[0].isupper()]
numpydoc_xref_aliases = {name: f"mpidist.{name}" for name in classes} | {
    name: f":class:`{name}`" for name in ("torch.nn.Module", "mpi4py.MPI.Comm")
}
