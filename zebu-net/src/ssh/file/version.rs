//! Which bytes a file has that is only read: its length and its time of change, as far as these tell.

use std::io;
use std::time::{Duration, SystemTime};

use super::client::{Answer, Client, Request};
use super::packet::Packet;
use crate::storage::CacheIdentity;
use crate::storage::version::Words;

/// How long ago the last change must be, so that a later one has another time: servers tell whole
/// seconds, and their clocks may differ.
const OLD: Duration = Duration::from_secs(600);

impl Client {
    /// Which bytes the file has.
    pub fn cache_identity(&self) -> CacheIdentity {
        let (options, file) = (&self.shared.options, &self.shared.file);
        let modified = file.attributes.modified;
        let modified = modified.ok_or("the server does not tell when the file was changed")?;
        let changed = SystemTime::UNIX_EPOCH + Duration::from_secs(modified.into());
        let age = SystemTime::now().duration_since(changed);
        if age.is_ok_and(|age| age >= OLD) {
            let server = &options.server;
            let port = server.port.map(|port| port.to_string());
            return Ok(Words(vec![
                "ssh".into(),
                server.host.clone(),
                port.unwrap_or_default(),
                server.user.clone().unwrap_or_default(),
                options.host_key.name().unwrap_or_default(),
                options.path.clone(),
                file.length.to_string(),
                modified.to_string(),
            ]));
        }
        Err("the file was changed within the last ten minutes")
    }

    /// Asks the server whether the file is as it was opened.
    ///
    /// # Errors
    /// `ESTALE` if it is not.
    pub async fn check(&self) -> io::Result<()> {
        let (shared, file) = (&self.shared, &self.shared.file);
        let waiting = shared.submit(Request::Stat, Packet::stat);
        match waiting.outcome().await? {
            Answer::Attributes(found)
                if (found.size, found.modified)
                    == (Some(file.length), file.attributes.modified) =>
            {
                Ok(())
            }
            _ => Err(shared.changed().into()),
        }
    }
}
