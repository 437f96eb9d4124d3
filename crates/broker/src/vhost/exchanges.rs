//! Exchanges: declare, delete, and bindings between them.

use std::sync::Arc;

use foldhash::HashSet;
use leveret_wire::method::exchange;
use leveret_wire::{Method, ReplyCode, ShortStr, Table};

use super::{ChannelId, Destination, Exchange, ExchangeId, Vhost};
use crate::arguments::{self, ExchangeDeclared, words};
use crate::exchange::{Bindings, Bound, Kind};
use crate::refusal::Refusal;
use crate::users::Right;

impl Vhost {
    /// The exchanges that are there from the beginning.
    pub(super) fn add_predeclared_exchanges(&mut self) {
        let exchanges = [
            ("", Kind::Direct, false),
            ("amq.direct", Kind::Direct, false),
            ("amq.fanout", Kind::Fanout, false),
            ("amq.topic", Kind::Topic, false),
            ("amq.headers", Kind::Headers, false),
            ("amq.match", Kind::Headers, false),
            ("amq.rabbitmq.trace", Kind::Topic, true),
        ];
        for (name, kind, internal) in exchanges {
            let id = self.add_exchange(Exchange {
                name: Arc::new(ShortStr::from_static(name)),
                kind,
                durable: true,
                auto_delete: false,
                internal,
                arguments: Table::new(),
                alternate: None,
                bindings: Bindings::new(kind, self.profile),
                bound_to: HashSet::default(),
            });
            if name.is_empty() {
                self.default_exchange = id;
            }
        }
    }

    pub(super) fn add_exchange(&mut self, exchange: Exchange) -> ExchangeId {
        let name = (*exchange.name).clone();
        let id = self.exchanges.insert(exchange);
        self.exchange_names.insert(name, id);
        id
    }

    /// The exchange of this name.
    pub(super) fn exchange_named(&self, name: &ShortStr<'_>) -> Result<ExchangeId, Refusal> {
        match self.exchange_names.get(name.as_bytes()) {
            Some(id) => Ok(*id),
            None => Err(words::no_exchange(&self.name, name)),
        }
    }

    pub(super) fn declare_exchange(
        &mut self,
        channel: ChannelId,
        declare: &exchange::Declare<'_>,
    ) -> Result<(), Refusal> {
        self.refuse_declare_if_planned()?;
        if declare.passive {
            let name = arguments::declared_name(&declare.exchange);
            check_not_default(&name)?;
            self.check_any_access(channel, "exchange", &name)?;
            self.exchange_named(&name)?;
        } else {
            self.make_exchange(channel, declare)?;
        }
        if !declare.nowait {
            self.reply_declared(channel, Method::ExchangeDeclareOk(exchange::DeclareOk {}));
        }
        Ok(())
    }

    fn make_exchange(
        &mut self,
        channel: ChannelId,
        declare: &exchange::Declare<'_>,
    ) -> Result<(), Refusal> {
        let name = &arguments::declared_name(&declare.exchange);
        let kind = arguments::exchange_kind(self.profile, &declare.kind)?;
        check_not_default(name)?;
        self.check_access(channel, Right::Configure, "exchange", name)?;
        if let Some(found) = self.exchange_names.get(name.as_bytes()) {
            let found = &self.exchanges[*found];
            let current = ExchangeDeclared {
                kind: found.kind,
                durable: found.durable,
                auto_delete: found.auto_delete,
                internal: found.internal,
                arguments: &found.arguments,
            };
            let wanted = ExchangeDeclared {
                kind,
                durable: declare.durable,
                auto_delete: declare.auto_delete,
                internal: declare.internal,
                arguments: &declare.arguments,
            };
            return arguments::same_exchange(self.profile, &self.name, name, &current, &wanted);
        }
        arguments::check_exchange_name(name)?;
        let alternate = arguments::alternate_exchange(&self.name, name, &declare.arguments)?;
        if let Some(alternate) = &alternate {
            self.check_access(channel, Right::Read, "exchange", name)?;
            self.check_access(channel, Right::Write, "exchange", alternate)?;
        }
        self.add_exchange(Exchange {
            name: Arc::new(name.borrowed().into_owned()),
            kind,
            durable: declare.durable,
            auto_delete: declare.auto_delete,
            internal: declare.internal,
            arguments: declare.arguments.borrowed().into_owned(),
            alternate,
            bindings: Bindings::new(kind, self.profile),
            bound_to: HashSet::default(),
        });
        Ok(())
    }

