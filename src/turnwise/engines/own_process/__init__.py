"""A generator in a process of its own on this machine, so that it does not share the interpreter with the learner."""
