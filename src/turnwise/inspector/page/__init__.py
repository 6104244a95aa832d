"""The page of ``turnwise view``: views as typed blocks, one template that renders them, and a local read-only server."""
