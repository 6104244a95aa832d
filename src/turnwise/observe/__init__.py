"""What users see of a run: trackers, live progress, curves and reports. Knows no method and computes nothing trained on."""
