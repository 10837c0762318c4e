//! Bytes that a connection has received.

use std::io::{self, IoSliceMut};

use crate::transport::Transport;

/// Bytes received at a time besides payloads.
const SIZE: usize = 64 << 10;

/// Bytes that were received and not decoded yet.
pub struct Input {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Input {
    pub fn new() -> Self {
        Input {
            buffer: vec![0; SIZE].into(),
            start: 0,
            end: 0,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// The next `length` bytes, if they are here.
    pub fn take(&mut self, length: usize) -> Option<&[u8]> {
        let bytes = self.buffer[self.start..self.end].get(..length)?;
        self.start += length;
        Some(bytes)
    }

    /// Receives into `first`, and into the buffer what is left. The buffer has less than a header.
    /// Returns the number of bytes; 0 at the end.
    pub async fn fill(&mut self, transport: &Transport, first: &mut [u8]) -> io::Result<usize> {
        self.buffer.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        let wanted = first.len();
        let (_, room) = self.buffer.split_at_mut(self.end);
        let n = match wanted {
            0 => transport.read(&mut [IoSliceMut::new(room)]).await?,
            _ => {
                let mut parts = [IoSliceMut::new(first), IoSliceMut::new(room)];
                transport.read(&mut parts).await?
            }
        };
        self.end += n.saturating_sub(wanted);
        Ok(n)
    }

    /// Fills `bytes`. False if the connection ends before.
    pub async fn read(&mut self, transport: &Transport, bytes: &mut [u8]) -> io::Result<bool> {
        let here = bytes.len().min(self.end - self.start);
        bytes[..here].copy_from_slice(&self.buffer[self.start..][..here]);
        self.start += here;
        let mut done = here;
        while done < bytes.len() {
            match self.fill(transport, &mut bytes[done..]).await? {
                0 => return Ok(false),
                n => done += n,
            }
        }
        Ok(true)
    }

    /// Drops the next `length` bytes. False if the connection ends before.
    pub async fn skip(&mut self, transport: &Transport, mut length: u64) -> io::Result<bool> {
        loop {
            let here = length.min((self.end - self.start) as u64);
            self.start += here as usize;
            length -= here;
            if length == 0 {
                return Ok(true);
            }
            if self.fill(transport, &mut []).await? == 0 {
                return Ok(false);
            }
        }
    }
}
