"""Tasks: which task is issued next, how many rollouts it gets, which finished groups to train on. Knows no token and no loss."""
