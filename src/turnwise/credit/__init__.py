"""Credit: pieces that decide who earned what. Knows no engine and no method."""
