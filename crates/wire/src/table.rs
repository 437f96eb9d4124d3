//! Field tables and arrays, kept in the form they have on the wire.
//!
//! A table is decoded as it is read and not before: it costs no allocation on the way in, one copy on
//! the way out, and what another client wrote passes through byte for byte.

use std::borrow::Cow;
use std::fmt;

use crate::error::{DecodeError, InvalidValue};
use crate::field::{Field, Reader, Writer};
use crate::text::ShortStr;
use crate::value::{MAX_DEPTH, Shape, Value, check, check_any_depth};

/// A field table: names and values, in order.
///
/// Arguments of declarations, properties of peers and headers of messages are such tables.
///
/// ```
/// use leveret_wire::{Table, Value};
///
/// let mut arguments = Table::new();
/// arguments.insert("x-message-ttl", 60_000)?;
/// arguments.insert("x-dead-letter-exchange", "retry")?;
/// assert_eq!(arguments.get("x-message-ttl"), Some(Value::I32(60_000)));
/// assert_eq!(format!("{arguments:?}"), r#"{"x-message-ttl": 60000, "x-dead-letter-exchange": "retry"}"#);
/// # Ok::<(), leveret_wire::InvalidValue>(())
/// ```
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct Table<'a> {
    /// The fields without the length before them. Always well-formed: checked or written by us.
    bytes: Cow<'a, [u8]>,
}

impl<'a> Table<'a> {
    /// An empty table.
    pub const fn new() -> Self {
        Table { bytes: Cow::Borrowed(&[]) }
    }

    /// A table of names and values.
    ///
    /// ```
    /// use leveret_wire::Table;
    /// let table = Table::from_pairs([("x-max-length", 10.into()), ("x-overflow", "reject-publish".into())])?;
    /// assert_eq!(table.iter().count(), 2);
    /// # Ok::<(), leveret_wire::InvalidValue>(())
    /// ```
    pub fn from_pairs<'k, 'v>(
        pairs: impl IntoIterator<Item = (&'k str, Value<'v>)>,
    ) -> Result<Table<'static>, InvalidValue> {
        let mut table = Table::new();
        for (name, value) in pairs {
            table.insert(name, value)?;
        }
        Ok(table)
    }

    /// A table of its encoded fields (without the four octets of length). They are checked, not copied.
    #[inline]
    pub fn decode(bytes: &'a [u8]) -> Result<Self, DecodeError> {
        if !bytes.is_empty() {
            check(bytes, Shape::Table)?;
        }
        Ok(Table { bytes: Cow::Borrowed(bytes) })
    }

    /// The same, however deep it is nested.
    pub(crate) fn decode_any_depth(bytes: &'a [u8]) -> Result<Self, DecodeError> {
        check_any_depth(bytes, Shape::Table)?;
        Ok(Table { bytes: Cow::Borrowed(bytes) })
    }

    pub(crate) fn from_checked(bytes: &'a [u8]) -> Self {
        Table { bytes: Cow::Borrowed(bytes) }
    }

    /// The encoded fields, without the four octets of length.
    #[inline]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Whether there are no fields.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The fields, in order. A table from a peer may have a name twice.
    pub fn iter(&self) -> impl Iterator<Item = (ShortStr<'_>, Value<'_>)> {
        self.entries().map(|entry| (entry.name, entry.value))
    }

    /// The encoded form of each field, name and value, in order.
    pub fn encoded_fields(&self) -> impl Iterator<Item = &[u8]> {
        self.entries().map(|entry| &self.bytes[entry.start..entry.end])
    }

    /// How many fields.
    pub fn len(&self) -> usize {
        self.iter().count()
    }

    /// The first value of that name.
    pub fn get(&self, name: impl AsRef<[u8]>) -> Option<Value<'_>> {
        Self::find(&self.bytes, name.as_ref())
    }

    /// The first value of that name in the bytes of a table.
    pub(crate) fn find<'t>(bytes: &'t [u8], name: &[u8]) -> Option<Value<'t>> {
        let mut entries = Entries { reader: Reader::new(bytes) };
        entries.find(|entry| entry.name.as_bytes() == name).map(|entry| entry.value)
    }

    /// Sets the value of a name: at its old place if the table has it, else at the end.
    pub fn insert<'v>(
        &mut self,
        name: impl AsRef<[u8]>,
        value: impl Into<Value<'v>>,
    ) -> Result<(), InvalidValue> {
        let (name, value) = (ShortStr::from_bytes(name.as_ref())?, value.into());
        if Self::find(&self.bytes, name.as_bytes()).is_none() {
            return append(self.bytes.to_mut(), &name, &value);
        }
        let mut field = Vec::new();
        append(&mut field, &name, &value)?;
        if let Some((place, _)) = self.take_out(name.as_bytes()) {
            drop(self.bytes.to_mut().splice(place..place, field));
        }
        Ok(())
    }

    /// Takes all fields of that name out. Gives back the first value, if there was one.
    pub fn remove(&mut self, name: impl AsRef<[u8]>) -> Option<Value<'static>> {
        self.take_out(name.as_ref()).map(|(_, value)| value)
    }

    /// Takes all fields of that name out, in one pass: a peer's table may have it thousands of times. Gives back
    /// where the first one was, and its value.
    fn take_out(&mut self, name: &[u8]) -> Option<(usize, Value<'static>)> {
        let mut first = None;
        let mut kept = Vec::new();
        for entry in self.entries() {
            if entry.name.as_bytes() != name {
                if first.is_some() {
                    kept.extend_from_slice(&self.bytes[entry.start..entry.end]);
                }
            } else if first.is_none() {
                first = Some((entry.start, entry.value.into_owned()));
            }
        }
        let (place, _) = first.as_ref()?;
        let bytes = self.bytes.to_mut();
        bytes.truncate(*place);
        bytes.extend_from_slice(&kept);
        first
    }

    /// The same table, borrowed from this one.
    pub fn borrowed(&self) -> Table<'_> {
        Table { bytes: Cow::Borrowed(&self.bytes) }
    }

    /// The same table with its own memory.
    pub fn into_owned(self) -> Table<'static> {
        Table { bytes: Cow::Owned(self.bytes.into_owned()) }
    }

    /// How deep tables and arrays are nested in it: 1 if there are none.
    pub(crate) fn depth(&self) -> usize {
        check(&self.bytes, Shape::Table).unwrap_or(usize::MAX)
    }

    fn entries(&self) -> Entries<'_> {
        Entries { reader: Reader::new(&self.bytes) }
    }
}