    pub(super) fn delete_exchange(
        &mut self,
        channel: ChannelId,
        delete: &exchange::Delete<'_>,
    ) -> Result<(), Refusal> {
        let name = &arguments::declared_name(&delete.exchange);
        check_not_default(name)?;
        arguments::check_exchange_deletion(&self.name, name)?;
        self.check_access(channel, Right::Configure, "exchange", name)?;
        if let Some(id) = self.exchange_names.get(name.as_bytes()).copied() {
            if delete.if_unused && !self.exchanges[id].bindings.is_empty() {
                return Err(words::exchange_in_use(&self.name, name));
            }
            self.remove_exchange(id);
        }
        if !delete.nowait {
            self.reply(channel, &exchange::DeleteOk {});
        }
        Ok(())
    }

    /// Deletes an exchange with the bindings to and from it, and the auto-delete exchanges that lose their last binding with it.
    pub(super) fn remove_exchange(&mut self, id: ExchangeId) {
        self.remove_exchanges(vec![id]);
    }

    /// In a loop: clients decide how long a chain of auto-delete exchanges is.
    fn remove_exchanges(&mut self, mut ids: Vec<ExchangeId>) {
        while let Some(id) = ids.pop() {
            let Some(exchange) = self.exchanges.remove(id) else { continue };
            self.exchange_names.remove(&*exchange.name);
            for destination in exchange.bindings.destinations() {
                if let Some(bound_to) = self.sources_of(destination) {
                    bound_to.remove(&id);
                }
            }
            ids.extend(self.unbind_sources(exchange.bound_to, Destination::Exchange(id)));
        }
    }

    /// A destination is gone: deletes its bindings, and the auto-delete exchanges that lose their last binding with it.
    pub(super) fn unbind_from_all(
        &mut self,
        sources: HashSet<ExchangeId>,
        destination: Destination,
    ) {
        let unused = self.unbind_sources(sources, destination);
        self.remove_exchanges(unused);
    }

    /// Deletes the bindings to a destination. Gives back the exchanges that are to be deleted as well.
    fn unbind_sources(
        &mut self,
        sources: HashSet<ExchangeId>,
        destination: Destination,
    ) -> Vec<ExchangeId> {
        let is_left_over = |source: &ExchangeId| {
            if let Some(exchange) = self.exchanges.get_mut(*source) {
                exchange.bindings.remove_destination(destination);
            }
            self.is_left_over(*source)
        };
        sources.into_iter().filter(is_left_over).collect()
    }

    /// Whether this is an auto-delete exchange without bindings.
    fn is_left_over(&self, id: ExchangeId) -> bool {
        let exchange = self.exchanges.get(id);
        exchange.is_some_and(|one| one.auto_delete && one.bindings.is_empty())
    }

    pub(super) fn bind_exchange(
        &mut self,
        channel: ChannelId,
        bind: &exchange::Bind<'_>,
    ) -> Result<(), Refusal> {
        let destination = &arguments::declared_name(&bind.destination);
        let source = &arguments::declared_name(&bind.source);
        self.check_access(channel, Right::Write, "exchange", destination)?;
        check_not_default(destination)?;
        check_not_default(source)?;
        self.check_access(channel, Right::Read, "exchange", source)?;
        let from = self.exchange_named(source)?;
        let to = self.exchange_named(destination)?;
        self.bind(from, Destination::Exchange(to), bind.routing_key.as_bytes(), &bind.arguments)?;
        if !bind.nowait {
            self.reply(channel, &exchange::BindOk {});
        }
        Ok(())
    }

