//! Reading and writing the elementary types of AMQP: integers, bits, strings, tables.

use crate::error::{DecodeError, Fault};
use crate::reply::ReplyCode;
use crate::table::Table;
use crate::text::{LongStr, Secret, ShortStr};

/// A cursor over bytes from a peer. No read goes past their end.
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
    length: usize,
    /// Bits not yet read of the last bit octet, lowest first, and how many they are.
    bits: u8,
    bits_left: u8,
}

impl<'a> Reader<'a> {
    #[inline]
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Reader { rest: bytes, length: bytes.len(), bits: 0, bits_left: 0 }
    }

    #[inline]
    pub(crate) fn offset(&self) -> usize {
        self.length - self.rest.len()
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    #[cold]
    pub(crate) fn fail(&self, fault: Fault) -> DecodeError {
        DecodeError::new(fault, "value", self.offset())
    }

    #[cold]
    fn truncated(&self, needed: u64) -> DecodeError {
        self.fail(Fault::Truncated { needed, left: self.rest.len() })
    }

    #[inline]
    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        self.bits_left = 0;
        match self.rest.split_first_chunk::<N>() {
            Some((head, rest)) => {
                self.rest = rest;
                Ok(*head)
            }
            None => Err(self.truncated(N as u64)),
        }
    }

    #[inline]
    pub(crate) fn slice(&mut self, length: usize) -> Result<&'a [u8], DecodeError> {
        self.bits_left = 0;
        match self.rest.split_at_checked(length) {
            Some((head, rest)) => {
                self.rest = rest;
                Ok(head)
            }
            None => Err(self.truncated(length as u64)),
        }
    }

    #[inline]
    pub(crate) fn bit(&mut self) -> Result<bool, DecodeError> {
        if self.bits_left == 0 {
            self.bits = self.array::<1>()?[0];
            self.bits_left = 8;
        }
        let bit = self.bits & 1 != 0;
        self.bits >>= 1;
        self.bits_left -= 1;
        Ok(bit)
    }

    /// A slice with its length in four octets before it.
    #[inline]
    pub(crate) fn long_slice(&mut self) -> Result<&'a [u8], DecodeError> {
        let length = u32::from_be_bytes(self.array()?);
        self.slice(length as usize)
    }

    #[inline]
    pub(crate) fn end(&self) -> Result<(), DecodeError> {
        match self.rest.len() {
            0 => Ok(()),
            left => Err(self.fail(Fault::TrailingBytes { left })),
        }
    }
}

/// Appends to a buffer. Never fails: what is too large for its frame is found when the frame is closed.
pub(crate) struct Writer<'b> {
    pub(crate) buffer: &'b mut Vec<u8>,
    /// How many bits of the last octet are in use, if it is one of bits.
    bits_used: u8,
}

impl<'b> Writer<'b> {
    #[inline]
    pub(crate) fn new(buffer: &'b mut Vec<u8>) -> Self {
        Writer { buffer, bits_used: 0 }
    }

    #[inline]
    pub(crate) fn put(&mut self, bytes: &[u8]) {
        self.bits_used = 0;
        self.buffer.extend_from_slice(bytes);
    }

    #[inline]
    pub(crate) fn bit(&mut self, bit: bool) {
        if self.bits_used & 7 == 0 {
            self.buffer.push(u8::from(bit));
            self.bits_used = 1;
            return;
        }
        if let Some(octet) = self.buffer.last_mut() {
            *octet |= u8::from(bit) << self.bits_used;
        }
        self.bits_used += 1;
    }

    /// A slice with its length in four octets before it.
    #[inline]
    pub(crate) fn long_slice(&mut self, bytes: &[u8]) {
        self.put(&(bytes.len() as u32).to_be_bytes());
        self.put(bytes);
    }
}