/// Writes a field behind others, or nothing at all.
fn append(bytes: &mut Vec<u8>, name: &ShortStr<'_>, value: &Value<'_>) -> Result<(), InvalidValue> {
    let end = bytes.len();
    let mut writer = Writer::new(bytes);
    name.write(&mut writer);
    value.write(&mut writer).inspect_err(|_| bytes.truncate(end))
}

/// A field of a table, and where its bytes are.
struct Entry<'t> {
    name: ShortStr<'t>,
    value: Value<'t>,
    start: usize,
    end: usize,
}

struct Entries<'t> {
    reader: Reader<'t>,
}

impl<'t> Iterator for Entries<'t> {
    type Item = Entry<'t>;

    // The bytes are well-formed by construction, so `?` on an error never ends the walk early.
    fn next(&mut self) -> Option<Entry<'t>> {
        if self.reader.is_empty() {
            return None;
        }
        let start = self.reader.offset();
        let name = ShortStr::read(&mut self.reader).ok()?;
        let value = Value::read_checked(&mut self.reader).ok()?;
        Some(Entry { name, value, start, end: self.reader.offset() })
    }
}

impl fmt::Debug for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.depth() {
            // By recursion, it would cost the stack.
            depth if depth > MAX_DEPTH => f.write_str("{…}"),
            _ => f.debug_map().entries(self.iter()).finish(),
        }
    }
}

/// A field array: values, in order.
///
/// ```
/// use leveret_wire::{Array, Value};
/// let cc = Array::from_values(["audit".into(), "billing".into()])?;
/// assert_eq!(cc.iter().next(), Some(Value::from("audit")));
/// # Ok::<(), leveret_wire::InvalidValue>(())
/// ```
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct Array<'a> {
    bytes: Cow<'a, [u8]>,
}

impl<'a> Array<'a> {
    /// An empty array.
    pub const fn new() -> Self {
        Array { bytes: Cow::Borrowed(&[]) }
    }

