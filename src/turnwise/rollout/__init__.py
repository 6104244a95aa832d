"""Rollouts: the turn loop, chat rendering, token-exact history, and how a group grows. Knows no engine and no loss."""