    pub(super) fn unbind_exchange(
        &mut self,
        channel: ChannelId,
        unbind: &exchange::Unbind<'_>,
    ) -> Result<(), Refusal> {
        let destination = &arguments::declared_name(&unbind.destination);
        let source = &arguments::declared_name(&unbind.source);
        self.check_access(channel, Right::Write, "exchange", destination)?;
        check_not_default(destination)?;
        check_not_default(source)?;
        self.check_access(channel, Right::Read, "exchange", source)?;
        let to = self.exchange_names.get(destination.as_bytes()).copied();
        let from = self.exchange_names.get(source.as_bytes()).copied();
        if let (Some(from), Some(to)) = (from, to) {
            let key = unbind.routing_key.as_bytes();
            self.unbind(from, Destination::Exchange(to), key, &unbind.arguments);
        }
        if !unbind.nowait {
            self.reply(channel, &exchange::UnbindOk {});
        }
        Ok(())
    }

    pub(super) fn bind(
        &mut self,
        source: ExchangeId,
        destination: Destination,
        key: &[u8],
        arguments: &Table<'_>,
    ) -> Result<(), Refusal> {
        let Some(exchange) = self.exchanges.get_mut(source) else { return Ok(()) };
        crate::exchange::validate(exchange.kind, self.profile, key, arguments)?;
        if exchange.bindings.bind(key, arguments, destination) == Bound::Existed {
            return Ok(());
        }
        if let Some(bound_to) = self.sources_of(destination) {
            bound_to.insert(source);
        }
        Ok(())
    }

    /// The exchanges that have bindings to a destination.
    fn sources_of(&mut self, destination: Destination) -> Option<&mut HashSet<ExchangeId>> {
        match destination {
            Destination::Queue(queue) => self.queues.get_mut(queue).map(|one| &mut one.bound_to),
            Destination::Exchange(to) => self.exchanges.get_mut(to).map(|one| &mut one.bound_to),
        }
    }

    pub(super) fn unbind(
        &mut self,
        source: ExchangeId,
        destination: Destination,
        key: &[u8],
        arguments: &Table<'_>,
    ) {
        let Some(exchange) = self.exchanges.get_mut(source) else { return };
        if !exchange.bindings.unbind(key, arguments, destination) {
            return;
        }
        if !exchange.bindings.lead_to(destination)
            && let Some(bound_to) = self.sources_of(destination)
        {
            bound_to.remove(&source);
        }
        if self.is_left_over(source) {
            self.remove_exchange(source);
        }
    }

    /// Whether the user of a channel may do anything with what is asked about. 3.10 tells everybody.
    pub(super) fn check_any_access(
        &self,
        channel: ChannelId,
        kind: &str,
        name: &ShortStr<'_>,
    ) -> Result<(), Refusal> {
        if !self.profile.is_at_least_4() {
            return Ok(());
        }
        self.check_access(channel, Right::Read, kind, name)
            .or_else(|_| self.check_access(channel, Right::Write, kind, name))
            .or_else(|_| self.check_access(channel, Right::Configure, kind, name))
    }

    /// Whether the user of a channel may do this.
    #[inline]
    pub(super) fn check_access(
        &self,
        channel: ChannelId,
        right: Right,
        kind: &str,
        name: &ShortStr<'_>,
    ) -> Result<(), Refusal> {
        let channel = self.channels.get(channel);
        let connection = channel.and_then(|found| self.connections.get(found.connection));
        let Some(connection) = connection else { return Ok(()) };
        // The default exchange goes by this name.
        let asked =
            if name.is_empty() && kind == "exchange" { b"amq.default" } else { name.as_bytes() };
        if connection.access.allows(right, asked) {
            return Ok(());
        }
        let (vhost, user) = (&self.name, &connection.user);
        let named =
            if asked == b"amq.default" { "amq.default".to_owned() } else { name.to_string() };
        let access = match self.profile.is_at_least_4() {
            true => format!("{} access", right.name()),
            false => "access".to_owned(),
        };
        let text =
            format!("{access} to {kind} '{named}' in vhost '{vhost}' refused for user '{user}'");
        Err(Refusal::new(ReplyCode::ACCESS_REFUSED, text))
    }
}

/// The default exchange is bound to every queue by its name, and nobody may change that.
pub(super) fn check_not_default(name: &ShortStr<'_>) -> Result<(), Refusal> {
    if name.is_empty() { Err(words::default_exchange()) } else { Ok(()) }
}
