//! Arguments of bindings, which the management API tells as JSON: it does not say of which width a number is, and tells what has no
//! value as a text.

use leveret::amqp::{Array, Table, Value};
use serde_json::{Map, Value as Json};

use crate::failure::Failure;

/// How the API tells what has no value, by which headers exchanges ask for a header whatever it is.
const NO_VALUE: &str = "undefined";

/// As what a number may have been written.
type Width = fn(i64) -> Value<'static>;

/// All widths, the likeliest first. What has no room is written as wide as can be, as clients do.
const WIDTHS: [Width; 8] = [
    |number| i32::try_from(number).map_or(Value::I64(number), Value::I32),
    Value::I64,
    |number| i16::try_from(number).map_or(Value::I64(number), Value::I16),
    |number| i8::try_from(number).map_or(Value::I64(number), Value::I8),
    |number| u64::try_from(number).map_or(Value::I64(number), Value::Timestamp),
    |number| u32::try_from(number).map_or(Value::I64(number), Value::U32),
    |number| u16::try_from(number).map_or(Value::I64(number), Value::U16),
    |number| u8::try_from(number).map_or(Value::I64(number), Value::U8),
];

/// What the arguments may have been, the likeliest first.
pub(super) fn guesses(
    told: &Map<String, Json>,
) -> impl Iterator<Item = Result<Table<'static>, Failure>> {
    let as_texts = [Value::Void, NO_VALUE.into()].into_iter();
    as_texts.flat_map(move |no_value| {
        WIDTHS.map(|width| Guess { width, no_value: no_value.clone() }.table(told))
    })
}

struct Guess {
    width: Width,
    no_value: Value<'static>,
}

impl Guess {
    fn table(&self, told: &Map<String, Json>) -> Result<Table<'static>, Failure> {
        let pairs = told.iter().map(|(name, told)| Ok((name.as_str(), self.value(told)?)));
        let pairs = pairs.collect::<Result<Vec<_>, Failure>>()?;
        Table::from_pairs(pairs).map_err(Failure::new)
    }

    fn value(&self, told: &Json) -> Result<Value<'static>, Failure> {
        Ok(match told {
            Json::Null => Value::Void,
            Json::Bool(is_so) => Value::Bool(*is_so),
            Json::Number(number) => match (number.as_i64(), number.as_f64()) {
                (Some(number), _) => (self.width)(number),
                (None, number) => Value::F64(number.unwrap_or(f64::MAX)),
            },
            Json::String(text) if text == NO_VALUE => self.no_value.clone(),
            Json::String(text) => text.clone().into(),
            Json::Array(all) => {
                let all = all.iter().map(|one| self.value(one)).collect::<Result<Vec<_>, _>>()?;
                Value::Array(Array::from_values(all).map_err(Failure::new)?)
            }
            Json::Object(all) => Value::Table(self.table(all)?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_all_that_they_may_have_been() {
        let told = serde_json::json!({
            "a": "undefined", "b": true, "c": 5, "d": 5_000_000_000i64, "e": 0.5, "f": "text", "g": [5], "h": { "i": 5 },
        });
        let told = told.as_object().unwrap();
        let tables = guesses(told).map(Result::unwrap).collect::<Vec<_>>();
        for table in &tables {
            assert_eq!(table.get("b"), Some(Value::Bool(true)));
            let large = table.get("d").and_then(|large| large.as_i64());
            assert!(
                large == Some(5_000_000_000)
                    || table.get("d") == Some(Value::Timestamp(5_000_000_000))
            );
            assert_eq!(table.get("e"), Some(Value::F64(0.5)));
            assert_eq!(table.get("f"), Some("text".into()));
            let number = || table.get("c").unwrap();
            let array = Array::from_values([number()]).unwrap();
            assert_eq!(table.get("g"), Some(Value::Array(array)));
            let inner = Table::from_pairs([("i", number())]).unwrap();
            assert_eq!(table.get("h"), Some(Value::Table(inner)));
        }
        let guessed: std::collections::BTreeSet<_> =
            tables.iter().map(|table| table.as_bytes().to_vec()).collect();
        assert_eq!((tables.len(), guessed.len()), (16, 16));
        assert_eq!(tables[0].get("a"), Some(Value::Void));
        assert_eq!(tables[0].get("c"), Some(Value::I32(5)));
    }
}
