//! All methods: class, id, name, fields and their types, in the order they have on the wire.

use super::{Encode, methods, read_field};
use crate::error::{DecodeError, Fault};
use crate::field::Reader;

methods! {
    /// Opening, tuning and closing the connection. All on channel 0.
    connection = 10 {
        /// Server: the handshake begins.
        10 Start ['a] as ConnectionStart, "connection.start" {
            /// Always 0.
            version_major: u8,
            /// Always 9.
            version_minor: u8,
            /// Product, version, capabilities, cluster name…
            server_properties: Table<'a>,
            /// The SASL mechanisms on offer, separated by spaces.
            mechanisms: LongStr<'a>,
            /// The locales on offer, separated by spaces.
            locales: LongStr<'a>,
        }
        /// Client: the mechanism and the credentials.
        11 StartOk ['a] as ConnectionStartOk, "connection.start-ok" {
            /// Product, version, capabilities, connection name…
            client_properties: Table<'a>,
            /// The SASL mechanism chosen.
            mechanism: ShortStr<'a>,
            /// The credentials, as the mechanism wants them.
            response: Secret<'a>,
            /// The locale chosen.
            locale: ShortStr<'a>,
        }
        /// Server: the mechanism needs another round.
        20 Secure ['a] as ConnectionSecure, "connection.secure" {
            /// What the mechanism asks.
            challenge: Secret<'a>,
        }
        /// Client: the answer to `secure`.
        21 SecureOk ['a] as ConnectionSecureOk, "connection.secure-ok" {
            /// What the mechanism answers.
            response: Secret<'a>,
        }
        /// Server: the limits it offers.
        30 Tune [] as ConnectionTune, "connection.tune" {
            /// The highest channel number; 0 = no limit.
            channel_max: u16,
            /// The largest frame, framing included; 0 = no limit.
            frame_max: u32,
            /// Seconds between signs of life; 0 = none.
            heartbeat: u16,
        }
        /// Client: the limits that hold.
        31 TuneOk [] as ConnectionTuneOk, "connection.tune-ok" {
            /// The highest channel number; 0 = no limit.
            channel_max: u16,
            /// The largest frame, framing included; 0 = no limit.
            frame_max: u32,
            /// Seconds between signs of life; 0 = none.
            heartbeat: u16,
        }
        /// Client: the virtual host.
        40 Open ['a] as ConnectionOpen, "connection.open" {
            /// Its name.
            virtual_host: ShortStr<'a>,
            @after ShortStr<'_>,
            @after bool,
        }
        /// Server: the connection is ready.
        41 OpenOk [] as ConnectionOpenOk, "connection.open-ok" {
            @reserved ShortStr<'_>,
        }
        /// Either side: the connection is to end, and why.
        50 Close ['a] as ConnectionClose, "connection.close" {
            /// Why.
            reply_code: ReplyCode,
            /// Why, in words.
            reply_text: ShortStr<'a>,
            /// The class of the method at fault, or 0.
            class_id: u16,
            /// The method at fault, or 0.
            method_id: u16,
        }
        /// Either side: the close is agreed to; nothing follows.
        51 CloseOk [] as ConnectionCloseOk, "connection.close-ok" {}
        /// Server: publishing is stopped until `unblocked`.
        60 Blocked ['a] as ConnectionBlocked, "connection.blocked" {
            /// Why, in words.
            reason: ShortStr<'a>,
        }
        /// Server: publishing goes on.
        61 Unblocked [] as ConnectionUnblocked, "connection.unblocked" {}
        /// Client: a new secret before the old one expires.
        70 UpdateSecret ['a] as ConnectionUpdateSecret, "connection.update-secret" {
            /// The new secret.
            new_secret: Secret<'a>,
            /// Why, for the server's log.
            reason: ShortStr<'a>,
        }
        /// Server: the new secret holds.
        71 UpdateSecretOk [] as ConnectionUpdateSecretOk, "connection.update-secret-ok" {}
    }

    /// Opening and closing channels.
    channel = 20 {
        /// Client: open this channel.
        10 Open [] as ChannelOpen, "channel.open" {
            @reserved ShortStr<'_>,
        }
        /// Server: it is open.
        11 OpenOk [] as ChannelOpenOk, "channel.open-ok" {
            @reserved LongStr<'_>,
        }
        /// Either side: stop or go on sending contents.
        20 Flow [] as ChannelFlow, "channel.flow" {
            /// Whether contents may be sent.
            active: bool,
        }
        /// The answer to `flow`.
        21 FlowOk [] as ChannelFlowOk, "channel.flow-ok" {
            /// Whether contents will be sent.
            active: bool,
        }
        /// Either side: the channel is to end, and why.
        40 Close ['a] as ChannelClose, "channel.close" {
            /// Why.
            reply_code: ReplyCode,
            /// Why, in words.
            reply_text: ShortStr<'a>,
            /// The class of the method at fault, or 0.
            class_id: u16,
            /// The method at fault, or 0.
            method_id: u16,
        }
        /// Either side: the close is agreed to; the number is free again.
        41 CloseOk [] as ChannelCloseOk, "channel.close-ok" {}
    }

    /// Access tickets: a relic that RabbitMQ still answers, because very old clients ask.
    access = 30 {
        /// Client: asks for a ticket.
        10 Request ['a] as AccessRequest, "access.request" {
            /// For what.
            realm: ShortStr<'a>,
            /// Ignored.
            exclusive: bool,
            /// Ignored.
            passive: bool,
            /// Ignored.
            active: bool,
            /// Ignored.
            write: bool,
            /// Ignored.
            read: bool,
        }
        /// Server: the ticket, which means nothing.
        11 RequestOk [] as AccessRequestOk, "access.request-ok" {
            /// Always 1.
            ticket: u16,
        }
    }

    /// Exchanges, and bindings between them.
    exchange = 40 {
        /// Client: this exchange shall exist.
        10 Declare ['a] as ExchangeDeclare, "exchange.declare" {
            @reserved u16,
            /// Its name.
            exchange: ShortStr<'a>,
            /// `direct`, `fanout`, `topic`, `headers`, or a plugin's.
            kind: ShortStr<'a>,
            /// Only ask whether it exists.
            passive: bool,
            /// Survives a restart of the broker.
            durable: bool,
            /// Deleted when its last binding goes.
            auto_delete: bool,
            /// Takes messages from other exchanges only.
            internal: bool,
            /// No answer wanted.
            nowait: bool,
            /// `alternate-exchange` and others.
            arguments: Table<'a>,
        }
        /// Server: it exists.
        11 DeclareOk [] as ExchangeDeclareOk, "exchange.declare-ok" {}
        /// Client: this exchange shall not exist.
        20 Delete ['a] as ExchangeDelete, "exchange.delete" {
            @reserved u16,
            /// Its name.
            exchange: ShortStr<'a>,
            /// Only if nothing is bound to it.
            if_unused: bool,
            /// No answer wanted.
            nowait: bool,
        }
        /// Server: it is gone.
        21 DeleteOk [] as ExchangeDeleteOk, "exchange.delete-ok" {}
        /// Client: messages shall flow from one exchange to another.
        30 Bind ['a] as ExchangeBind, "exchange.bind" {
            @reserved u16,
            /// Where messages go.
            destination: ShortStr<'a>,
            /// Where they come from.
            source: ShortStr<'a>,
            /// Which ones.
            routing_key: ShortStr<'a>,
            /// No answer wanted.
            nowait: bool,
            /// Which ones, for a headers exchange.
            arguments: Table<'a>,
        }
        /// Server: they will.
        31 BindOk [] as ExchangeBindOk, "exchange.bind-ok" {}
        /// Client: and no longer.
        40 Unbind ['a] as ExchangeUnbind, "exchange.unbind" {
            @reserved u16,
            /// Where messages went.
            destination: ShortStr<'a>,
            /// Where they came from.
            source: ShortStr<'a>,
            /// Which ones.
            routing_key: ShortStr<'a>,
            /// No answer wanted.
            nowait: bool,
            /// Which ones, for a headers exchange.
            arguments: Table<'a>,
        }
        /// Server: no longer.
        51 UnbindOk [] as ExchangeUnbindOk, "exchange.unbind-ok" {}
    }

    /// Queues, and what is bound to them.
    queue = 50 {
        /// Client: this queue shall exist.
        10 Declare ['a] as QueueDeclare, "queue.declare" {
            @reserved u16,
            /// Its name; empty = the broker chooses one.
            queue: ShortStr<'a>,
            /// Only ask whether it exists.
            passive: bool,
            /// Survives a restart of the broker.
            durable: bool,
            /// For this connection alone, and gone with it.
            exclusive: bool,
            /// Deleted when its last consumer goes.
            auto_delete: bool,
            /// No answer wanted.
            nowait: bool,
            /// `x-message-ttl`, `x-queue-type` and others.
            arguments: Table<'a>,
        }
        /// Server: it exists.
        11 DeclareOk ['a] as QueueDeclareOk, "queue.declare-ok" {
            /// Its name.
            queue: ShortStr<'a>,
            /// Messages ready for delivery.
            message_count: u32,
            /// Consumers on it.
            consumer_count: u32,
        }
        /// Client: messages shall flow from an exchange to a queue.
        20 Bind ['a] as QueueBind, "queue.bind" {
            @reserved u16,
            /// Where messages go; empty = the queue declared last on this channel.
            queue: ShortStr<'a>,
            /// Where they come from.
            exchange: ShortStr<'a>,
            /// Which ones.
            routing_key: ShortStr<'a>,
            /// No answer wanted.
            nowait: bool,
            /// Which ones, for a headers exchange.
            arguments: Table<'a>,
        }
        /// Server: they will.
        21 BindOk [] as QueueBindOk, "queue.bind-ok" {}
        /// Client: drop all messages that are ready for delivery.
        30 Purge ['a] as QueuePurge, "queue.purge" {
            @reserved u16,
            /// Of which queue.
            queue: ShortStr<'a>,
            /// No answer wanted.
            nowait: bool,
        }
        /// Server: they are dropped.
        31 PurgeOk [] as QueuePurgeOk, "queue.purge-ok" {
            /// How many.
            message_count: u32,
        }
        /// Client: this queue shall not exist.
        40 Delete ['a] as QueueDelete, "queue.delete" {
            @reserved u16,
            /// Its name.
            queue: ShortStr<'a>,
            /// Only if it has no consumers.
            if_unused: bool,
            /// Only if it has no messages.
            if_empty: bool,
            /// No answer wanted.
            nowait: bool,
        }
        /// Server: it is gone.
        41 DeleteOk [] as QueueDeleteOk, "queue.delete-ok" {
            /// How many messages went with it.
            message_count: u32,
        }
        /// Client: messages shall flow no longer.
        50 Unbind ['a] as QueueUnbind, "queue.unbind" {
            @reserved u16,
            /// Where messages went.
            queue: ShortStr<'a>,
            /// Where they came from.
            exchange: ShortStr<'a>,
            /// Which ones.
            routing_key: ShortStr<'a>,
            /// Which ones, for a headers exchange.
            arguments: Table<'a>,
        }
        /// Server: no longer.
        51 UnbindOk [] as QueueUnbindOk, "queue.unbind-ok" {}
    }

    /// Publishing, delivering and settling messages.
    basic = 60 {
        /// Client: how much may be delivered before it is settled.
        10 Qos [] as BasicQos, "basic.qos" {
            /// In bytes. RabbitMQ takes only 0, no limit.
            prefetch_size: u32,
            /// In messages; 0 = no limit.
            prefetch_count: u16,
            /// For all consumers of the channel together, and not for each new one.
            global: bool,
        }
        /// Server: the limit holds.
        11 QosOk [] as BasicQosOk, "basic.qos-ok" {}
        /// Client: deliver what this queue has.
        20 Consume ['a] as BasicConsume, "basic.consume" {
            @reserved u16,
            /// The queue; empty = the one declared last on this channel.
            queue: ShortStr<'a>,
            /// The consumer's name on this channel; empty = the broker chooses one.
            consumer_tag: ShortStr<'a>,
            /// Not what this connection published. RabbitMQ ignores it.
            no_local: bool,
            /// Deliveries count as settled when they are sent.
            no_ack: bool,
            /// No other consumer beside this one.
            exclusive: bool,
            /// No answer wanted.
            nowait: bool,
            /// `x-priority` and others.
            arguments: Table<'a>,
        }
        /// Server: it will.
        21 ConsumeOk ['a] as BasicConsumeOk, "basic.consume-ok" {
            /// The consumer's name.
            consumer_tag: ShortStr<'a>,
        }
        /// Either side: no more deliveries to this consumer.
        30 Cancel ['a] as BasicCancel, "basic.cancel" {
            /// The consumer's name.
            consumer_tag: ShortStr<'a>,
            /// No answer wanted.
            nowait: bool,
        }
        /// The answer to `cancel`.
        31 CancelOk ['a] as BasicCancelOk, "basic.cancel-ok" {
            /// The consumer's name.
            consumer_tag: ShortStr<'a>,
        }
        /// Client: a message. Its content follows.
        40 Publish ['a] as BasicPublish, "basic.publish" {
            @reserved u16,
            /// To which exchange; empty = the default exchange, straight to the queue named by the key.
            exchange: ShortStr<'a>,
            /// The routing key.
            routing_key: ShortStr<'a>,
            /// Return it if it reaches no queue.
            mandatory: bool,
            /// Return it if no consumer is ready. RabbitMQ closes the connection on it (540).
            immediate: bool,
        }
        /// Server: a message that came back. Its content follows.
        50 Return ['a] as BasicReturn, "basic.return" {
            /// Why.
            reply_code: ReplyCode,
            /// Why, in words.
            reply_text: ShortStr<'a>,
            /// The exchange it was published to.
            exchange: ShortStr<'a>,
            /// The routing key it was published with.
            routing_key: ShortStr<'a>,
        }
        /// Server: a message for a consumer. Its content follows.
        60 Deliver ['a] as BasicDeliver, "basic.deliver" {
            /// For which one.
            consumer_tag: ShortStr<'a>,
            /// The number to settle it by, counted per channel.
            delivery_tag: u64,
            /// It was delivered before.
            redelivered: bool,
            /// The exchange it was published to.
            exchange: ShortStr<'a>,
            /// The routing key it was published with.
            routing_key: ShortStr<'a>,
        }
        /// Client: one message of this queue, if it has one.
        70 Get ['a] as BasicGet, "basic.get" {
            @reserved u16,
            /// The queue.
            queue: ShortStr<'a>,
            /// It counts as settled when it is sent.
            no_ack: bool,
        }
        /// Server: here it is. Its content follows.
        71 GetOk ['a] as BasicGetOk, "basic.get-ok" {
            /// The number to settle it by, counted per channel.
            delivery_tag: u64,
            /// It was delivered before.
            redelivered: bool,
            /// The exchange it was published to.
            exchange: ShortStr<'a>,
            /// The routing key it was published with.
            routing_key: ShortStr<'a>,
            /// How many are left.
            message_count: u32,
        }
        /// Server: it has none.
        72 GetEmpty [] as BasicGetEmpty, "basic.get-empty" {
            @reserved ShortStr<'_>,
        }
        /// Client: a delivery is done. Server: a publish is safe.
        80 Ack [] as BasicAck, "basic.ack" {
            /// Which one.
            delivery_tag: u64,
            /// And all before it; with tag 0, all so far.
            multiple: bool,
        }
        /// Client: a delivery is refused.
        90 Reject [] as BasicReject, "basic.reject" {
            /// Which one.
            delivery_tag: u64,
            /// Back to the queue, and not to the dead letters.
            requeue: bool,
        }
        /// Client: deliver all unsettled ones again, without an answer.
        100 RecoverAsync [] as BasicRecoverAsync, "basic.recover-async" {
            /// To whoever is free, and not to this consumer. RabbitMQ takes nothing else.
            requeue: bool,
        }
        /// Client: deliver all unsettled ones again.
        110 Recover [] as BasicRecover, "basic.recover" {
            /// To whoever is free, and not to this consumer. RabbitMQ takes nothing else.
            requeue: bool,
        }
        /// Server: it will.
        111 RecoverOk [] as BasicRecoverOk, "basic.recover-ok" {}
        /// Client: deliveries are refused. Server: publishes are not safe.
        120 Nack [] as BasicNack, "basic.nack" {
            /// Which one.
            delivery_tag: u64,
            /// And all before it; with tag 0, all so far.
            multiple: bool,
            /// Back to the queue, and not to the dead letters.
            requeue: bool,
        }
    }

    /// Transactions on a channel.
    tx = 90 {
        /// Client: from here on, publishes and acks wait for a commit.
        10 Select [] as TxSelect, "tx.select" {}
        /// Server: they will.
        11 SelectOk [] as TxSelectOk, "tx.select-ok" {}
        /// Client: let them happen.
        20 Commit [] as TxCommit, "tx.commit" {}
        /// Server: they did.
        21 CommitOk [] as TxCommitOk, "tx.commit-ok" {}
        /// Client: forget them.
        30 Rollback [] as TxRollback, "tx.rollback" {}
        /// Server: forgotten.
        31 RollbackOk [] as TxRollbackOk, "tx.rollback-ok" {}
    }

    /// Publisher confirms on a channel.
    confirm = 85 {
        /// Client: from here on, each publish is to be acked or nacked.
        10 Select [] as ConfirmSelect, "confirm.select" {
            /// No answer wanted.
            nowait: bool,
        }
        /// Server: it will be.
        11 SelectOk [] as ConfirmSelectOk, "confirm.select-ok" {}
    }
}
