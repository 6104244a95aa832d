"""Tools for agents: typed functions (``toolbox``) and isolated, persistent, untrusted Python (``python``)."""

from turnwise.tools.limits import Limits as Limits
from turnwise.tools.python import PythonTool as PythonTool
from turnwise.tools.python import python_tool as python_tool
from turnwise.tools.session import Result as Result
from turnwise.tools.session import Session as Session
from turnwise.tools.toolbox import Toolbox as Toolbox

__all__ = ["Limits", "PythonTool", "Result", "Session", "Toolbox", "python_tool"]
