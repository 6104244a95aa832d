"""Processes of this package that work for another one over a socket: how they start, answer, are limited, and end."""
