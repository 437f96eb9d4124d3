"""What the programs of this folder have in common: a connection, and an end."""

import json
import select
import sys

import pika


def run(program):
    """Lets a program set up its consumers, serves them until standard input ends, and lets it say what it did."""
    connection = pika.BlockingConnection(pika.URLParameters(sys.argv[1]))
    at_end = program(connection.channel(), **json.loads(sys.argv[2]))
    say("ready")
    while not select.select([sys.stdin], [], [], 0)[0]:
        connection.process_data_events(time_limit=0.02)
    if at_end is not None:
        at_end()
    connection.close()
    say("ended")


def say(*words):
    print(*words, flush=True)


def declare(channel, exchanges=(), queues=(), bindings=()):
    """As documents list them: exchanges with their kinds, queues with their arguments, all of them durable."""
    for name, kind in exchanges:
        channel.exchange_declare(name, kind, durable=True)
    for name, arguments in queues:
        channel.queue_declare(name, durable=True, arguments=arguments)
    for queue, exchange, key in bindings:
        channel.queue_bind(queue, exchange, key)


def failures_wanted(body):
    """How many deliveries of a message have to fail: the number before the blank."""
    return int(body.decode().split(" ")[0])


def rejections(properties, queue):
    """How often consumers of a queue have rejected a message, by what the broker says."""
    deaths = (properties.headers or {}).get("x-death", [])
    return sum(d["count"] for d in deaths if d["queue"] == queue and d["reason"] == "rejected")
