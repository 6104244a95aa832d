"""A recipe of one's own may have no docstring, nor its module: it is described all the same."""

from __future__ import annotations

import sys

from turnwise import recipes
from turnwise.recipes import catalogue


def test_a_recipe_without_any_docstring_is_described(tmp_path, monkeypatch):
    (tmp_path / "undocumented_recipe.py").write_text(
        "from turnwise import recipes\n\n\ndef mine(clip: float = 0.1):\n    return recipes.build('grpo', clip=clip)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "undocumented_recipe", raising=False)
    described = catalogue.describe_method("undocumented_recipe:mine")
    assert described["about"] == described["idea"] == "" and described["parameters"] == {"clip": 0.1}
    assert recipes.method("undocumented_recipe:mine").__doc__ is None
