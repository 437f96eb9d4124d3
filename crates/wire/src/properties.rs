//! The fourteen properties of a message, and the content header that holds them.

use std::fmt;

use bytes::{Buf, Bytes};

use crate::error::{DecodeError, Fault};
use crate::field::{Field, Reader, Writer};
use crate::method::{basic, sealed::Sealed};
use crate::table::Table;
use crate::text::ShortStr;
use crate::value::Value;

/// Class id, weight and body size: what precedes the properties in a content header.
const PREFIX: usize = 12;

/// Makes the struct and both directions of its codec from the table of properties. The flag of the first
/// is the highest bit, and so on downward, so the order of the rows is the order on the wire.
macro_rules! properties {
    ($($(#[$doc:meta])* $bit:literal $name:ident: $ty:ty,)*) => {
        /// The properties of a message. Each may be absent.
        ///
        /// Decoded ones borrow from the frame; [`Properties::into_owned`] cuts them loose.
        ///
        /// ```
        /// use leveret_wire::{Properties, Table};
        ///
        /// let properties = Properties {
        ///     content_type: Some("application/json".try_into()?),
        ///     delivery_mode: Some(2),
        ///     headers: Some(Table::from_pairs([("x-attempt", 3.into())])?),
        ///     ..Properties::default()
        /// };
        /// # Ok::<(), leveret_wire::InvalidValue>(())
        /// ```
        #[derive(Clone, Debug, Default, PartialEq)]
        #[cfg_attr(feature = "arbitrary", derive(arbitrary::Arbitrary))]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        #[cfg_attr(feature = "serde", serde(default, deny_unknown_fields))]
        pub struct Properties<'a> {
            $(
                $(#[$doc])*
                #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
                pub $name: Option<$ty>,
            )*
        }

        impl<'a> Properties<'a> {
            /// Decodes encoded properties: flags, then the values that are present.
            pub fn decode(bytes: &'a [u8]) -> Result<Self, DecodeError> {
                let mut properties = Properties::default();
                properties!(@walk bytes, $($bit $name: $ty => |value| properties.$name = Some(value),)*);
                Ok(properties)
            }

            /// Refuses what [`Properties::decode`] refuses, for less than half the time.
            fn check(bytes: &'a [u8]) -> Result<(), DecodeError> {
                properties!(@walk bytes, $($bit $name: $ty => |_value| (),)*);
                Ok(())
            }

            /// The same properties with their own memory.
            pub fn into_owned(self) -> Properties<'static> {
                Properties { $($name: self.$name.map(Field::own),)* }
            }
        }

        impl Sealed for Properties<'_> {}

        impl EncodeProperties for Properties<'_> {
            #[inline]
            fn encode(&self, buffer: &mut Vec<u8>) {
                let flags = 0u16 $(| u16::from(self.$name.is_some()) << $bit)*;
                let mut writer = Writer::new(buffer);
                flags.write(&mut writer);
                $(
                    if let Some(value) = &self.$name {
                        value.write(&mut writer);
                    }
                )*
            }
        }
    };

    // The one walk over encoded properties: what to do with each value is the caller's.
    (@walk $bytes:ident, $($bit:literal $name:ident: $ty:ty => |$value:ident| $take:expr,)*) => {
        // Bits of no property are ignored: RabbitMQ delivers messages that have them.
        let reader = &mut Reader::new($bytes);
        let flags = u16::read(reader).map_err(|error| error.named("properties", Some("flags")))?;
        $(
            if flags & (1 << $bit) != 0 {
                let $value = <$ty as Field<'_>>::read(reader)
                    .map_err(|error| error.named("properties", Some(stringify!($name))))?;
                $take;
            }
        )*
        reader.end().map_err(|error| error.named("properties", None))?;
    };
}

properties! {
    /// The body's media type, such as `application/json`.
    15 content_type: ShortStr<'a>,
    /// The body's encoding, such as `gzip`.
    14 content_encoding: ShortStr<'a>,
    /// Named values of the application's own.
    13 headers: Table<'a>,
    /// 1 = transient, 2 = persistent.
    12 delivery_mode: u8,
    /// From 0, the lowest.
    11 priority: u8,
    /// What ties a reply to its request, or messages to each other.
    10 correlation_id: ShortStr<'a>,
    /// Where a reply should go.
    9 reply_to: ShortStr<'a>,
    /// How long the message may wait in a queue: milliseconds, as text.
    8 expiration: ShortStr<'a>,
    /// The application's id of the message.
    7 message_id: ShortStr<'a>,
    /// Seconds since 1970.
    6 timestamp: u64,
    /// `type` on the wire: the application's name for this kind of message.
    #[cfg_attr(feature = "serde", serde(rename = "type"))]
    5 kind: ShortStr<'a>,
    /// Who published it. The broker refuses a name other than the connection's.
    4 user_id: ShortStr<'a>,
    /// The application that published it.
    3 app_id: ShortStr<'a>,
    /// Of no meaning in AMQP 0-9-1.
    2 cluster_id: ShortStr<'a>,
}

