"""Tool-call syntaxes of model families: how a turn's calls are read and written, and which syntax a chat template uses."""
