"""What a run is doing at this moment, read from another process."""
