"""The shared vocabulary: records, levels, batches, signals, protocols, seeds. Computes no loss and touches no device."""
