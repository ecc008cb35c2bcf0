"""Puts tickets into the queue. Needs no model: this package never imports torch, nor the worker.

from producer import Producer

with Producer() as producer:
    producer.push({"id": "t-1", "body": "I was charged twice."})
"""

from producer.errors import ProducerError, QueueFullError, RedisUnavailableError, RefusedTicketError
from producer.push import Producer, PushReceipt

__all__ = [
    "Producer",
    "ProducerError",
    "PushReceipt",
    "QueueFullError",
    "RedisUnavailableError",
    "RefusedTicketError",
]
