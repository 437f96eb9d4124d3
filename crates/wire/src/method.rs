//! The methods of AMQP 0-9-1 and of RabbitMQ's extensions, a module per class.
//!
//! A method is a plain struct; [`Method`] is any of them. Fields that the protocol reserves are not in
//! the structs: they are written as zero or empty, and ignored when read.
//!
//! The table of all methods is in `method/table.rs`. This file turns it into code.

use crate::error::DecodeError;
use crate::field::{Field, Reader};

mod table;

pub use table::{ALL, Method, access, basic, channel, confirm, connection, exchange, queue, tx};

/// A method that can be encoded: any of the structs in this module, or [`Method`].
///
/// This trait is sealed; what AMQP has is all here.
pub trait Encode: sealed::Sealed {
    /// The name as the specification has it, such as `basic.publish`.
    fn name(&self) -> &'static str;

    /// Appends class id, method id and fields: the payload of a method frame.
    fn encode(&self, buffer: &mut Vec<u8>);
}

/// A method that a message follows: `basic.publish`, `deliver`, `return` and `get-ok`.
pub trait CarriesContent: Encode {}

impl CarriesContent for basic::Publish<'_> {}
impl CarriesContent for basic::Return<'_> {}
impl CarriesContent for basic::Deliver<'_> {}
impl CarriesContent for basic::GetOk<'_> {}

impl Method<'_> {
    /// Whether a content header and body follow.
    pub fn carries_content(&self) -> bool {
        matches!(
            self,
            Method::BasicPublish(_)
                | Method::BasicReturn(_)
                | Method::BasicDeliver(_)
                | Method::BasicGetOk(_)
        )
    }
}

pub(crate) mod sealed {
    pub trait Sealed {}
}

/// Reads one field and, if that fails, says which one of which method.
#[inline]
fn read_field<'a, F: Field<'a>>(
    reader: &mut Reader<'a>,
    method: &'static str,
    field: &'static str,
) -> Result<F, DecodeError> {
    F::read(reader).map_err(|error| error.named(method, Some(field)))
}

