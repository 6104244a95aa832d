"""The HTTP endpoint through which agents call the policy that is being trained: sessions, wire formats, server. Knows episodes as
something that answers calls; no generator, no loss, no method."""
