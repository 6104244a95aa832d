"""Tools for agents: typed functions (``toolbox``) and isolated, persistent, untrusted Python (``python``)."""

from turnwise.tools.isolation import SandboxLimits as SandboxLimits
from turnwise.tools.python import ExecutionResult as ExecutionResult
from turnwise.tools.python import PythonTool as PythonTool
from turnwise.tools.python import SandboxSession as SandboxSession
from turnwise.tools.python import python_tool as python_tool
from turnwise.tools.toolbox import Toolbox as Toolbox

__all__ = ["ExecutionResult", "PythonTool", "SandboxLimits", "SandboxSession", "Toolbox", "python_tool"]
