"""Claims, leases and commits: the worker's side of Redis. Redis lives only here; no model is known."""
