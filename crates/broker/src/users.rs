//! Who may connect, and what they may do.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use regex::bytes::Regex;

/// What somebody may do with an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Right {
    /// Declare and delete it.
    Configure,
    /// Publish to it, bind a queue.
    Write,
    /// Consume it, bind to it.
    Read,
}

impl Right {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Right::Configure => "configure",
            Right::Write => "write",
            Right::Read => "read",
        }
    }
}

/// What a user may do in a virtual host: which names of objects match.
///
/// ```
/// use leveret_broker::Permissions;
///
/// let reader = Permissions { read: "^orders".to_owned(), ..Permissions::none() };
/// assert_eq!(Permissions::default(), Permissions::all());
/// # let _ = reader;
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Permissions {
    /// A regular expression for the names of what may be declared and deleted. Empty matches nothing.
    pub configure: String,
    /// The same for what may be published to.
    pub write: String,
    /// The same for what may be consumed.
    pub read: String,
}

impl Permissions {
    /// Everything is allowed.
    pub fn all() -> Self {
        let all = || ".*".to_owned();
        Permissions { configure: all(), write: all(), read: all() }
    }

    /// Nothing is allowed.
    pub fn none() -> Self {
        Permissions { configure: String::new(), write: String::new(), read: String::new() }
    }
}

impl Default for Permissions {
    fn default() -> Self {
        Permissions::all()
    }
}

/// [`Permissions`], ready to be asked.
#[derive(Debug)]
pub(crate) struct Access {
    configure: Pattern,
    write: Pattern,
    read: Pattern,
}

#[derive(Debug)]
enum Pattern {
    Any,
    None,
    Some(Regex),
}

impl Pattern {
    fn new(text: &str) -> Result<Self, InvalidPermission> {
        match text {
            ".*" => Ok(Pattern::Any),
            // As RabbitMQ has it: `^$`, which matches the default exchange, and no queue.
            "" => Ok(Pattern::None),
            text => Regex::new(text).map(Pattern::Some).map_err(|error| InvalidPermission {
                pattern: text.to_owned(),
                reason: error.to_string(),
            }),
        }
    }

    fn matches(&self, name: &[u8]) -> bool {
        match self {
            Pattern::Any => true,
            Pattern::None => name.is_empty(),
            Pattern::Some(regex) => regex.is_match(name),
        }
    }
}

impl Access {
    pub(crate) fn new(permissions: &Permissions) -> Result<Self, InvalidPermission> {
        Ok(Access {
            configure: Pattern::new(&permissions.configure)?,
            write: Pattern::new(&permissions.write)?,
            read: Pattern::new(&permissions.read)?,
        })
    }

    #[inline]
    pub(crate) fn allows(&self, right: Right, name: &[u8]) -> bool {
        match right {
            Right::Configure => self.configure.matches(name),
            Right::Write => self.write.matches(name),
            Right::Read => self.read.matches(name),
        }
    }
}

/// A permission that is no regular expression.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidPermission {
    pattern: String,
    reason: String,
}

impl fmt::Display for InvalidPermission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the permission {:?} is no regular expression: {}", self.pattern, self.reason)
    }
}

impl std::error::Error for InvalidPermission {}

/// A user: password, and what they may do in which virtual host.
#[derive(Clone)]
pub(crate) struct User {
    password: String,
    access: HashMap<String, Arc<Access>>,
}

/// Without the password.
impl fmt::Debug for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("User").field("vhosts", &self.access.keys()).finish_non_exhaustive()
    }
}

/// All users.
#[derive(Clone, Debug, Default)]
pub(crate) struct Users {
    all: HashMap<String, User>,
    /// They may connect from this machine alone.
    loopback: HashSet<String>,
}

impl Users {
    pub(crate) fn add(&mut self, name: &str, password: &str) {
        let user = User { password: password.to_owned(), access: HashMap::new() };
        self.all
            .entry(name.to_owned())
            .and_modify(|one| password.clone_into(&mut one.password))
            .or_insert(user);
    }

    /// Of these users, any others may connect from elsewhere.
    pub(crate) fn keep_on_loopback(&mut self, names: impl IntoIterator<Item = String>) {
        self.loopback = names.into_iter().collect();
    }

    pub(crate) fn permit(&mut self, name: &str, vhost: &str, access: Access) {
        if let Some(user) = self.all.get_mut(name) {
            user.access.insert(vhost.to_owned(), Arc::new(access));
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.all.keys().cloned().collect()
    }

    /// Whether a user may connect: with this password, and from this address; `None` is this process.
    pub(crate) fn lets_in(&self, name: &str, password: &[u8], peer: Option<SocketAddr>) -> bool {
        let is_local = peer.is_none_or(|peer| peer.ip().to_canonical().is_loopback());
        self.knows(name, password) && (is_local || !self.loopback.contains(name))
    }

    /// Whether the password is right. How long this takes says nothing about how much of it was.
    fn knows(&self, name: &str, password: &[u8]) -> bool {
        let Some(user) = self.all.get(name) else { return false };
        let right = user.password.as_bytes();
        let differences = right.iter().zip(password).fold(0, |sum, (a, b)| sum | (a ^ b));
        right.len() == password.len() && differences == 0
    }

    /// What a user may do in a virtual host, if anything.
    pub(crate) fn access(&self, name: &str, vhost: &str) -> Option<Arc<Access>> {
        self.all.get(name)?.access.get(vhost).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_say_what_may_be_done() {
        let permissions = Permissions {
            configure: "^mine-".to_owned(),
            read: ".*".to_owned(),
            ..Permissions::none()
        };
        let access = Access::new(&permissions).unwrap();
        assert!(access.allows(Right::Configure, b"mine-1"));
        assert!(!access.allows(Right::Configure, b"yours"));
        assert!(access.allows(Right::Read, b"yours"));
        assert!(!access.allows(Right::Write, b"mine-1"));
        let error = Access::new(&Permissions { write: "(".to_owned(), ..Permissions::none() });
        assert!(error.unwrap_err().to_string().contains('('));
    }

    #[test]
    fn some_users_may_connect_from_this_machine_alone() {
        let mut users = Users::default();
        users.keep_on_loopback(["guest".to_owned()]);
        users.add("guest", "guest");
        users.add("other", "secret");
        let from = |address: &str| Some(SocketAddr::new(address.parse().unwrap(), 1234));
        for here in
            [None, from("127.0.0.1"), from("127.1.2.3"), from("::1"), from("::ffff:127.0.0.1")]
        {
            assert!(users.lets_in("guest", b"guest", here), "{here:?}");
            assert!(!users.lets_in("guest", b"wrong", here), "{here:?}");
        }
        for elsewhere in ["192.0.2.1", "10.0.0.1", "::ffff:192.0.2.1", "fd00::1"].map(from) {
            assert!(!users.lets_in("guest", b"guest", elsewhere), "{elsewhere:?}");
            assert!(users.lets_in("other", b"secret", elsewhere), "{elsewhere:?}");
        }
        users.keep_on_loopback([]);
        assert!(users.lets_in("guest", b"guest", from("192.0.2.1")));
    }

    #[test]
    fn a_password_is_right_or_wrong() {
        let mut users = Users::default();
        users.add("me", "secret");
        for (name, password, known) in [
            ("me", "secret", true),
            ("me", "secre", false),
            ("me", "secret1", false),
            ("you", "", false),
        ] {
            assert_eq!(users.knows(name, password.as_bytes()), known, "{name} {password}");
        }
        assert!(!format!("{users:?}").contains("secret"));
    }
}
