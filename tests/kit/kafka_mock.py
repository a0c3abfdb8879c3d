"""A mock cluster of librdkafka as a process: prints the addresses of its brokers, and runs until its input ends."""

from __future__ import annotations

import sys

from confluent_kafka import Producer

if __name__ == "__main__":
    producer = Producer({"bootstrap.servers": "unused", "test.mock.num.brokers": sys.argv[1], "log_level": 0})
    brokers = producer.list_topics(timeout=30).brokers.values()
    print(",".join(f"{broker.host}:{broker.port}" for broker in brokers), flush=True)
    sys.stdin.read()
