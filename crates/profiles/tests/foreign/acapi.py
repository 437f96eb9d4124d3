"""Programs by the documents of ACAPI: a worker with the handler Maxretry, a replier, a caller, a listener to events."""

import json

import pika
from program import declare, failures_wanted, rejections, run, say

SITE = "dc0.preprod"


def declare_client_queue(channel, queue, interval):
    """The queue of a client, with all that the document puts beside it."""
    retry, requeue, error = f"{queue}-retry", f"{queue}-retry-requeue", f"{queue}-error"
    declare(
        channel,
        [(retry, "fanout"), (requeue, "fanout"), (error, "fanout")],
        [
            (queue, {"x-dead-letter-exchange": retry}),
            (retry, {"x-dead-letter-exchange": requeue, "x-message-ttl": interval}),
            (error, None),
        ],
        [(retry, retry, "#"), (queue, requeue, "#"), (error, error, "#")],
    )


def worker(channel, queue, interval, max_retries, publish=()):
    declare_client_queue(channel, queue, interval)
    error = f"{queue}-error"
    channel.basic_qos(prefetch_count=1)

    def on_message(channel, method, properties, body):
        retries = rejections(properties, queue)
        say("delivered", body.decode())
        if retries >= failures_wanted(body):
            channel.basic_ack(method.delivery_tag)
            say("handled", body.decode())
        elif retries >= max_retries:
            info = {"error": "theirs", "num_attempts": retries + 1}
            headers = {"retry_info": json.dumps(info)}
            properties = pika.BasicProperties(headers=headers)
            channel.basic_publish(error, method.routing_key, body, properties)
            channel.basic_ack(method.delivery_tag)
        else:
            channel.basic_nack(method.delivery_tag, requeue=False)

    def say_what_failed():
        """Each message in the error queue says why it is there, in the form of Maxretry."""
        while True:
            method, properties, body = channel.basic_get(error, auto_ack=True)
            if method is None:
                return
            info = json.loads(properties.headers["retry_info"])
            info = info[0] if isinstance(info, list) else info
            say("failed", body.decode(), "after", info["num_attempts"])

    channel.basic_consume(queue, on_message)
    for body in publish:
        channel.basic_publish("", queue, body, pika.BasicProperties(delivery_mode=2))
    return say_what_failed


def replier(channel, queue, key, interval):
    """Replies go to the queue that `reply_to` names. They say nothing of the request."""
    declare_client_queue(channel, queue, interval)
    declare(channel, bindings=[(queue, f"{SITE}.e.topic.requests", key)])

    def on_request(channel, method, properties, body):
        reply = pika.BasicProperties()
        if body == b"with an id":
            reply.correlation_id = "of its own"
        channel.basic_publish("", properties.reply_to, body.upper(), reply)
        channel.basic_ack(method.delivery_tag)

    channel.basic_consume(queue, on_request)


def caller(channel, key, requests):
    """Each request has a queue of its own, and no more than its name says whose reply comes there."""
    for request in requests:
        queue = channel.queue_declare("", exclusive=True, auto_delete=True).method.queue

        def on_reply(channel, method, properties, body, request=request):
            say(request, "->", body.decode())

        channel.basic_consume(queue, on_reply, auto_ack=True)
        properties = pika.BasicProperties(reply_to=queue)
        channel.basic_publish(f"{SITE}.e.fanout.requests", key, request, properties)


def listener(channel, queue, pattern, publish):
    declare(channel, [], [(queue, None)], [(queue, f"{SITE}.e.topic.events", pattern)])

    def on_event(channel, method, properties, body):
        channel.basic_ack(method.delivery_tag)
        say("heard", body.decode())

    channel.basic_consume(queue, on_event)
    for body in publish:
        channel.basic_publish(f"{SITE}.e.fanout.events", "info.created", body)


PROGRAMS = {"worker": worker, "replier": replier, "caller": caller, "listener": listener}

if __name__ == "__main__":
    run(lambda channel, program, **settings: PROGRAMS[program](channel, **settings))
