"""The check of an environment: plays it and reports what is wrong in words. Does not know any particular environment."""
