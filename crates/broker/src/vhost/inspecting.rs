//! What the properties of a publish ask for, and whether they may.

use leveret_wire::{Properties, RawProperties, ShortStr, Value};

use super::{ChannelId, Vhost};
use crate::erlang::type_name;
use crate::fields::Fields;
use crate::message::Aside;
use crate::refusal::Refusal;

/// The longest `expiration`, in milliseconds: ten years.
const LONGEST_EXPIRATION: u64 = 10 * 365 * 24 * 60 * 60 * 1000;

/// How long a line of RabbitMQ's may get.
const LINE: usize = 80;

/// What was found in properties.
#[derive(Debug, Default)]
pub(super) struct Inspected {
    /// In milliseconds.
    pub(super) ttl: Option<u64>,
    pub(super) aside: Aside,
    /// The properties without what nobody is to see, and with what was put in their place.
    pub(super) altered: Option<RawProperties>,
}

impl Vhost {
    /// What the properties ask for, if it is in order.
    pub(super) fn inspect(
        &self,
        channel: ChannelId,
        raw: &RawProperties,
    ) -> Result<Inspected, Refusal> {
        let is_deep = raw.fault().is_some();
        let mut properties = match is_deep {
            true => raw.get_of_any_depth().unwrap_or_default(),
            false => raw.get(),
        };
        let mut inspected = Inspected::default();
        let mut altered = false;
        // In the order in which RabbitMQ looks.
        if let Some(address) = self.direct_reply_address(channel, &properties)? {
            properties.reply_to = Some(address);
            altered = true;
        }
        if !self.profile.is_at_least_4() {
            self.check_user_id(channel, &properties)?;
        }
        if let Some(expiration) = &properties.expiration {
            inspected.ttl = Some(parse_expiration(expiration)?);
        }
        if let Some(headers) = &mut properties.headers {
            for name in ["CC", "BCC"] {
                let copies = copies(headers.get(name), name)?;
                if name == "BCC" {
                    inspected.aside.blind.clone_from(&copies);
                }
                inspected.aside.copies.extend(copies);
            }
            // Nobody is to know of the blind copies.
            altered |= headers.remove("BCC").is_some();
        }
        if let Some(mode @ (0 | 3..)) = properties.delivery_mode
            && !self.profile.is_at_least_4()
        {
            let text = format!("invalid message: {{delivery_mode_unknown,{mode}}}");
            return Err(Refusal::precondition_failed(text));
        }
        if self.profile.is_at_least_4() {
            self.check_user_id(channel, &properties)?;
            // The headers are respelled by recursion: deep ones stay as they are.
            let deep_headers = properties.headers.take_if(|_| is_deep);
            altered |= respell(&mut properties, &mut inspected);
            properties.headers = deep_headers.or(properties.headers);
        }
        inspected.altered = altered.then(|| RawProperties::from(&properties));
        Ok(inspected)
    }

    /// Whoever says who they are must say the truth.
    fn check_user_id(
        &self,
        channel: ChannelId,
        properties: &Properties<'_>,
    ) -> Result<(), Refusal> {
        let user = self.user_of(channel);
        match &properties.user_id {
            Some(claimed) if *claimed != user => Err(Refusal::precondition_failed(format_args!(
                "user_id property set to '{claimed}' but authenticated user was '{user}'"
            ))),
            _ => Ok(()),
        }
    }
}

/// 4.3 takes messages apart and writes them anew: the headers sorted, each name once, and the expiration as a number. Says
/// whether there was anything to write. 3.10 passes on what came.
fn respell(properties: &mut Properties<'_>, inspected: &mut Inspected) -> bool {
    if let Some(headers) = properties.headers.take() {
        let mut fields = Fields::of(&headers);
        fields.sort_once_each();
        if fields.len() < headers.len() {
            inspected.aside.headers = Some(headers.borrowed().into_owned());
        }
        properties.headers = Some(fields.to_table());
    }
    if let Some(ttl) = inspected.ttl {
        properties.expiration = ShortStr::try_from(ttl.to_string()).ok();
    }
    properties.headers.is_some() || properties.expiration.is_some()
}

