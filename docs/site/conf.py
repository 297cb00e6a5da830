"""Settings of the documentation site, which `make site` builds from the pages of the repository."""

project = "Aerie"
author = "the Aerie developers"
html_title = "Aerie"
root_doc = "index"
extensions = ["myst_parser", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
# Headings get the anchors that the forge's links use.
myst_enable_extensions = ["html_image"]
myst_heading_anchors = 4
# Words after ``` that name no language of the highlighter.
suppress_warnings = ["misc.highlighting_failure"]
html_theme = "furo"
html_extra_path = ["../pictures"]
html_copy_source = False
html_show_sourcelink = False
# An example is copied without its prompt.
copybutton_prompt_text = "$ "
