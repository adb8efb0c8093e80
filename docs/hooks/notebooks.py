"""Make Markdown of the notebooks and scripts in `examples`, for pages of the site."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path

import nbformat
from commonmark import spaced
from nbconvert import MarkdownExporter

# Outputs are raw HTML, in which Markdown changes nothing; the search index leaves them out. The fence is
# longer than any that a cell is likely to have in it.
_TEMPLATE = """\
{%- extends 'markdown/index.md.j2' -%}
{%- macro shown(html) %}
<div class="notebook-output" data-search-exclude>{{ html | without_fences }}</div>
{% endmacro %}
{%- macro text(plain) %}{{ shown('<pre>' ~ (plain | strip_ansi | escape_html) ~ '</pre>') }}{% endmacro %}
{% block markdowncell scoped %}{{ cell.source | spaced }}{% endblock markdowncell %}
{% block input %}
````````ipython3
{{ cell.source }}
````````
{% endblock input %}
{% block stream %}{{ text(output.text) }}{% endblock stream %}
{% block error %}{{ text(output.traceback | join('\\n')) }}{% endblock error %}
{% block data_text scoped %}{{ text(output.data['text/plain']) }}{% endblock data_text %}
{% block data_html scoped %}{{ shown(output.data['text/html']) }}{% endblock data_html %}
"""
_SCRIPTS = """\
# Scripts

Each of these scripts does one thing in plain Python. They are in the folder `examples/scripts` of a
checkout, and CI runs all of them.
"""


def notebook_page(path: Path) -> str:
    """Return a notebook with the outputs of its last run."""
    exporter = MarkdownExporter(raw_template=_TEMPLATE)
    exporter.register_filter("spaced", spaced)
    exporter.register_filter("without_fences", _without_fences)
    page, _ = exporter.from_notebook_node(nbformat.read(path, as_version=4))
    return f'{page}\n\n<a class="md-button" href="../{path.name}" download>Download this notebook</a>\n'


def scripts_page(paths: Sequence[Path]) -> str:
    """Return one page with all of the scripts, each below what its docstring says."""
    return _SCRIPTS + "".join(_script(path) for path in paths)


def _script(path: Path) -> str:
    source = path.read_text()
    says = ast.get_docstring(ast.parse(source)) or ""
    # The docstring goes on with the command line; the heading has the name already.
    purpose = says.partition("\n\n")[0]
    code = re.sub(r'\A""".*?"""\s*', "", source, flags=re.DOTALL)
    return f"\n## {path.name}\n\n{purpose}\n\n````````python\n{code}````````\n"


def _without_fences(html: str) -> str:
    """Write backticks as entities: a fence at the beginning of a line would end the raw HTML around it."""
    return html.replace("`", "&#96;")
