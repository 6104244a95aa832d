"""Initial models: a tiny one built locally, and real ones fetched by name. Knows no training."""
