"""A MkDocs hook: LaTeX between dollars becomes MathML, which browsers show without JavaScript or a network.

``pymdownx.arithmatex`` (generic mode) marks formulas in the HTML of a page; this hook converts each of them once.
"""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)


def on_page_content(page_html: str, **_: Any) -> str:
    """Called by MkDocs with the HTML of each page."""
    page_html = BLOCK.sub(lambda found: f'<div class="equation">{mathml(found[1], "block")}</div>', page_html)
    return INLINE.sub(lambda found: mathml(found[1], "inline"), page_html)


def mathml(latex: str, display: str) -> str:
    return convert(html.unescape(latex).strip(), display=display)
