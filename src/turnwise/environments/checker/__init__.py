"""The environment checker: plays an environment and reports its faults. Knows no particular environment."""
