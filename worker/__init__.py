"""Takes tickets out of the queue and labels them; `worker.engine` is the classifier without Redis."""
