"""A worker of the Cover Art Archive's indexer: jobs of one kind, and `mb-retries` that counts down.

The worker knows `mb-retries` as an integer of 32 bits, and takes any other value for none. Headers of types that its
library does not know end it.
"""

import pika
import pika.data
from program import declare, failures_wanted, run, say

DEFAULT_RETRIES = 4
KNOWN_TYPES = b"VSIlDFATt"


class Long(int):
    """An integer of 64 bits."""


def decode_value(encoded, offset, decode=pika.data.decode_value):
    kind = encoded[offset : offset + 1]
    assert kind in KNOWN_TYPES, f"no way to unpack a header of the type {kind!r}"
    value, offset = decode(encoded, offset)
    return (Long(value) if kind == b"l" else value), offset


pika.data.decode_value = decode_value


def cover_art(channel, name, interval, publish=()):
    retry, failed, queue = f"{name}.retry", f"{name}.failed", f"{name}.index"
    waiting = {"x-message-ttl": interval, "x-dead-letter-exchange": name}
    declare(
        channel,
        [(name, "direct"), (retry, "fanout"), (failed, "fanout")],
        [(queue, None), (retry, waiting), (failed, None)],
        [(queue, name, "index"), (retry, retry, ""), (failed, failed, "")],
    )
    channel.basic_qos(prefetch_count=1)

    def on_job(channel, method, properties, body):
        headers = properties.headers or {}
        retries = headers.get("mb-retries")
        if not isinstance(retries, int) or isinstance(retries, Long):
            retries = DEFAULT_RETRIES
        say("delivered", body.decode())
        if DEFAULT_RETRIES - retries < failures_wanted(body):
            errors = headers.get("mb-exceptions", [])
            assert all(isinstance(error, str) for error in errors), errors
            headers = {"mb-retries": retries - 1, "mb-exceptions": [*errors, "theirs"]}
            exchange = retry if retries > 0 else failed
            properties = pika.BasicProperties(headers=headers)
            channel.basic_publish(exchange, method.routing_key, body, properties)
        else:
            say("handled", body.decode())
        channel.basic_ack(method.delivery_tag)

    channel.basic_consume(queue, on_job)
    for body in publish:
        channel.basic_publish(name, "index", body)


if __name__ == "__main__":
    run(cover_art)
