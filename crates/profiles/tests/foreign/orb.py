"""An instance of Orb: a publisher, a subscriber and the redelivery handler, each if it is asked for.

As its document has it, and as its programs read and write headers: those are text, or lists; any other one makes the message
unreadable. A list is text in JSON meanwhile, and can be written again only if all its entries are tables of plain values.
"""

import json
import uuid

import pika
from program import declare, failures_wanted, run, say

TO_REDELIVERY = {
    "x-dead-letter-exchange": "orb.redelivery",
    "x-dead-letter-routing-key": "orb.redelivery",
}


def read(properties):
    metadata = {}
    for name, value in (properties.headers or {}).items():
        if isinstance(value, list):
            value = json.dumps(value, default=str)
        assert isinstance(value, str), f"{name} is not a string or an array, but {value!r}"
        metadata[name] = value
    return metadata


def write(metadata):
    return {name: header_value(name, value) for name, value in metadata.items()}


def header_value(name, text):
    try:
        values = json.loads(text, parse_int=float)
    except ValueError:
        return text
    if not isinstance(values, list):
        return text
    for table in values:
        assert isinstance(table, dict), f"{name} has an entry that is no table: {table!r}"
        for value in table.values():
            assert not isinstance(value, (list, dict)), f"{name} has an entry with {value!r}"
    return values


def orb(channel, queue, publish=(), subscribes=False, redelivers=False, initial=0, longest=0, pool=1):
    declare(
        channel,
        [("orb", "direct"), ("orb.redelivery", "direct"), ("orb.wait", "direct")],
        [(queue, TO_REDELIVERY), ("orb.redelivery", None), ("orb.wait", TO_REDELIVERY)],
        [
            (queue, "orb", queue),
            ("orb.redelivery", "orb.redelivery", "orb.redelivery"),
            ("orb.wait", "orb.wait", "orb.wait"),
        ],
    )
    channel.basic_qos(prefetch_count=1)

    def send(exchange, key, body, metadata, expiration=None):
        properties = pika.BasicProperties(
            headers=write(metadata), delivery_mode=2, expiration=expiration
        )
        channel.basic_publish(exchange, key, body, properties)

    def on_message(channel, method, properties, body):
        count = int(read(properties).get("orb-redelivery-count", "0"))
        if count < failures_wanted(body):
            channel.basic_nack(method.delivery_tag, requeue=False)
        else:
            channel.basic_ack(method.delivery_tag)
            say("handled", body.decode())

    def on_redelivery(channel, method, properties, body):
        metadata = read(properties)
        metadata.pop("x-death", None)
        if "orb-queue" not in metadata:
            metadata["orb-queue"] = metadata["x-first-death-queue"]
        to = metadata["orb-queue"]
        count = int(metadata.get("orb-redelivery-count", "0"))
        if count == 0 or metadata.get("x-first-death-reason") == "expired":
            metadata["orb-redelivery-count"] = str(count + 1)
            send("orb", to, body, metadata)
            say("redelivered", body.decode())
        else:
            wait = min(int(initial * 1.5 ** (count - 1)), longest)
            send("orb.wait", "orb.wait", body, metadata, expiration=str(wait))
        channel.basic_ack(method.delivery_tag)

    # Each subscriber of a pool has a channel of its own.
    for _ in range(pool if subscribes else 0):
        subscriber = channel.connection.channel()
        subscriber.basic_qos(prefetch_count=1)
        subscriber.basic_consume(queue, on_message)
    if redelivers:
        channel.basic_consume("orb.redelivery", on_redelivery)
    for body in publish:
        send("orb", queue, body, {"_watermill_message_uuid": str(uuid.uuid4())})


if __name__ == "__main__":
    run(orb)
