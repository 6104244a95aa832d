"""Registers every method with its defaults when imported: ``VERL_USE_EXTERNAL_MODULES=turnwise.integrations.verl_plugin``.

For other hyper-parameters write a module of your own that calls ``register(options=...)``, and name that one."""

from turnwise.integrations.verl import register

register()