/// A type that a method's field or a property can have.
pub(crate) trait Field<'a>: Sized {
    /// The same without the lifetime of the bytes it was read from.
    type Owned: 'static;
    fn read(reader: &mut Reader<'a>) -> Result<Self, DecodeError>;
    fn write(&self, writer: &mut Writer<'_>);
    fn own(self) -> Self::Owned;
}

macro_rules! integer_fields {
    ($($integer:ty),*) => {$(
        impl Field<'_> for $integer {
            type Owned = Self;
            #[inline]
            fn read(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
                reader.array().map(<$integer>::from_be_bytes)
            }
            #[inline]
            fn write(&self, writer: &mut Writer<'_>) {
                writer.put(&self.to_be_bytes());
            }
            #[inline]
            fn own(self) -> Self { self }
        }
    )*};
}

integer_fields!(u8, u16, u32, u64);

impl Field<'_> for bool {
    type Owned = Self;
    #[inline]
    fn read(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        reader.bit()
    }
    #[inline]
    fn write(&self, writer: &mut Writer<'_>) {
        writer.bit(*self);
    }
    #[inline]
    fn own(self) -> Self {
        self
    }
}

impl Field<'_> for ReplyCode {
    type Owned = Self;
    #[inline]
    fn read(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        u16::read(reader).map(ReplyCode)
    }
    #[inline]
    fn write(&self, writer: &mut Writer<'_>) {
        self.0.write(writer);
    }
    #[inline]
    fn own(self) -> Self {
        self
    }
}

impl<'a> Field<'a> for ShortStr<'a> {
    type Owned = ShortStr<'static>;
    #[inline]
    fn read(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        let [length] = reader.array()?;
        reader.slice(usize::from(length)).map(ShortStr::from_wire)
    }
    #[inline]
    fn write(&self, writer: &mut Writer<'_>) {
        writer.put(&[self.len() as u8]);
        writer.put(self.as_bytes());
    }
    fn own(self) -> Self::Owned {
        self.into_owned()
    }
}

impl<'a> Field<'a> for LongStr<'a> {
    type Owned = LongStr<'static>;
    #[inline]
    fn read(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        reader.long_slice().map(LongStr::from)
    }
    #[inline]
    fn write(&self, writer: &mut Writer<'_>) {
        writer.long_slice(self.as_bytes());
    }
    fn own(self) -> Self::Owned {
        self.into_owned()
    }
}

impl<'a> Field<'a> for Secret<'a> {
    type Owned = Secret<'static>;
    #[inline]
    fn read(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        reader.long_slice().map(Secret::new)
    }
    #[inline]
    fn write(&self, writer: &mut Writer<'_>) {
        writer.long_slice(self.expose());
    }
    fn own(self) -> Self::Owned {
        self.into_owned()
    }
}

impl<'a> Field<'a> for Table<'a> {
    type Owned = Table<'static>;
    #[inline]
    fn read(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        let bytes = reader.long_slice()?;
        Table::decode(bytes).map_err(|error| error.shifted(reader.offset() - bytes.len()))
    }
    #[inline]
    fn write(&self, writer: &mut Writer<'_>) {
        writer.long_slice(self.as_bytes());
    }
    fn own(self) -> Self::Owned {
        self.into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_bits_share_octets_and_any_other_field_starts_a_new_one() {
        let mut buffer = Vec::new();
        let mut writer = Writer::new(&mut buffer);
        for bit in [true, false, true, false, false, false, false, true, true] {
            bit.write(&mut writer);
        }
        7u8.write(&mut writer);
        true.write(&mut writer);
        assert_eq!(buffer, [0b1000_0101, 0b1, 7, 1]);

        let mut reader = Reader::new(&buffer);
        let bits: Vec<bool> = (0..9).map(|_| reader.bit().unwrap()).collect();
        assert_eq!(bits, [true, false, true, false, false, false, false, true, true]);
        assert_eq!(u8::read(&mut reader).unwrap(), 7);
        assert!(bool::read(&mut reader).unwrap());
        reader.end().unwrap();
    }

    #[test]
    fn a_read_past_the_end_says_what_it_needed_and_where() {
        let mut reader = Reader::new(&[0, 9, 5, b'a', b'b']);
        u16::read(&mut reader).unwrap();
        let error = ShortStr::read(&mut reader).unwrap_err();
        assert_eq!(error.fault(), &Fault::Truncated { needed: 5, left: 2 });
        assert_eq!(error.offset(), 3);
    }
}
