"""Models to start from: the tiny one made on the spot, and real ones fetched by name. Knows no training."""
