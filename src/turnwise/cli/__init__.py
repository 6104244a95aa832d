"""The command line. Parses flags, calls one function, prints. Computes nothing."""
