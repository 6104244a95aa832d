"""The environments that ship with Turnwise. They do not know who plays them."""
