"""Queues that a RabbitMQ broker holds, reached over AMQP 0-9-1."""