    /// An array of values.
    pub fn from_values<'v>(
        values: impl IntoIterator<Item = Value<'v>>,
    ) -> Result<Array<'static>, InvalidValue> {
        let mut array = Array::new();
        for value in values {
            array.push(value)?;
        }
        Ok(array)
    }

    /// An array of its encoded values (without the four octets of length). They are checked, not copied.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, DecodeError> {
        check(bytes, Shape::Array)?;
        Ok(Array { bytes: Cow::Borrowed(bytes) })
    }

    pub(crate) fn from_checked(bytes: &'a [u8]) -> Self {
        Array { bytes: Cow::Borrowed(bytes) }
    }

    /// The encoded values, without the four octets of length.
    #[inline]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The values, in order.
    pub fn iter(&self) -> impl Iterator<Item = Value<'_>> {
        let mut reader = Reader::new(&self.bytes);
        std::iter::from_fn(move || {
            if reader.is_empty() { None } else { Value::read_checked(&mut reader).ok() }
        })
    }

    /// Appends a value.
    pub fn push<'v>(&mut self, value: impl Into<Value<'v>>) -> Result<(), InvalidValue> {
        value.into().write(&mut Writer::new(self.bytes.to_mut()))
    }

    /// The same array, borrowed from this one.
    pub fn borrowed(&self) -> Array<'_> {
        Array { bytes: Cow::Borrowed(&self.bytes) }
    }

    /// The same array with its own memory.
    pub fn into_owned(self) -> Array<'static> {
        Array { bytes: Cow::Owned(self.bytes.into_owned()) }
    }

    pub(crate) fn depth(&self) -> usize {
        check(&self.bytes, Shape::Array).unwrap_or(usize::MAX)
    }
}

impl fmt::Debug for Array<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.depth() {
            depth if depth > MAX_DEPTH => f.write_str("[…]"),
            _ => f.debug_list().entries(self.iter()).finish(),
        }
    }
}

#[cfg(feature = "arbitrary")]
mod arbitrary_impls {
    use super::*;
    use arbitrary::{Arbitrary, Result, Unstructured};

