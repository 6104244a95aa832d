"""Checks of a method: the contract that every recipe fulfils, run on synthetic trajectories in seconds. Trains nothing."""