/// Properties that can be encoded: [`Properties`], [`PlainProperties`], [`RawProperties`] or [`EncodedProperties`]. This
/// trait is sealed.
pub trait EncodeProperties: Sealed {
    /// Appends flags and values.
    fn encode(&self, buffer: &mut Vec<u8>);
}

/// The properties that a publisher gives a message which has none of its own: few, so they take less time to make and to
/// encode than [`Properties`].
#[derive(Clone, Debug)]
pub struct PlainProperties<'a> {
    /// 1 = transient, 2 = persistent.
    pub delivery_mode: Option<u8>,
    /// The id of the message.
    pub message_id: ShortStr<'a>,
    /// Seconds since 1970.
    pub timestamp: Option<u64>,
}

impl Sealed for PlainProperties<'_> {}

impl EncodeProperties for PlainProperties<'_> {
    #[inline]
    fn encode(&self, buffer: &mut Vec<u8>) {
        let has_mode = u16::from(self.delivery_mode.is_some());
        let has_timestamp = u16::from(self.timestamp.is_some());
        let flags = has_mode << 12 | 1 << 7 | has_timestamp << 6;
        let mut writer = Writer::new(buffer);
        flags.write(&mut writer);
        if let Some(mode) = self.delivery_mode {
            mode.write(&mut writer);
        }
        self.message_id.write(&mut writer);
        if let Some(timestamp) = self.timestamp {
            timestamp.write(&mut writer);
        }
    }
}

/// Properties in the form they have on the wire, in one piece of memory that clones cheaply.
///
/// This is the form to keep a message in: nothing is decoded before somebody looks, and sending it on
/// copies the very bytes that came. They are checked once; a message whose properties are malformed can still be
/// looked at, moved aside and sent on, it just has none.
#[derive(Clone, PartialEq, Eq)]
pub struct RawProperties {
    bytes: Bytes,
    fault: Option<DecodeError>,
}

impl RawProperties {
    /// Properties of their encoded form, well-formed or not.
    #[inline]
    pub fn new(bytes: Bytes) -> Self {
        let fault = Properties::check(&bytes).err();
        RawProperties { bytes, fault }
    }

    /// What is wrong with them, if anything is.
    #[inline]
    pub fn fault(&self) -> Option<&DecodeError> {
        self.fault.as_ref()
    }

    /// The properties, decoded. None at all if they are malformed.
    pub fn get(&self) -> Properties<'_> {
        match self.fault {
            None => Properties::decode(&self.bytes).unwrap_or_default(),
            Some(_) => Properties::default(),
        }
    }

    /// The properties to send on, whose headers may be nested deeper than [`MAX_DEPTH`](crate::MAX_DEPTH): RabbitMQ takes and
    /// delivers such. `None` if anything else is wrong with them. Not to be walked through by recursion.
    #[doc(hidden)]
    pub fn get_of_any_depth(&self) -> Option<Properties<'static>> {
        const HEADERS: u16 = 1 << 13;
        let reader = &mut Reader::new(&self.bytes);
        let flags = u16::read(reader).ok()?;
        for _ in [15, 14].into_iter().filter(|bit| flags & 1 << bit != 0) {
            ShortStr::read(reader).ok()?;
        }
        let start = reader.offset();
        let headers = match flags & HEADERS {
            0 => None,
            _ => Some(Table::decode_any_depth(reader.long_slice().ok()?).ok()?.into_owned()),
        };
        let flags = (flags & !HEADERS).to_be_bytes();
        let others =
            [flags.as_slice(), self.bytes.get(2..start)?, self.bytes.get(reader.offset()..)?];
        let others = others.concat();
        Some(Properties { headers, ..Properties::decode(&others).ok()?.into_owned() })
    }

    /// Whether there are headers at all, which is known without decoding.
    #[inline]
    pub fn has_headers(&self) -> bool {
        const HEADERS: u8 = 1 << (13 - 8);
        self.fault.is_none() && self.bytes.first().is_some_and(|flags| flags & HEADERS != 0)
    }

    /// The value of one header.
    ///
    /// ```
    /// use leveret_wire::{Properties, RawProperties, Table};
    ///
    /// let headers = Table::from_pairs([("x-attempt", 3.into())])?;
    /// let raw = RawProperties::from(&Properties { headers: Some(headers), ..Properties::default() });
    /// assert_eq!(raw.header("x-attempt").and_then(|value| value.as_i64()), Some(3));
    /// # Ok::<(), leveret_wire::InvalidValue>(())
    /// ```
    pub fn header(&self, name: impl AsRef<[u8]>) -> Option<Value<'_>> {
        let headers = self.get().headers?;
        // The headers borrow from `self`, which `get` on a local table cannot express.
        let start = headers.as_bytes().as_ptr() as usize - self.bytes.as_ptr() as usize;
        let bytes = self.bytes.get(start..start + headers.as_bytes().len())?;
        Table::find(bytes, name.as_ref())
    }

    /// The correlation id, for less than decoding all of them takes.
    pub fn correlation_id(&self) -> Option<ShortStr<'_>> {
        let reader = &mut Reader::new(&self.bytes);
        let flags = u16::read(reader).ok()?;
        let has = |bit: u16| flags & 1 << bit != 0;
        if self.fault.is_some() || !has(10) {
            return None;
        }
        for _ in [15, 14].into_iter().filter(|bit| has(*bit)) {
            ShortStr::read(reader).ok()?;
        }
        if has(13) {
            reader.long_slice().ok()?;
        }
        for _ in [12, 11].into_iter().filter(|bit| has(*bit)) {
            u8::read(reader).ok()?;
        }
        ShortStr::read(reader).ok()
    }

    /// The encoded form: flags, then values.
    pub fn as_bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Copies them into memory of their own, if they shared that of a read.
    pub fn compact(&mut self) {
        self.bytes = Bytes::copy_from_slice(&self.bytes);
    }
}

