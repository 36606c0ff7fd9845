"""Sphinx: numpydoc, the theme that Sphinx ships, and one extension of our own."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "mpidist"
author = "mpidist developers"
copyright = "2026, mpidist developers"
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
    "numpydoc",
    "rooms",  # docs/_ext: draws the layers of setup.cfg
    "catalogue",  # docs/_ext: writes docs/generated from the registry and the commands
]
highlight_language = "none"  # literal blocks are pictures and output
exclude_patterns = ["_build", "_ext"]
html_theme = "alabaster"
html_theme_options = {
    "description": "Distributed training for people who launch with MPI",
    "page_width": "1160px",
    "body_max_width": "900px",
    "sidebar_width": "200px",
    "fixed_sidebar": True,
}
html_static_path = ["_static"]
html_css_files = ["mpidist.css"]
html_sidebars = {"**": ["about.html", "searchfield.html", "navigation.html"]}

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "none"  # the types stand in the docstrings
numpydoc_show_class_members = False
