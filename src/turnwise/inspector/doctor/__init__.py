"""Doctor: what is wrong with a run, with evidence and the setting to change."""
