//! `xor`: each byte is combined with a key and its offset, so that what is below is not what was written, and
//! what is zero below is not zero above. Tests of filters that change bytes use it.

use std::sync::Arc;

use super::{Code, Content, Filter, FilterDriver};

pub(super) const DRIVER: FilterDriver = FilterDriver {
    name: "xor",
    shown: &["key"],
    open: |open| {
        let key = open.options.take_number("key")?;
        let key = key.ok_or("Parameter 'key' is missing")?;
        let key = u8::try_from(key).map_err(|_| "Parameter 'key' expects a number up to 255")?;
        Ok(Arc::new(Xor(key)))
    },
};

#[derive(Debug)]
struct Xor(u8);

impl Code for Xor {
    fn encode(&self, offset: u64, bytes: &mut [u8]) {
        for (at, byte) in (offset..).zip(bytes) {
            *byte ^= self.0 ^ (at >> 9) as u8;
        }
    }

    fn decode(&self, offset: u64, bytes: &mut [u8]) {
        self.encode(offset, bytes);
    }
}

impl Filter for Xor {
    fn content(&self) -> Content<'_> {
        Content::Coded(self)
    }
}