impl Default for RawProperties {
    fn default() -> Self {
        RawProperties { bytes: Bytes::from_static(&[0, 0]), fault: None }
    }
}

impl From<&Properties<'_>> for RawProperties {
    fn from(properties: &Properties<'_>) -> Self {
        let mut buffer = Vec::new();
        properties.encode(&mut buffer);
        RawProperties { bytes: buffer.into(), fault: None }
    }
}

impl fmt::Debug for RawProperties {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.fault {
            None => self.get().fmt(f),
            Some(fault) => fault.fmt(f),
        }
    }
}

impl Sealed for RawProperties {}

impl EncodeProperties for RawProperties {
    #[inline]
    fn encode(&self, buffer: &mut Vec<u8>) {
        buffer.extend_from_slice(&self.bytes);
    }
}

/// Properties in the form they have on the wire, borrowed: to send on what somebody keeps in memory of their own.
#[derive(Clone, Copy, Debug)]
pub struct EncodedProperties<'a>(&'a [u8]);

impl<'a> EncodedProperties<'a> {
    /// From [`RawProperties::as_bytes`].
    pub fn new(bytes: &'a [u8]) -> Self {
        EncodedProperties(bytes)
    }
}

impl Sealed for EncodedProperties<'_> {}

impl EncodeProperties for EncodedProperties<'_> {
    #[inline]
    fn encode(&self, buffer: &mut Vec<u8>) {
        buffer.extend_from_slice(self.0);
    }
}

/// Appends a content header: what a message's body size and properties are.
#[inline]
pub(crate) fn encode_header(
    buffer: &mut Vec<u8>,
    body_size: usize,
    properties: &(impl EncodeProperties + ?Sized),
) {
    let mut prefix = [0; PREFIX];
    prefix[..2].copy_from_slice(&basic::CLASS_ID.to_be_bytes());
    prefix[4..].copy_from_slice(&(body_size as u64).to_be_bytes());
    buffer.extend_from_slice(&prefix);
    properties.encode(buffer);
}

