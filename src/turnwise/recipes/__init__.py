"""Published methods as recipes: one function per paper in ``families``, no arithmetic. Does not know who trains with
them.

recipes.build("grpo", clip=0.2)   the recipe of a method
recipes.METHODS                   every method by name
"""

from turnwise.recipes.registry import FAMILIES, METHODS, build, method, parameters

__all__ = ["FAMILIES", "METHODS", "build", "method", "parameters"]
