"""Configure Sphinx, with which scripts/docs.sh builds the documentation site.

site_extension.py has the directives and transforms of this site.
"""

import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
BUILD = ROOT / "build" / "docs"
sys.path[:0] = [str(HERE), str(ROOT / "cmake"), str(ROOT / "python")]

HEADER = (ROOT / "include" / "tilemoe" / "tilemoe.h").read_text()

project = "TileMoE"
author = "The TileMoE authors"
project_copyright = author
version = release = ".".join(
    re.search(rf"TILEMOE_VERSION_{part} (\d+)", HEADER)[1] for part in ("MAJOR", "MINOR", "PATCH")
)
extensions = [
    "myst_parser",
    "sphinx.ext.napoleon",
    "autoapi.extension",
    "breathe",
    "site_extension",
]

# ---------------------------------------------------------------- pages

myst_heading_anchors = 4  # GitHub's slugs
myst_enable_extensions = ["dollarmath", "tasklist"]

# ---------------------------------------------------------------- Python, read without importing it

autoapi_dirs = [str(BUILD / "python" / "tilemoe")]  # site_extension.py copies the package
autoapi_generate_api_docs = False  # api/python.md names the objects
autoapi_add_toctree_entry = False
autoapi_options = ["members", "imported-members"]
autoapi_python_class_content = "class"
autodoc_member_order = "bysource"
default_role = "py:obj"  # of names in backticks
suppress_warnings = ["autoapi.python_import_resolution"]  # torch and jax are not installed
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # of Attributes; the members are objects already
napoleon_use_rtype = False
napoleon_custom_sections = ["Shape"]

# ---------------------------------------------------------------- C, which doxygen reads

breathe_default_project = "tilemoe"
breathe_projects = {"tilemoe": str(BUILD / "doxygen" / "xml")}
breathe_domain_by_extension = {"h": "c"}
breathe_show_define_initializer = True

# ---------------------------------------------------------------- look

highlight_language = "none"
html_theme = "furo"
html_title = f"TileMoE {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#0969da",
        "color-brand-content": "#0969da",
    },
    "dark_css_variables": {
        "color-brand-primary": "#4493f8",
        "color-brand-content": "#4493f8",
    },
}