/// The routing keys in a `CC` or `BCC`: the strings of an array, whatever else is in it. What is too long for a routing key
/// leads nowhere.
fn copies(header: Option<Value<'_>>, name: &str) -> Result<Vec<ShortStr<'static>>, Refusal> {
    let Some(header) = header else { return Ok(Vec::new()) };
    let Some(keys) = header.as_array() else {
        let kind = type_name(&header);
        let text = format!("invalid message: {{unacceptable_type_in_header,\"{name}\",{kind}}}");
        return Err(Refusal::precondition_failed(text));
    };
    let key = |value: Value<'_>| match value {
        Value::Str(key) => ShortStr::from_bytes(key.as_bytes().to_vec()).ok(),
        _ => None,
    };
    Ok(keys.iter().filter_map(key).collect())
}

/// `expiration` is a string of milliseconds, read as Erlang reads integers.
fn parse_expiration(text: &ShortStr<'_>) -> Result<u64, Refusal> {
    let refused = |reason: &str| {
        Refusal::precondition_failed(format_args!("invalid expiration '{text}': {reason}"))
    };
    let shown = text.to_string();
    let negative = shown.starts_with('-');
    let unsigned = shown.strip_prefix(['-', '+']).unwrap_or(&shown);
    let end = unsigned.find(|c: char| !c.is_ascii_digit()).unwrap_or(unsigned.len());
    let (digits, leftover) = unsigned.split_at(end);
    if digits.is_empty() {
        return Err(refused("no_integer"));
    }
    if !leftover.is_empty() {
        return Err(refused(&format!("{{leftover_string,{leftover:?}}}")));
    }
    let significant = match digits.trim_start_matches('0') {
        "" => return Ok(0),
        significant => significant,
    };
    let wrong = |what: &str, sign: &str| {
        // A line that gets too long goes on below, one to the right of where the bracket opened.
        let column = format!("invalid expiration '{shown}': ").chars().count();
        let fits = column + what.len() + sign.len() + significant.len() + "{,}".len() <= LINE;
        let gap = if fits { String::new() } else { format!("\n{:1$}", "", column + 1) };
        refused(&format!("{{{what},{gap}{sign}{significant}}}"))
    };
    if negative {
        return Err(wrong("value_negative", "-"));
    }
    let number = significant.parse().ok().filter(|number| *number <= LONGEST_EXPIRATION);
    number.ok_or_else(|| wrong("value_too_large", ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<u64, String> {
        let text = ShortStr::try_from(text).unwrap();
        parse_expiration(&text).map_err(|refusal| refusal.text)
    }

    #[test]
    fn expirations_are_read_as_rabbitmq_reads_them() {
        for (text, number) in [("0060000", 60000), ("+60000", 60000), ("-0", 0)] {
            assert_eq!(parsed(text), Ok(number), "{text}");
        }
        assert_eq!(parsed("315360000000"), Ok(LONGEST_EXPIRATION));
        for (text, wrong) in [
            ("-1", "{value_negative,-1}"),
            ("abc", "no_integer"),
            ("", "no_integer"),
            (" 5", "no_integer"),
            ("1.5", r#"{leftover_string,".5"}"#),
            ("60000\n", r#"{leftover_string,"\n"}"#),
            ("315360000001", "{value_too_large,315360000001}"),
        ] {
            let text_of_refusal =
                format!("PRECONDITION_FAILED - invalid expiration '{text}': {wrong}");
            assert_eq!(parsed(text), Err(text_of_refusal));
        }
        let long = "99999999999999999999";
        let below = format!("{{value_too_large,\n{}{long}}}", " ".repeat(44));
        assert!(parsed(long).unwrap_err().ends_with(&below));
    }
}
