"""Claims of papers as data, the runs that decide them as sealed rows, and verdicts computed from rows."""
