//! Which method does what.

use leveret_wire::method::{access, basic};
use leveret_wire::{Method, ReplyCode};

use super::channel::Settlement;
use super::{ChannelId, Vhost};
use crate::refusal::Refusal;

impl Vhost {
    /// A method that a client sent on an open channel. (Opening, closing and publishing are the session's affair.)
    pub(crate) fn method(
        &mut self,
        channel: ChannelId,
        method: &Method<'_>,
    ) -> Result<(), Refusal> {
        match method {
            Method::ExchangeDeclare(declare) => self.declare_exchange(channel, declare),
            Method::ExchangeDelete(delete) => self.delete_exchange(channel, delete),
            Method::ExchangeBind(bind) => self.bind_exchange(channel, bind),
            Method::ExchangeUnbind(unbind) => self.unbind_exchange(channel, unbind),

            Method::QueueDeclare(declare) => self.declare_queue(channel, declare),
            Method::QueueBind(bind) => self.bind_queue(channel, bind),
            Method::QueueUnbind(unbind) => self.unbind_queue(channel, unbind),
            Method::QueuePurge(purge) => self.purge_queue(channel, purge),
            Method::QueueDelete(delete) => self.delete_queue(channel, delete),

            Method::BasicQos(qos) => self.qos(channel, qos),
            Method::BasicConsume(consume) => self.consume(channel, consume),
            Method::BasicCancel(cancel) => {
                self.cancel(channel, cancel);
                Ok(())
            }
            // The client's answer to a cancel of ours.
            Method::BasicCancelOk(heard) => {
                self.cancel_heard(channel, heard);
                Ok(())
            }
            Method::BasicGet(get) => self.get(channel, get),

            Method::BasicAck(basic::Ack { delivery_tag, multiple }) => {
                self.settle(channel, *delivery_tag, *multiple, Settlement::Ack)
            }
            Method::BasicNack(basic::Nack { delivery_tag, multiple, requeue }) => {
                let refuse = Settlement::Refuse { requeue: *requeue, by_reject: false };
                self.settle(channel, *delivery_tag, *multiple, refuse)
            }
            Method::BasicReject(basic::Reject { delivery_tag, requeue }) => {
                let refuse = Settlement::Refuse { requeue: *requeue, by_reject: true };
                self.settle(channel, *delivery_tag, false, refuse)
            }
            Method::BasicRecover(recover) => {
                check_recover(recover.requeue)?;
                // First the answer: what comes after it is delivered anew.
                self.reply(channel, &basic::RecoverOk {});
                self.recover(channel);
                Ok(())
            }
            Method::BasicRecoverAsync(recover) => {
                check_recover(recover.requeue)?;
                self.recover(channel);
                Ok(())
            }

            Method::ConfirmSelect(select) => self.confirm_select(channel, select),
            Method::TxSelect(_) => self.tx_select(channel),
            Method::TxCommit(_) => self.commit(channel),
            Method::TxRollback(_) => self.roll_back(channel),

            Method::AccessRequest(_) => {
                self.reply(channel, &access::RequestOk { ticket: 1 });
                Ok(())
            }
            Method::ChannelFlow(flow) if flow.active => {
                self.reply(channel, &leveret_wire::method::channel::FlowOk { active: true });
                Ok(())
            }
            Method::ChannelFlow(_) => Err(Refusal::new(ReplyCode::NOT_IMPLEMENTED, "active=false")),
            // What only a broker says.
            _ => Err(Refusal::new(ReplyCode::COMMAND_INVALID, "unimplemented method")),
        }
    }
}

/// Deliveries go back to their queues, and not to who had them.
fn check_recover(requeue: bool) -> Result<(), Refusal> {
    if requeue { Ok(()) } else { Err(Refusal::new(ReplyCode::NOT_IMPLEMENTED, "requeue=false")) }
}
