"""The shared vocabulary: records, levels, batches, columns, signals, protocols, seeds. Computes no loss and runs no model."""
