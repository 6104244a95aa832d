"""Registers every method with its defaults when imported: ``VERL_USE_EXTERNAL_MODULES=turnwise.integrations.verl_plugin``.

For other hyper-parameters write a module of your own with one ``register(options=...)`` in it, and name that."""

from turnwise.integrations.verl import register

register()
