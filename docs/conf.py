"""Sphinx: `make docs`. The source is the whole checkout, so that links between docs/, notebooks/ and README hold here and on a forge."""

import logging
import os
import sys
from importlib.resources import files
from pathlib import Path

import rwsim

TOP = Path(__file__).parent.parent
sys.path.insert(0, str(TOP / "docs"))

project, author = "rwsim", "the rwsim maintainers"
version = release = rwsim.__version__
html_title = f"rwsim {version}"
root_doc = "docs/index"
include_patterns = ["README.md", "docs/*.md", "docs/reference/*.md", "docs/experiments/**.md", "notebooks/*.md"]
exclude_patterns = [".*", "docs/_build", "rwsim", "derivations", "tests", "benchmarks", "dist"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "mathml", "names"]

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 4
myst_links_external_new_tab = False

# Kernels report their start and their end; what fails is raised anyway. Their history does not go into the user's.
logging.getLogger("traitlets").setLevel(logging.WARNING)
os.environ["IPYTHONDIR"] = str(TOP / "docs" / "_build" / "ipython")
_profile = Path(os.environ["IPYTHONDIR"]) / "profile_default"
_profile.mkdir(parents=True, exist_ok=True)
(_profile / "ipython_kernel_config.py").write_text("c.Application.log_level = 50\n")
nb_execution_mode = "cache"
nb_execution_cache_path = str(TOP / "docs" / "_build" / "executed")
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True
nb_render_image_options = {"width": "100%"}

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
default_role = "name"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Class attributes", "params_style")]
add_module_names = False
python_use_unqualified_type_names = True

html_theme = "furo"
html_math_renderer = "mathml"
# A font with the sizes of roots and brackets, which few systems have: that of ziamath (STIX Two Math, SIL Open Font License).
html_static_path = ["_static", str(files("ziamath.fonts") / "STIXTwoMath-Regular.ttf")]
html_extra_path = ["_extra"]
html_css_files = ["rwsim.css"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
# Furo's own fonts are those of the system; nothing is fetched.
html_theme_options = {"navigation_with_keys": False}
