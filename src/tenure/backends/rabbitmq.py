"""For programs that use the queues with another client, such as aio-pika: what they are called in RabbitMQ."""

from tenure._backends.rabbitmq.names import amqp_name, dead_letters_name
from tenure._public import publish_all

__all__ = ["amqp_name", "dead_letters_name"]

publish_all(__name__)
