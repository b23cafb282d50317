"""The site of the documents (make docs): Sphinx, MyST and furo. Nothing is fetched, neither to build nor to read it."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

from sphinx.application import Sphinx

import fp4linear

project = "fp4linear"
author = "the fp4linear authors"
version = release = fp4linear.__version__
html_title = f"fp4linear {version}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_copy_source = False
html_show_copyright = False

# As GitHub makes them, so that one link serves both.
myst_heading_anchors = 4

default_role = "py:obj"  # `Fp4Linear` is a link where there is such a name, code where there is none
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_use_rtype = False

COMMANDS = "<!-- commands -->"


def insert_commands(app: Sphinx, name: str, source: list[str]) -> None:
    """What `--help` says, in the place of the mark of cli.md."""
    if COMMANDS in source[0]:
        made = subprocess.run(
            [sys.executable, "-m", "typer", "fp4linear.cli", "utils", "docs", "--name", "fp4linear"],
            check=True,
            capture_output=True,
            text=True,
        )
        source[0] = source[0].replace(COMMANDS, made.stdout.partition("\n")[2])  # the page has a title


def compiled_signature(
    app: Sphinx, what: str, name: str, thing: object, options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """nanobind's signatures in the words of the others."""

    def shortened(text: str) -> str:
        text = text.replace("numpy.typing.NDArray[numpy.", "NDArray[").replace("(self, ", "(").replace("(self)", "()")
        return text.replace("typing.", "").replace("fp4linear._core.", "")

    return signature and shortened(signature), returns and shortened(returns)


def constructor_signature(nanobind_class: type) -> inspect.Signature:
    """What nanobind keeps as text, and inspect does not find."""
    found: dict[str, Any] = {}
    exec(f"from __future__ import annotations\n{nanobind_class.__init__.__nb_signature__[0][0]}: ...", found)  # type: ignore[misc]
    whole = inspect.signature(found["__init__"])
    return whole.replace(parameters=list(whole.parameters.values())[1:], return_annotation=inspect.Signature.empty)


def setup(app: Sphinx) -> None:
    app.connect("source-read", insert_commands)
    fp4linear.Fp4Linear.__signature__ = constructor_signature(fp4linear.Fp4Linear)
    app.connect("autodoc-process-signature", compiled_signature)