/// Body size and properties of the payload of a header frame. A body of more than `max_body` is refused.
#[inline]
pub(crate) fn decode_header(
    mut payload: Bytes,
    max_body: u64,
) -> Result<(u64, RawProperties), DecodeError> {
    const WHAT: &str = "content header";
    let reader = &mut Reader::new(&payload);
    let named = |field| move |error: DecodeError| error.named(WHAT, Some(field));
    let class = u16::read(reader).map_err(named("class-id"))?;
    let weight = u16::read(reader).map_err(named("weight"))?;
    let announced = u64::read(reader).map_err(named("body-size"))?;
    if class != basic::CLASS_ID {
        return Err(DecodeError::new(Fault::ContentClass { class }, WHAT, 0));
    }
    if weight != 0 {
        return Err(DecodeError::new(Fault::ContentWeight { weight }, WHAT, 2));
    }
    if announced > max_body {
        return Err(DecodeError::new(Fault::BodyTooLarge { announced, max: max_body }, WHAT, 4));
    }
    payload.advance(PREFIX);
    Ok((announced, RawProperties::new(payload)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn properties_come_back_as_they_went() {
        let properties = Properties {
            content_type: Some(ShortStr::from_static("text/plain")),
            headers: Some(Table::from_pairs([("n", 1.into())]).unwrap()),
            timestamp: Some(u64::MAX),
            cluster_id: Some(ShortStr::EMPTY),
            ..Properties::default()
        };
        let raw = RawProperties::from(&properties);
        assert_eq!(raw.get(), properties);
        assert_eq!(RawProperties::new(raw.as_bytes().clone()), raw);
        assert_eq!(properties.clone().into_owned(), properties);
    }

    #[test]
    fn plain_properties_are_encoded_as_the_others_are() {
        let message_id = ShortStr::from_static("0123456789abcdef-1");
        for delivery_mode in [None, Some(1), Some(2)] {
            for timestamp in [None, Some(7)] {
                let id = message_id.clone();
                let plain = PlainProperties { delivery_mode, message_id: id.clone(), timestamp };
                let mut encoded = Vec::new();
                plain.encode(&mut encoded);
                let message_id = Some(id);
                let whole =
                    Properties { delivery_mode, message_id, timestamp, ..Properties::default() };
                assert_eq!(encoded, **RawProperties::from(&whole).as_bytes());
            }
        }
    }

    #[test]
    fn no_properties_are_two_zero_octets() {
        assert_eq!(RawProperties::from(&Properties::default()), RawProperties::default());
    }

    /// Properties with arrays nested so deep, and a content type and an id around them.
    fn nested(levels: u32) -> RawProperties {
        let array = |inside: u32| [b"A".as_slice(), &(inside * 5).to_be_bytes()].concat();
        let mut fields = b"\x01bt\x01\x01n".to_vec();
        fields.extend((0..levels - 1).rev().flat_map(array));
        let length = (fields.len() as u32).to_be_bytes();
        RawProperties::new([b"\xa0\x80\x01c", &length[..], &fields, b"\x02id"].concat().into())
    }

    #[test]
    fn headers_of_any_depth_can_be_sent_on_as_they_came() {
        for levels in [2, 64, 65, 100, 20_000] {
            let raw = nested(levels);
            assert_eq!(raw.fault().is_some(), levels > 64, "{levels}");
            let mut properties = raw.get_of_any_depth().unwrap();
            assert_eq!(RawProperties::from(&properties).as_bytes(), raw.as_bytes());
            assert_eq!(properties.message_id.as_ref().unwrap(), "id");
            // No walk of ours through them goes as deep as they do.
            assert_eq!(format!("{properties:?}").contains('…'), levels > 64);
            let headers = properties.headers.as_mut().unwrap();
            assert_eq!(headers.remove("b"), Some(Value::Bool(true)));
            headers.insert("c", 1).unwrap();
            assert_eq!(headers.len(), 2);
        }
        let plain = RawProperties::new(Bytes::from_static(b"\x80\x00\x01c"));
        assert_eq!(plain.get_of_any_depth(), Some(plain.get()));
        let mut cut = nested(100).as_bytes().to_vec();
        cut.pop();
        assert_eq!(RawProperties::new(cut.into()).get_of_any_depth(), None);
        let unknown = b"\x20\x00\x00\x00\x00\x03\x01n?".as_slice();
        assert_eq!(RawProperties::new(unknown.into()).get_of_any_depth(), None);
    }

    #[test]
    fn flags_of_no_property_are_passed_on_and_mean_nothing() {
        for flags in [1u16, 2, 3] {
            let raw = RawProperties::new(Bytes::copy_from_slice(&flags.to_be_bytes()));
            assert_eq!((raw.fault(), raw.get()), (None, Properties::default()));
            let mut sent_on = Vec::new();
            raw.encode(&mut sent_on);
            assert_eq!(sent_on, flags.to_be_bytes());
        }
    }

    #[test]
    fn a_fault_names_the_property_and_its_place() {
        // content-type of 2 bytes, then a priority that is missing.
        let raw = RawProperties::new(Bytes::from_static(b"\x88\x00\x02ab"));
        assert_eq!(
            raw.fault().unwrap().to_string(),
            "malformed properties, field priority, byte 5: bytes needed: 1, left: 0 (501 FRAME_ERROR)"
        );
    }

    #[test]
    fn a_header_is_found_without_copying_it() {
        let headers = Table::from_pairs([("a", 1.into()), ("b", "two".into())]).unwrap();
        let raw = RawProperties::from(&Properties { headers: Some(headers), ..Default::default() });
        fn header<'a>(raw: &'a RawProperties, name: &str) -> Option<Value<'a>> {
            raw.header(name)
        }
        assert_eq!(header(&raw, "b"), Some("two".into()));
        assert_eq!(header(&raw, "c"), None);
        assert!(raw.has_headers() && !RawProperties::default().has_headers());
        assert_eq!(RawProperties::default().header("b"), None);
    }
}
