"""A consumer and a producer by the document of Chandra: a dead-letter exchange, a retry queue and a parking lot."""

import pika
from program import declare, failures_wanted, rejections, run, say


def chandra(channel, interval, max_retries, publish=()):
    queue, dlx, retry, lot = "billing", "billing.dlx", "billing.retry", "billing.parking_lot"
    primary = {"x-dead-letter-exchange": dlx, "x-dead-letter-routing-key": "retry.billing"}
    waiting = {"x-message-ttl": interval, "x-dead-letter-exchange": "orders"}
    declare(
        channel,
        [("orders", "topic"), (dlx, "topic")],
        [(queue, primary), (retry, waiting), (lot, None)],
        [
            (queue, "orders", "order.*"),
            (queue, "orders", "retry.billing"),
            (retry, dlx, "retry.#"),
            (lot, dlx, "parking_lot"),
        ],
    )
    channel.confirm_delivery()
    channel.basic_qos(prefetch_count=1)

    def on_message(channel, method, properties, body):
        retries = rejections(properties, queue)
        say("delivered", body.decode())
        if retries >= failures_wanted(body):
            channel.basic_ack(method.delivery_tag)
            say("handled", body.decode())
        elif retries >= max_retries:
            channel.basic_publish(dlx, "parking_lot", body, properties, mandatory=True)
            channel.basic_ack(method.delivery_tag)
        else:
            channel.basic_nack(method.delivery_tag, requeue=False)

    channel.basic_consume(queue, on_message)
    for body in publish:
        properties = pika.BasicProperties(delivery_mode=2, headers={"tenant": "acme", "n": 1})
        channel.basic_publish("orders", "order.paid", body, properties, mandatory=True)


if __name__ == "__main__":
    run(chandra)
