//! Fields of the JSON metadata. Each error names the field.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value};

use super::error::Luks2Error;

/// An object of the metadata, and where it is.
pub struct Object<'a> {
    path: String,
    fields: &'a Map<String, Value>,
}

/// Binary data as text.
pub fn base64(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

impl<'a> Object<'a> {
    /// The whole.
    pub fn root(value: &'a Value) -> Result<Self, Luks2Error> {
        Ok(Object {
            path: String::new(),
            fields: value.as_object().ok_or(Luks2Error::Json)?,
        })
    }

    fn path(&self, name: &str) -> String {
        format!("{}{name}", self.path)
    }

    /// The error that this field is not valid.
    pub fn wrong(&self, name: &str) -> Luks2Error {
        Luks2Error::Field(self.path(name))
    }

    /// A field of any type.
    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.fields.get(name)
    }

    fn of<T>(
        &self,
        name: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<T, Luks2Error> {
        self.get(name)
            .and_then(read)
            .ok_or_else(|| self.wrong(name))
    }

    /// A text.
    pub fn text(&self, name: &str) -> Result<&'a str, Luks2Error> {
        self.of(name, Value::as_str)
    }

    /// A number that is written as one.
    pub fn number(&self, name: &str) -> Result<u64, Luks2Error> {
        self.of(name, Value::as_u64)
    }

    /// Such a number, not zero.
    pub fn positive(&self, name: &str) -> Result<u32, Luks2Error> {
        let number = u32::try_from(self.number(name)?).ok();
        number.filter(|n| *n > 0).ok_or_else(|| self.wrong(name))
    }

    /// A number of 64 bits, which is written as a text.
    pub fn decimal(&self, name: &str) -> Result<u64, Luks2Error> {
        self.of(name, |value| {
            // `parse` takes a sign, too.
            let text = value.as_str()?;
            let digits = text.bytes().all(|byte| byte.is_ascii_digit());
            digits.then(|| text.parse().ok())?
        })
    }

    /// Binary data.
    pub fn bytes(&self, name: &str) -> Result<Vec<u8>, Luks2Error> {
        self.of(name, |value| STANDARD.decode(value.as_str()?).ok())
    }

    /// An object in this one.
    pub fn object(&self, name: &str) -> Result<Object<'a>, Luks2Error> {
        Ok(Object {
            path: self.path(name) + ".",
            fields: self.of(name, Value::as_object)?,
        })
    }

    /// A list of texts.
    pub fn texts(&self, name: &str) -> Result<Vec<&'a str>, Luks2Error> {
        self.of(name, |value| {
            value.as_array()?.iter().map(Value::as_str).collect()
        })
    }

    /// A list that need not be there.
    pub fn optional_texts(&self, name: &str) -> Result<Vec<&'a str>, Luks2Error> {
        match self.get(name) {
            None => Ok(Vec::new()),
            Some(_) => self.texts(name),
        }
    }

    /// A list of numbers of other objects.
    pub fn numbers(&self, name: &str) -> Result<Vec<u32>, Luks2Error> {
        let texts = self.texts(name)?;
        let numbers: Option<_> = texts.into_iter().map(index).collect();
        numbers.ok_or_else(|| self.wrong(name))
    }

    /// The objects in this field, each with its number.
    pub fn members(&self, name: &str) -> Result<Vec<(u32, Object<'a>)>, Luks2Error> {
        let list = self.object(name)?;
        let of = |key: &String| {
            let number = index(key).ok_or_else(|| self.wrong(name))?;
            Ok((number, list.object(key)?))
        };
        list.fields.keys().map(of).collect()
    }
}

/// The number of an object, in its only spelling.
fn index(text: &str) -> Option<u32> {
    let number: u32 = text.parse().ok()?;
    (number.to_string() == text).then_some(number)
}
