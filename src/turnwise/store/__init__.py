"""Run directories: ledger, checkpoints and metadata. The order of calls is described in :mod:`turnwise.store.resume`."""
