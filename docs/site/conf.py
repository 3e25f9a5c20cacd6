"""Builds the documentation site: `make docs`, then open build/site/docs/index.html.

Its source directory is the repository: a link from a page to a page or a file means the same here and on GitHub.
"""

import shutil
import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

SITE = Path(__file__).resolve().parent
sys.path[:0] = [str(SITE), str(SITE.parents[1])]

import generated  # noqa: E402

project = "Torchrelay"
version = release = installed_version("torchrelay")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "examples/README.md", "benchmarks/exactness/README.md"]
exclude_patterns = [".*", "build", "rivals", "runs"]  # Sphinx walks through all other directories
html_theme = "furo"
html_title = f"Torchrelay {version}"
html_show_copyright = False
myst_heading_anchors = 4
# The API is imported from `hpc`, wherever it is defined.
add_module_names = False
autodoc_member_order = "bysource"
nitpicky = False


def setup(app: Any) -> None:
    """Write the generated pages before Sphinx looks for pages; and copy the pictures, which pages show by HTML."""
    app.connect("builder-inited", lambda _: generated.write_pages(SITE.parent / "reference"))
    pictures = (SITE.parent / "pictures", Path(app.outdir, "docs/pictures"))
    app.connect("build-finished", lambda *_: shutil.copytree(*pictures, dirs_exist_ok=True))
