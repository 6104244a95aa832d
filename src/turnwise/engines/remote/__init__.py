"""Models behind an address: a client of servers that speak OpenAI's chat protocol. Imports no torch."""
