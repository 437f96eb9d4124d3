//! Users, virtual hosts and permissions, from a file or from flags.
//!
//! ```toml
//! virtual_hosts = ["/", "shop"]
//! loopback_users = ["guest"]   # who may connect from this machine alone; this is the default
//!
//! [[users]]
//! name = "shop"
//! password = "secret"
//!
//! [[users.permissions]]      # without any, everything is allowed everywhere
//! virtual_host = "shop"
//! configure = "^shop"
//! write = ".*"
//! read = ".*"
//! ```

use std::collections::HashSet;
use std::fmt;
use std::path::Path;

use leveret_broker::{Builder, Permissions};
use serde::Deserialize;

use crate::failure::Failure;
use crate::files;

/// What the file says.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Definitions {
    #[serde(default)]
    virtual_hosts: Vec<String>,
    #[serde(default)]
    users: Vec<User>,
    #[serde(default)]
    loopback_users: Option<Vec<String>>,
}

/// A user.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct User {
    name: String,
    password: String,
    #[serde(default)]
    permissions: Vec<Permission>,
}

/// Without the password.
impl fmt::Debug for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("User").field("name", &self.name).finish_non_exhaustive()
    }
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Permission {
    virtual_host: String,
    #[serde(default)]
    configure: String,
    #[serde(default)]
    write: String,
    #[serde(default)]
    read: String,
}

impl User {
    pub(super) fn new(name: &str, password: &str) -> Self {
        User { name: name.to_owned(), password: password.to_owned(), permissions: Vec::new() }
    }
}

impl Definitions {
    pub(super) fn read(path: &Path) -> Result<Self, Failure> {
        files::read(path)
    }

    /// Adds those that were given as flags.
    pub(super) fn add(&mut self, users: Vec<User>, virtual_hosts: Vec<String>) {
        self.users.extend(users);
        self.virtual_hosts.extend(virtual_hosts);
    }

    /// The beginning of a URL by which one may connect.
    pub(super) fn example_user(&self) -> String {
        match self.users.first() {
            Some(user) => format!("{}:PASSWORD@", user.name),
            None => "guest:guest@".to_owned(),
        }
    }

    /// Whether no user may connect from another machine.
    pub(super) fn are_all_local(&self) -> bool {
        let is_local = |name: &str| match &self.loopback_users {
            Some(local) => local.iter().any(|one| one == name),
            None => name == "guest",
        };
        match self.users.as_slice() {
            [] => is_local("guest"),
            users => users.iter().all(|user| is_local(&user.name)),
        }
    }

    /// Tells a broker of them, if they make sense.
    pub(super) fn give_to(&self, mut builder: Builder) -> Result<Builder, Failure> {
        let mut names = HashSet::new();
        if let Some(twice) = self.users.iter().find(|user| !names.insert(&user.name)) {
            return Err(Failure::wrong(format_args!("the user {:?} is given twice", twice.name)));
        }
        let known: HashSet<&str> = match self.virtual_hosts.is_empty() {
            true => HashSet::from(["/"]),
            false => self.virtual_hosts.iter().map(String::as_str).collect(),
        };
        if let Some(names) = &self.loopback_users {
            builder = builder.loopback_users(names);
        }
        for name in &self.virtual_hosts {
            builder = builder.virtual_host(name);
        }
        for user in &self.users {
            builder = builder.user(&user.name, &user.password);
            for permission in &user.permissions {
                let Permission { virtual_host, configure, write, read } = permission.clone();
                if !known.contains(virtual_host.as_str()) {
                    return Err(Failure::wrong(format_args!(
                        "the user {:?} has permissions in the virtual host {virtual_host:?}, which is not among \
                         virtual_hosts",
                        user.name
                    )));
                }
                let permissions = Permissions { configure, write, read };
                builder = builder.permissions(&user.name, virtual_host, permissions);
            }
        }
        Ok(builder)
    }
}

#[cfg(test)]
mod tests {
    use leveret_broker::Broker;

    use super::*;

    fn parse(text: &str) -> Definitions {
        toml::from_str(text).unwrap()
    }

    #[test]
    fn the_example_of_the_documentation_is_understood() {
        let example: String = include_str!("file.rs")
            .lines()
            .skip_while(|line| *line != "//! ```toml")
            .skip(1)
            .take_while(|line| *line != "//! ```")
            .map(|line| line.trim_start_matches("//!").to_owned() + "\n")
            .collect();
        let definitions = parse(&example);
        assert_eq!(definitions.virtual_hosts, ["/", "shop"]);
        assert_eq!(definitions.users[0].permissions[0].configure, "^shop");
        assert!(!format!("{definitions:?}").contains("secret"));
        definitions.give_to(Broker::builder()).unwrap();
    }

    #[test]
    fn guest_is_local_unless_the_file_says_otherwise() {
        let other = "users = [{name = 'a', password = ''}]";
        for (text, all_local) in [
            ("", true),
            (other, false),
            ("loopback_users = []", false),
            (&format!("loopback_users = ['a']\n{other}"), true),
        ] {
            assert_eq!(parse(text).are_all_local(), all_local, "{text}");
        }
    }

    #[test]
    fn mistakes_are_named() {
        let twice = "users = [{name = 'a', password = ''}, {name = 'a', password = ''}]";
        let elsewhere =
            "[[users]]\nname = 'a'\npassword = ''\npermissions = [{virtual_host = 'x'}]";
        for (text, named) in [(twice, "\"a\" is given twice"), (elsewhere, "\"x\"")] {
            let error = parse(text).give_to(Broker::builder()).unwrap_err();
            assert!(error.to_string().contains(named), "{error}");
        }
        let error = files::from_toml::<Definitions>("virtual_host = []").unwrap_err();
        assert!(error.contains("line 1") && error.contains("virtual_host"), "{error}");
    }
}
