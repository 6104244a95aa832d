"""A run on a Ray cluster: actors that sample, learn and play environments, and the driver that starts and watches them."""
