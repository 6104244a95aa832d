"""Adapters that run our objectives inside other trainers. Each module imports its trainer, so none is imported here."""
