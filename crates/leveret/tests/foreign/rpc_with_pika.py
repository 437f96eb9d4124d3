"""Calls a service, or is one, with pika.

    rpc_with_pika.py URL call      calls the service "numbers" of the other side
    rpc_with_pika.py URL ask       asks the service "plain", which has a method without a name
    rpc_with_pika.py URL serve     is the service "words", until it is told to stop
"""

import json
import sys
import uuid

import pika

SOON = 20


class Caller:
    """As the tutorials of RabbitMQ have it."""

    def __init__(self, connection, reply_to):
        self.connection = connection
        self.channel = connection.channel()
        self.reply_to = reply_to
        if reply_to is None:
            self.reply_to = self.channel.queue_declare("", exclusive=True).method.queue
        self.channel.basic_consume(self.reply_to, self.on_reply, auto_ack=True)
        self.replies = {}

    def on_reply(self, channel, method, properties, body):
        self.replies.setdefault(properties.correlation_id, []).append((properties, body))

    def send(self, method, body):
        correlation_id = str(uuid.uuid4())
        properties = pika.BasicProperties(
            reply_to=self.reply_to, correlation_id=correlation_id, type=method
        )
        self.channel.basic_publish("", "numbers", body, properties)
        return correlation_id

    def wait(self, correlation_id, count=1):
        for _ in range(SOON * 10):
            if len(self.replies.get(correlation_id, [])) >= count:
                return self.replies.pop(correlation_id)
            self.connection.process_data_events(time_limit=0.1)
        raise AssertionError("no reply")


def call(connection):
    for reply_to in ["amq.rabbitmq.reply-to", None]:
        caller = Caller(connection, reply_to)
        numbers = {caller.send("double", json.dumps(n)): n for n in range(100)}
        for correlation_id, number in numbers.items():
            [(properties, body)] = caller.wait(correlation_id)
            assert json.loads(body) == 2 * number, body
            assert properties.content_type == "application/json", properties
            assert not properties.headers, properties
        [(properties, body)] = caller.wait(caller.send("double", "no number"))
        assert properties.headers["leveret-error"] == "undecodable", properties
        [(properties, body)] = caller.wait(caller.send("halve", "1"))
        assert properties.headers["leveret-error"] == "unknown-method", properties
        replies = caller.wait(caller.send("count", "3"), 4)
        assert [body for _, body in replies] == [b"1", b"2", b"3", b""], replies
        parts = [properties.headers["leveret-reply"] for properties, _ in replies]
        assert parts == ["more", "more", "more", "end"], parts
        print("ok", reply_to)


def ask(connection):
    channel = connection.channel()
    channel.exchange_declare("replies", "topic")
    queue = channel.queue_declare("", exclusive=True).method.queue
    channel.queue_bind(queue, "replies", "mine.#")
    for reply_to in [queue, f"direct:///{queue}", "topic://replies/mine.a/b"]:
        for correlation_id in [None, "7"]:
            properties = pika.BasicProperties(reply_to=reply_to, correlation_id=correlation_id)
            channel.basic_publish("", "plain", "hello", properties)
            for method, properties, body in channel.consume(queue, True, inactivity_timeout=SOON):
                assert body == b"HELLO", (reply_to, body)
                assert properties.correlation_id == correlation_id, properties
                break
        print("ok", reply_to)
    channel.cancel()
    print("ok")


def serve(connection):
    channel = connection.channel()
    channel.queue_declare("words", durable=True)

    def on_request(channel, method, properties, body):
        if properties.reply_to is not None:
            reply = pika.BasicProperties(correlation_id=properties.correlation_id)
            if properties.type == "fail":
                reply.headers = {"leveret-error": "refused"}
            if properties.type == "spell":
                for letter in body.decode():
                    more = pika.BasicProperties(
                        correlation_id=properties.correlation_id,
                        headers={"leveret-reply": "more"},
                    )
                    channel.basic_publish("", properties.reply_to, letter.encode(), more)
                reply.headers = {"leveret-reply": "end"}
                body = b""
            channel.basic_publish("", properties.reply_to, body.upper(), reply)
        channel.basic_ack(method.delivery_tag)
        if properties.type == "stop":
            channel.stop_consuming()

    channel.basic_consume("words", on_request)
    print("ok serving", flush=True)
    channel.start_consuming()
    print("ok stopped")


if __name__ == "__main__":
    parameters = pika.URLParameters(sys.argv[1])
    connection = pika.BlockingConnection(parameters)
    {"call": call, "ask": ask, "serve": serve}[sys.argv[2]](connection)
    connection.close()
