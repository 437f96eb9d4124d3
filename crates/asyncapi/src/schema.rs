//! [`embed`] makes a JSON Schema a part of the document. References within the schema then have to start at the document's root.

use serde_json::{Value, json};

/// The schema as it stands under this path of the document.
pub(crate) fn embed(mut schema: Value, path: &str) -> Value {
    move_references(&mut schema, path);
    match schema {
        // The schemas of anything and of nothing, as AsyncAPI takes them.
        Value::Bool(true) => json!({}),
        Value::Bool(false) => json!({ "not": {} }),
        schema => schema,
    }
}

/// References to the document's own components stay as they are.
fn move_references(part: &mut Value, path: &str) {
    match part {
        Value::Object(parts) => {
            for (name, part) in parts {
                match part {
                    Value::String(target) if name == "$ref" => {
                        if target.starts_with('#') && !target.starts_with("#/components/") {
                            target.insert_str(1, path);
                        }
                    }
                    part => move_references(part, path),
                }
            }
        }
        Value::Array(parts) => parts.iter_mut().for_each(|part| move_references(part, path)),
        _ => {}
    }
}