/// Makes the structs, the enum, and both directions of the codec from the table of methods.
///
/// A row is `id Struct as Variant, "name" { fields }`. A field `@reserved T` is on the wire only.
macro_rules! methods {
    ($(
        $(#[$class_doc:meta])*
        $class:ident = $class_id:literal {
            $(
                $(#[$doc:meta])*
                $id:literal $name:ident [$($lt:lifetime)?] as $variant:ident, $wire_name:literal {
                    $(@reserved $before:ty,)*
                    $($(#[$field_doc:meta])* $field:ident: $ty:ty,)*
                    $(@after $after:ty,)*
                }
            )*
        }
    )*) => {
        $(
            $(#[$class_doc])*
            pub mod $class {
                // Not every class needs all of them.
                #[allow(unused_imports)]
                use crate::{
                    LongStr, ReplyCode, Secret, ShortStr, Table,
                    error::DecodeError,
                    field::{Field, Reader, Writer},
                    method::{Encode, Method, methods, read_field, sealed::Sealed},
                };

                /// The class id on the wire.
                pub const CLASS_ID: u16 = $class_id;

                $(
                    $(#[$doc])*
                    #[derive(Clone, Debug, Default, PartialEq)]
                    #[cfg_attr(feature = "arbitrary", derive(arbitrary::Arbitrary))]
                    pub struct $name $(<$lt>)? {
                        $($(#[$field_doc])* pub $field: $ty,)*
                    }

                    impl $(<$lt>)? $name $(<$lt>)? {
                        /// The name as the specification has it.
                        pub const NAME: &'static str = $wire_name;
                        /// The method id on the wire.
                        pub const ID: u16 = $id;

                        #[allow(unused_variables)]
                        #[inline]
                        fn write_fields(&self, writer: &mut Writer<'_>) {
                            $(<$before>::default().write(writer);)*
                            $(self.$field.write(writer);)*
                            $(<$after>::default().write(writer);)*
                        }
                    }

                    methods!(@read $name [$($lt)?] [$($before)*] [$($field)*] [$($after)*]);

                    impl Sealed for methods!(@any $name [$($lt)?]) {}

                    impl Encode for methods!(@any $name [$($lt)?]) {
                        fn name(&self) -> &'static str {
                            $wire_name
                        }

                        #[inline]
                        fn encode(&self, buffer: &mut Vec<u8>) {
                            const IDS: [u8; 4] = crate::method::ids($class_id, $id);
                            let mut writer = Writer::new(buffer);
                            writer.put(&IDS);
                            self.write_fields(&mut writer);
                        }
                    }

                    methods!(@convert $name [$($lt)?] $variant);
                )*
            }
        )*

        /// Class id and method id of every method.
        pub const ALL: &[(u16, u16)] = &[$($(($class_id, $id),)*)*];

        /// Any method.
        #[derive(Clone, Debug, PartialEq)]
        #[cfg_attr(feature = "arbitrary", derive(arbitrary::Arbitrary))]
        #[non_exhaustive]
        pub enum Method<'a> {
            $($(
                #[doc = concat!("`", $wire_name, "`")]
                $variant($class::$name $(<$lt>)?),
            )*)*
        }

        impl<'a> Method<'a> {
            /// Decodes the payload of a method frame. Strings and tables borrow from it.
            pub fn decode(payload: &'a [u8]) -> Result<Self, DecodeError> {
                let mut reader = Reader::new(payload);
                let reader = &mut reader;
                let class: u16 = read_field(reader, "method", "class-id")?;
                let method: u16 = read_field(reader, "method", "method-id")?;
                match (class, method) {
                    $($(
                        ($class_id, $id) => {
                            let fields = $class::$name::read_fields(reader)?;
                            reader.end().map_err(|error| error.named($wire_name, None))?;
                            Ok(Method::$variant(fields))
                        }
                    )*)*
                    (class, method) => {
                        Err(DecodeError::new(Fault::UnknownMethod { class, method }, "method", 0))
                    }
                }
            }

            /// The class id and the method id.
            pub fn id(&self) -> (u16, u16) {
                match self {
                    $($(Method::$variant(_) => ($class_id, $id),)*)*
                }
            }

            /// The name as the specification has it, such as `basic.publish`.
            pub fn name(&self) -> &'static str {
                match self {
                    $($(Method::$variant(_) => $wire_name,)*)*
                }
            }

            /// The name of the method with these ids, as a close names the method at fault.
            pub fn name_of(class: u16, method: u16) -> Option<&'static str> {
                match (class, method) {
                    $($(($class_id, $id) => Some($wire_name),)*)*
                    _ => None,
                }
            }

            /// The ids of the method with this name.
            pub(crate) fn id_of(name: &str) -> Option<(u16, u16)> {
                match name {
                    $($($wire_name => Some(($class_id, $id)),)*)*
                    _ => None,
                }
            }

            /// The same method with its own memory.
            pub fn into_owned(self) -> Method<'static> {
                match self {
                    $($(Method::$variant(method) => Method::$variant(method.into_owned()),)*)*
                }
            }
        }

        impl crate::method::sealed::Sealed for Method<'_> {}

        impl Encode for Method<'_> {
            fn name(&self) -> &'static str {
                Method::name(self)
            }

            fn encode(&self, buffer: &mut Vec<u8>) {
                match self {
                    $($(Method::$variant(method) => method.encode(buffer),)*)*
                }
            }
        }
    };

    // A struct with borrowed fields, and one without: all that differs between them.
    (@any $name:ident [$lt:lifetime]) => { $name<'_> };
    (@any $name:ident []) => { $name };

    (@read $name:ident [$lt:lifetime] $before:tt $fields:tt $after:tt) => {
        impl<$lt> $name<$lt> {
            methods!(@read_fields $lt $before $fields $after);

            /// The same method with its own memory.
            pub fn into_owned(self) -> $name<'static> {
                methods!(@own self $name $fields)
            }
        }
    };
    (@read $name:ident [] $before:tt $fields:tt $after:tt) => {
        impl $name {
            methods!(@read_fields '_ $before $fields $after);

            pub(super) fn into_owned(self) -> $name {
                self
            }
        }
    };
    (@read_fields $lt:lifetime [$($before:ty)*] [$($field:ident)*] [$($after:ty)*]) => {
        #[allow(unused_variables)]
        #[inline]
        pub(super) fn read_fields(reader: &mut Reader<$lt>) -> Result<Self, DecodeError> {
            $(read_field::<$before>(reader, Self::NAME, "reserved")?;)*
            $(let $field = read_field(reader, Self::NAME, stringify!($field))?;)*
            $(read_field::<$after>(reader, Self::NAME, "reserved")?;)*
            Ok(Self { $($field),* })
        }
    };
    (@own $this:ident $name:ident [$($field:ident)*]) => {
        $name { $($field: Field::own($this.$field)),* }
    };

    (@convert $name:ident [$lt:lifetime] $variant:ident) => {
        methods!(@conversions [<$lt>] $name<$lt>, $lt, $variant);
    };
    (@convert $name:ident [] $variant:ident) => {
        methods!(@conversions [<'a>] $name, 'a, $variant);
    };
    (@conversions [$($generics:tt)*] $ty:ty, $lt:lifetime, $variant:ident) => {
        impl $($generics)* From<$ty> for Method<$lt> {
            fn from(method: $ty) -> Self {
                Method::$variant(method)
            }
        }

        /// Gives the method back if it is another one.
        impl $($generics)* TryFrom<Method<$lt>> for $ty {
            type Error = Method<$lt>;
            fn try_from(method: Method<$lt>) -> Result<Self, Method<$lt>> {
                match method {
                    Method::$variant(method) => Ok(method),
                    other => Err(other),
                }
            }
        }
    };
}

/// Class id and method id as they stand at the start of a payload.
const fn ids(class: u16, method: u16) -> [u8; 4] {
    let ([a, b], [c, d]) = (class.to_be_bytes(), method.to_be_bytes());
    [a, b, c, d]
}

use methods;
