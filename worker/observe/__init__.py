"""What the worker tells of itself. Reads streams and plain facts; no model, no queue."""
