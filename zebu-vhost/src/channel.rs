//! The back-end channel: a socket on which the server notifies the front end that the device's
//! configuration has changed.
//!
//! The `vhost` crate has no such message and does not return the socket that it receives. So the
//! message with the socket is received here, before the crate reads it.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendFlags, recv,
    recvmsg, send, sendmsg,
};

/// Bytes of a message's header: its type, its flags, and the length of its payload.
const HEADER: usize = 12;
/// `VHOST_USER_SET_BACKEND_REQ_FD`
const SET_CHANNEL: u32 = 21;
/// `VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`
const CONFIG_CHANGED: u32 = 2;

/// Flags: the version of the protocol (two bits), whether this is a reply, whether one is wanted.
const VERSION: u32 = 1;
const VERSION_BITS: u32 = 3;
const REPLY: u32 = 4;
const NEED_REPLY: u32 = 8;

/// The server's end of the channel.
#[derive(Debug)]
pub struct Channel(OwnedFd);

fn header(message: u32, flags: u32, length: u32) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    for (to, from) in bytes.chunks_mut(4).zip([message, flags, length]) {
        to.copy_from_slice(&from.to_ne_bytes());
    }
    bytes
}

fn word(bytes: &[u8; HEADER], number: usize) -> u32 {
    let word = bytes[4 * number..4 * number + 4].try_into();
    u32::from_ne_bytes(word.expect("4 bytes"))
}

impl Channel {
    /// Waits for the front end's next message. Receives it if it carries the channel; leaves any
    /// other in the socket.
    ///
    /// # Errors
    ///
    /// The connection failed, or the message carries no descriptor or several.
    pub fn take(connection: &UnixStream) -> io::Result<Option<Channel>> {
        let mut bytes = [0; HEADER];
        let (length, _) = recv(connection, &mut bytes, RecvFlags::PEEK)?;
        let flags = word(&bytes, 1);
        let is_channel = length == HEADER
            && word(&bytes, 0) == SET_CHANNEL
            && flags & (VERSION_BITS | REPLY) == VERSION
            && word(&bytes, 2) == 0;
        if !is_channel {
            return Ok(None);
        }
        let channel = receive(connection)?;
        if flags & NEED_REPLY != 0 {
            let header = header(SET_CHANNEL, VERSION | REPLY, 8);
            let parts = [IoSlice::new(&header), IoSlice::new(&[0; 8])];
            let mut none = SendAncillaryBuffer::default();
            sendmsg(connection, &parts, &mut none, SendFlags::NOSIGNAL)?;
        }
        Ok(Some(channel))
    }

    /// Notifies the front end that the configuration has changed. If the socket is full, the front
    /// end has the same message to read already.
    pub fn config_changed(&self) {
        let header = header(CONFIG_CHANGED, VERSION, 0);
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        if let Err(e) = send(&self.0, &header, flags) {
            tracing::debug!("a front end cannot be notified of the new size: {e}");
        }
    }
}

/// Receives a header and the descriptor with it.
fn receive(connection: &UnixStream) -> io::Result<Channel> {
    let mut bytes = [0; HEADER];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut bytes)];
    recvmsg(
        connection,
        &mut parts,
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let mut descriptors = ancillary.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => descriptors.collect(),
        _ => Vec::new(),
    });
    match (descriptors.next(), descriptors.next()) {
        (Some(channel), None) => Ok(Channel(channel)),
        _ => Err(io::Error::other("one descriptor is expected")),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsFd;

    use rustix::net::SendAncillaryMessage;

    use super::*;

    fn send_channel(to: &UnixStream, flags: u32, descriptors: &[&UnixStream]) {
        let descriptors: Vec<_> = descriptors.iter().map(|d| d.as_fd()).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)));
        }
        let header = header(SET_CHANNEL, flags, 0);
        let parts = [IoSlice::new(&header)];
        sendmsg(to, &parts, &mut ancillary, SendFlags::empty()).unwrap();
    }

    #[test]
    fn the_channel_is_received_and_used() {
        let (front, back) = UnixStream::pair().unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        send_channel(&front, VERSION | NEED_REPLY, &[&theirs]);
        drop(theirs);
        let channel = Channel::take(&back).unwrap().expect("it carries one");
        let mut answer = [0; HEADER + 8];
        (&front).read_exact(&mut answer).unwrap();
        assert_eq!(answer[..HEADER], header(21, 5, 8));
        assert_eq!(answer[HEADER..], [0; 8]);
        channel.config_changed();
        let mut told = [0; HEADER];
        (&ours).read_exact(&mut told).unwrap();
        assert_eq!(told, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        // A closed channel is ignored.
        drop(ours);
        channel.config_changed();
    }

    #[test]
    fn other_messages_stay_and_wrong_ones_are_refused() {
        let (front, back) = UnixStream::pair().unwrap();
        for message in [header(1, VERSION, 0), header(SET_CHANNEL, VERSION, 8)] {
            (&front).write_all(&message).unwrap();
            assert!(Channel::take(&back).unwrap().is_none());
            let mut found = [0; HEADER];
            (&back).read_exact(&mut found).unwrap();
            assert_eq!(found, message);
        }
        for descriptors in [&[][..], &[&front, &back][..]] {
            send_channel(&front, VERSION, descriptors);
            assert!(Channel::take(&back).is_err());
        }
        drop(front);
        // The end of the connection is left to the crate.
        assert!(Channel::take(&back).unwrap().is_none());
    }
}
