"""A day in the life of a client that uses aio-pika. Takes the URL of an empty virtual host."""

import asyncio
import sys

import aio_pika
from aio_pika.exceptions import ChannelPreconditionFailed, DeliveryError

SOON = 20


async def main(url):
    for scenario in [publish_consume_ack, come_back_if_unroutable, die_and_say_of_what, ask_and_answer, be_refused]:
        connection = await aio_pika.connect(url)
        async with connection:
            await asyncio.wait_for(scenario(connection), SOON)
        print("ok", scenario.__name__)


async def publish_consume_ack(connection):
    channel = await connection.channel()
    exchange = await channel.declare_exchange("orders", aio_pika.ExchangeType.TOPIC, durable=True)
    queue = await channel.declare_queue("q", durable=True)
    await queue.bind(exchange, "order.#")
    for number in range(100):
        await exchange.publish(aio_pika.Message(b"%d" % number), "order.new.one")
    await channel.set_qos(prefetch_count=10)
    seen = []
    async with queue.iterator() as messages:
        async for message in messages:
            async with message.process():
                seen.append(int(message.body))
            if len(seen) == 100:
                break
    assert seen == list(range(100)), seen
    await queue.delete(if_empty=True, if_unused=True)


async def come_back_if_unroutable(connection):
    channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
    try:
        await channel.default_exchange.publish(aio_pika.Message(b"lost"), "nowhere", mandatory=True)
    except DeliveryError as error:
        assert error.message.delivery.reply_code == 312, error.message
    else:
        raise AssertionError("it reached a queue")


async def die_and_say_of_what(connection):
    channel = await connection.channel()
    dead = await channel.declare_queue("dead", durable=True)
    dead_letters = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
    queue = await channel.declare_queue("deadly", durable=True, arguments=dead_letters)
    await channel.default_exchange.publish(aio_pika.Message(b"bad"), "deadly")
    message = await queue.get(timeout=SOON)
    await message.nack(requeue=True)
    async with queue.iterator() as messages:
        async for message in messages:
            assert message.redelivered
            await message.reject(requeue=False)
            break
    async with dead.iterator() as messages:
        async for message in messages:
            (death,) = message.headers["x-death"]
            assert (death["reason"], death["queue"]) == ("rejected", "deadly"), death
            await message.ack()
            break


async def ask_and_answer(connection):
    channel = await connection.channel()
    questions = await channel.declare_queue("questions", durable=True)
    replies = await channel.get_queue("amq.rabbitmq.reply-to", ensure=False)
    answer = asyncio.get_running_loop().create_future()

    async def on_question(message):
        reply = aio_pika.Message(b"because", correlation_id=message.correlation_id)
        await channel.default_exchange.publish(reply, message.reply_to)

    await replies.consume(answer.set_result, no_ack=True)
    await questions.consume(on_question, no_ack=True)
    ask = aio_pika.Message(b"why?", correlation_id="7", reply_to="amq.rabbitmq.reply-to")
    await channel.default_exchange.publish(ask, "questions")
    message = await answer
    assert (message.body, message.correlation_id) == (b"because", "7"), message


async def be_refused(connection):
    channel = await connection.channel()
    await channel.declare_queue("refused", durable=True)
    try:
        await channel.declare_queue("refused", durable=True, arguments={"x-message-ttl": 1000})
    except ChannelPreconditionFailed as error:
        assert "inequivalent arg 'x-message-ttl' for queue 'refused' in vhost" in str(error), error
    else:
        raise AssertionError("it was not refused")
    # The connection goes on.
    await (await connection.channel()).declare_queue("refused", passive=True)


asyncio.run(main(sys.argv[1]))
