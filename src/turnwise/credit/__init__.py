"""Credit assignment: pieces that compute advantages, baselines and selections. Knows no engine and no method."""
