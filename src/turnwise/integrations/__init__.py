"""Adapters: our objectives inside other people's trainers. Each file imports its trainer, so none is imported here."""
