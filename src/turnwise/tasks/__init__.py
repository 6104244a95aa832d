"""Tasks: which task next, how many rollouts, which finished groups to train on. Knows no token and no loss."""
