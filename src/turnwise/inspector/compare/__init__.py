"""Compare: is the difference between methods, or settings, real? Paired seeds, equal token budgets, a stated error rate."""