    impl<'a> Arbitrary<'a> for Table<'a> {
        fn arbitrary(u: &mut Unstructured<'a>) -> Result<Self> {
            let mut table = Table::new();
            for pair in u.arbitrary_iter::<(ShortStr<'a>, Value<'a>)>()? {
                let (name, value) = pair?;
                // Numbers that are not finite are refused, as they should be.
                let _ = table.insert(&name, value);
            }
            Ok(table)
        }
    }

    impl<'a> Arbitrary<'a> for Array<'a> {
        fn arbitrary(u: &mut Unstructured<'a>) -> Result<Self> {
            let mut array = Array::new();
            for value in u.arbitrary_iter::<Value<'a>>()? {
                let _ = array.push(value?);
            }
            Ok(array)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Fault;

    fn nested(levels: usize) -> Result<Table<'static>, InvalidValue> {
        let mut table = Table::new();
        for _ in 1..levels {
            table = Table::from_pairs([("t", table.into())])?;
        }
        Ok(table)
    }

    #[test]
    fn a_value_is_replaced_at_its_place_and_removed_wholly() {
        let mut table =
            Table::from_pairs([("a", 1.into()), ("b", "two".into()), ("c", true.into())]).unwrap();
        table.insert("b", Array::from_values([2.into()]).unwrap()).unwrap();
        assert_eq!(format!("{table:?}"), r#"{"a": 1, "b": [2], "c": true}"#);
        assert_eq!(table.encoded_fields().collect::<Vec<_>>().concat(), table.as_bytes());
        assert_eq!(table.encoded_fields().last(), Some(b"\x01ct\x01".as_slice()));
        assert_eq!(table.remove("a"), Some(Value::I32(1)));
        assert_eq!(table.remove("a"), None);
        assert_eq!(format!("{table:?}"), r#"{"b": [2], "c": true}"#);
    }

    #[test]
    fn a_refused_value_leaves_the_table_as_it_was() {
        let mut table = Table::from_pairs([("a", 1.into())]).unwrap();
        let before = table.clone();
        assert_eq!(table.insert("a", f64::NAN), Err(InvalidValue::NotFinite));
        assert_eq!(table.insert("b", f32::INFINITY), Err(InvalidValue::NotFinite));
        assert_eq!(table.insert("k".repeat(256), 1), Err(InvalidValue::TooLong { length: 256 }));
        assert_eq!(table, before);

        let mut array = Array::new();
        assert_eq!(array.push(f64::NEG_INFINITY), Err(InvalidValue::NotFinite));
        assert!(array.is_empty());
    }

    #[test]
    fn a_name_that_stands_twice_gives_its_first_value_and_is_removed_wholly() {
        let mut table = Table::decode(b"\x01aB\x01\x01bV\x01aB\x02").unwrap();
        assert_eq!(table.get("a"), Some(Value::U8(1)));
        assert_eq!(table.iter().count(), 3);
        assert_eq!(table.remove("a"), Some(Value::U8(1)));
        assert_eq!(table.as_bytes(), b"\x01bV");
    }

    /// A frame full of one name: in as many passes as there are fields, this would take minutes.
    #[test]
    fn a_name_that_stands_tens_of_thousands_of_times_is_removed_in_one_pass() {
        let mut encoded = b"\x01bV".repeat(20_000);
        encoded.extend(b"\x01aV".repeat(20_000));
        let mut table = Table::decode(&encoded).unwrap();
        assert_eq!(table.remove("a"), Some(Value::Void));
        assert_eq!(table.as_bytes(), &encoded[..60_000]);
    }

    #[test]
    fn setting_a_name_that_stands_twice_leaves_it_once() {
        let mut table = Table::decode(b"\x01bV\x01aB\x01\x01cV\x01aB\x02").unwrap();
        table.insert("a", 9u8).unwrap();
        assert_eq!(format!("{table:?}"), r#"{"b": void, "a": 9, "c": void}"#);
    }

    #[test]
    fn a_name_that_is_not_text_can_be_asked_for() {
        let mut table = Table::new();
        table.insert(b"\xff", 1).unwrap();
        assert_eq!(table.get(b"\xff"), Some(Value::I32(1)));
        assert_eq!(table.remove(ShortStr::from_bytes(&b"\xff"[..]).unwrap()), Some(Value::I32(1)));
    }

    #[test]
    fn a_number_that_is_not_finite_is_refused_from_a_peer_too() {
        let encoded = [b"\x01nd".as_slice(), &f64::NAN.to_be_bytes()].concat();
        let error = Table::decode(&encoded).unwrap_err();
        assert_eq!((error.fault(), error.offset()), (&Fault::NotFinite, 2));
        let encoded = [b"\x01nf".as_slice(), &f32::INFINITY.to_be_bytes()].concat();
        assert_eq!(Table::decode(&encoded).unwrap_err().fault(), &Fault::NotFinite);
    }

    #[test]
    fn both_spellings_of_a_64_bit_integer_are_signed() {
        let table = Table::decode(
            b"\x01al\xff\xff\xff\xff\xff\xff\xff\xff\x01bL\xff\xff\xff\xff\xff\xff\xff\xfe",
        )
        .unwrap();
        assert_eq!(table.get("a"), Some(Value::I64(-1)));
        assert_eq!(table.get("b"), Some(Value::I64(-2)));
    }

    #[test]
    fn nesting_is_limited_both_ways() {
        let deepest = nested(MAX_DEPTH).unwrap();
        assert_eq!(deepest.depth(), MAX_DEPTH);
        assert!(Table::decode(deepest.as_bytes()).is_ok());
        assert_eq!(nested(MAX_DEPTH + 1), Err(InvalidValue::TooDeep));

        // 20,000 arrays, each the only value of the one before.
        let hostile: Vec<u8> = (0..20_000u32)
            .rev()
            .flat_map(|inside| [[b'A'].as_slice(), &(inside * 5).to_be_bytes()].concat())
            .collect();
        assert_eq!(Array::decode(&hostile).unwrap_err().fault(), &Fault::TooDeep);
    }

    #[test]
    fn a_table_that_lies_about_its_length_is_refused_where_it_lies() {
        // An inner table that claims 200 bytes and has 3.
        let error = Table::decode(b"\x01aF\x00\x00\x00\xc8\x01bV").unwrap_err();
        assert_eq!(error.fault(), &Fault::Truncated { needed: 200, left: 3 });
        assert_eq!(error.offset(), 7);
        // An inner table whose end cuts a value in two.
        let error = Table::decode(b"\x01aF\x00\x00\x00\x04\x01bI\x00").unwrap_err();
        assert_eq!(error.fault(), &Fault::Truncated { needed: 4, left: 1 });
        assert_eq!(error.offset(), 10);
        let error = Table::decode(b"\x01aF\x00\x00\x00\x03\x01b?").unwrap_err();
        assert_eq!(error.fault(), &Fault::UnknownType { tag: b'?' });
        assert_eq!(error.offset(), 9);
    }
}
