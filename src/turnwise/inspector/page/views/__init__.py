"""The views, each a function of a run and a query that returns a :class:`~turnwise.inspector.page.blocks.ViewPage`."""
