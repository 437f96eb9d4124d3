"""A day in the life of a client that uses pika. Takes the URL of an empty virtual host."""

import sys
import time

import pika
from pika.exceptions import ChannelClosedByBroker, UnroutableError

SOON = 20


def main(url):
    for scenario in [
        publish_consume_ack,
        come_back_if_unroutable,
        nack_and_get_again,
        die_and_say_of_what,
        ask_and_answer,
        be_refused,
        live_by_heartbeats,
    ]:
        connection = pika.BlockingConnection(pika.URLParameters(url))
        scenario(connection)
        connection.close()
        print("ok", scenario.__name__)


def confirming(connection):
    channel = connection.channel()
    channel.confirm_delivery()
    return channel


def fresh_queue(channel, name, arguments=None):
    channel.queue_delete(name)
    channel.queue_declare(name, durable=True, arguments=arguments)


def take(channel, queue):
    """Waits for a message in a queue, and takes it."""
    deadline = time.monotonic() + SOON
    while time.monotonic() < deadline:
        method, properties, body = channel.basic_get(queue)
        if method is not None:
            return method, properties, body
        time.sleep(0.02)
    raise AssertionError(f"no message in {queue}")


def wait_for(connection, what, condition):
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline, what
        connection.process_data_events(time_limit=0.1)


def publish_consume_ack(connection):
    channel = confirming(connection)
    channel.exchange_declare("orders", "topic", durable=True)
    fresh_queue(channel, "q")
    channel.queue_bind("q", "orders", "order.*")
    headers = {"text": "a", "number": 2**40, "truth": True, "list": [1, "b"], "none": None}
    for number in range(3):
        properties = pika.BasicProperties(message_id=str(number), headers=headers, delivery_mode=2)
        channel.basic_publish("orders", "order.new", b"%d" % number, properties, mandatory=True)
    channel.basic_qos(prefetch_count=1)
    seen = []

    def on_message(channel, method, properties, body):
        seen.append((body, properties.message_id, properties.headers, method.redelivered))
        channel.basic_ack(method.delivery_tag)

    tag = channel.basic_consume("q", on_message)
    wait_for(connection, "three deliveries", lambda: len(seen) == 3)
    assert seen == [(b"%d" % n, str(n), headers, False) for n in range(3)], seen
    channel.basic_cancel(tag)
    assert channel.queue_declare("q", passive=True).method.message_count == 0


def come_back_if_unroutable(connection):
    channel = confirming(connection)
    try:
        channel.basic_publish("", "nowhere", b"lost", mandatory=True)
    except UnroutableError as error:
        (returned,) = error.messages
        assert returned.method.reply_code == 312, returned.method
        assert returned.body == b"lost"
    else:
        raise AssertionError("it reached a queue")


def nack_and_get_again(connection):
    channel = confirming(connection)
    fresh_queue(channel, "q")
    channel.basic_publish("", "q", b"again")
    method, _, _ = take(channel, "q")
    assert not method.redelivered
    channel.basic_nack(method.delivery_tag, requeue=True)
    method, _, body = take(channel, "q")
    assert method.redelivered and body == b"again"
    channel.basic_ack(method.delivery_tag)


def die_and_say_of_what(connection):
    channel = confirming(connection)
    fresh_queue(channel, "dead")
    dead_letters = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
    fresh_queue(channel, "q", dead_letters)
    channel.basic_publish("", "q", b"bad")
    method, _, _ = take(channel, "q")
    channel.basic_reject(method.delivery_tag, requeue=False)
    _, properties, _ = take(channel, "dead")
    (death,) = properties.headers["x-death"]
    assert (death["reason"], death["queue"], death["count"]) == ("rejected", "q", 1), death
    assert death["routing-keys"] == ["q"] and death["exchange"] == "", death

    channel.basic_publish("", "q", b"late", pika.BasicProperties(expiration="50"))
    _, properties, body = take(channel, "dead")
    (death,) = properties.headers["x-death"]
    assert body == b"late" and properties.expiration is None
    assert (death["reason"], death["original-expiration"]) == ("expired", "50"), death


def ask_and_answer(connection):
    channel = confirming(connection)
    fresh_queue(channel, "questions")
    answers = []

    def on_question(channel, method, properties, body):
        answer = pika.BasicProperties(correlation_id=properties.correlation_id)
        channel.basic_publish("", properties.reply_to, b"because", answer)

    plain = connection.channel()
    plain.basic_consume(
        "amq.rabbitmq.reply-to",
        lambda _channel, _method, properties, body: answers.append((properties.correlation_id, body)),
        auto_ack=True,
    )
    answering = connection.channel()
    answering.basic_consume("questions", on_question, auto_ack=True)
    ask = pika.BasicProperties(reply_to="amq.rabbitmq.reply-to", correlation_id="7")
    plain.basic_publish("", "questions", b"why?", ask)
    wait_for(connection, "an answer", lambda: answers)
    assert answers == [("7", b"because")], answers


def be_refused(connection):
    channel = connection.channel()
    fresh_queue(channel, "q")
    try:
        channel.queue_declare("q", durable=True, arguments={"x-message-ttl": 1000})
    except ChannelClosedByBroker as error:
        expected = "PRECONDITION_FAILED - inequivalent arg 'x-message-ttl' for queue 'q' in vhost"
        assert error.reply_code == 406 and error.reply_text.startswith(expected), error
    else:
        raise AssertionError("it was not refused")
    # The connection goes on.
    connection.channel().queue_declare("q", passive=True)


def live_by_heartbeats(connection):
    url = sys.argv[1]
    quiet = pika.BlockingConnection(pika.URLParameters(url + "?heartbeat=1"))
    channel = confirming(quiet)
    fresh_queue(channel, "q")
    # Either side gives up after some intervals without a word.
    quiet.sleep(4)
    channel.basic_publish("", "q", b"still here", mandatory=True)
    quiet.close()


main(sys.argv[1])
