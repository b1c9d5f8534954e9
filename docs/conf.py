"""The site of documentation: ``make docs`` builds it, without network, and fails at the first dead link."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

import tenure

project = "tenure"
author = "The tenure contributors"
copyright = f"2026, {author}"  # noqa: A001 - the name that Sphinx reads
version = release = tenure.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "repository_files",
    "public_names",
]
source_suffix = {".md": "markdown"}
root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "examples/README.md",
    "examples/**/README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
]
exclude_patterns = [".*", "build", "dist", "src"]

# Links: each must lead somewhere, also inside a page. Names outside tenure have no page here, and there is no network.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!tenure\.).*")]
myst_heading_anchors = 4
show_warning_types = True

# The reference, from the docstrings.
NOT_INHERITED = (
    "object,BaseException,Exception,dict,tuple,Generic,Protocol,TenureError,Event"  # has no page, or its own
)
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "fully-qualified"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "inherited-members": NOT_INHERITED}
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_preprocess_types = False
add_module_names = False
toc_object_entries_show_parents = "hide"

# Looks. Prompts of consoles are not copied.
html_theme = "furo"
html_title = "tenure"
html_additional_pages = {"index": "to_the_first_page.html"}  # the documents are below docs/, as in the repository
templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_last_updated_fmt = None
pygments_style = "friendly"
pygments_dark_style = "monokai"
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
