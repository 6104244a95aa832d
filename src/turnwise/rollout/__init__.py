"""Rollouts: the turn loop, chat rendering, token-exact history, and how a group is sampled. Knows no engine and no loss."""
