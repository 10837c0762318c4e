//! One request that changes the image: made, and reported.

use std::rc::Rc;
use std::time::Instant;

use zebu::block::{Device, Zeroing};
use zebu::storage::{Buffer, Queue};

use super::command::{Failure, Outcome};
use super::content::Content;
use super::output::Output;
use super::report::Statistics;
use super::session::Session;
use super::words::{explain, failed};

/// What is done to a range.
#[derive(Debug)]
pub enum Job {
    /// It is written.
    Data(Content),
    /// It is written compressed.
    Compressed(Content),
    /// It is written to the VM state, which is not on the disk.
    VmState(Content),
    /// It reads as zeroes.
    Zeroes(Zeroing),
    /// It reads as zeroes, or the request fails if these had to be written.
    QuickZeroes(Zeroing),
    /// Its content is not needed any more.
    Discard,
}

/// A request that changes the image.
#[derive(Debug)]
pub struct Request {
    /// The verb of the message that it failed.
    pub verb: &'static str,
    /// Where it starts, in bytes.
    pub offset: u64,
    /// How many bytes it is about.
    pub count: u64,
    /// What is done to them.
    pub job: Job,
    /// It has ended only when it is durable.
    pub durable: bool,
    /// Nothing is printed of a success.
    pub quiet: bool,
    /// The report is for machines.
    pub machine: bool,
}

impl Request {
    /// Makes the request, waits, and reports.
    pub fn run(&self, session: &mut Session) -> Outcome {
        let out = session.out.clone();
        let image = session.image()?;
        let to_vm_state = matches!(self.job, Job::VmState(_));
        if to_vm_state && image.device.top().vm_state_offset().is_none() {
            return Err(Failure::Out(failed(self.verb, libc::EOPNOTSUPP)));
        }
        if !to_vm_state && !image.has_range(self.offset, self.count) {
            return Err(Failure::Out(failed(self.verb, libc::EIO)));
        }
        let buffer = image
            .take_buffer(self.buffer_length())
            .map_err(|error| Failure::Out(explain(&out, self.verb, &error)))?;
        let buffer = self.filled(buffer);
        let start = Instant::now();
        let (buffer, result) = match to_vm_state {
            true => image.write_vm_state(self.offset, buffer, self.count as usize),
            false => {
                let making = self.make(&image.device, &image.queue, buffer);
                image.queue.block_on(making)
            }
        };
        image.give_buffer(buffer);
        match result {
            Ok(()) => self.report(&out, start),
            Err(error) => return Err(Failure::Out(explain(&out, self.verb, &error))),
        }
        Ok(())
    }

    /// Starts the request, which is reported when it has ended. The command itself succeeds.
    pub fn start(self, session: &mut Session) -> Outcome {
        let out = session.out.clone();
        let image = session.image()?;
        if !image.has_range(self.offset, self.count) {
            let text = failed(self.verb, libc::EIO);
            image.start(0, async move { out.print(format_args!("{text}\n")) });
            return Ok(());
        }
        let (device, queue) = (image.device.clone(), image.queue.clone());
        let length = self.buffer_length();
        image.start(length, self.finish(device, queue, out));
        Ok(())
    }

    /// Makes the request and reports.
    async fn finish(self, device: Rc<Device>, queue: Queue, out: Output) {
        let start = Instant::now();
        let result = match Buffer::try_new(self.buffer_length()) {
            Ok(buffer) => self.make(&device, &queue, self.filled(buffer)).await.1,
            Err(error) => Err(error.into()),
        };
        match result {
            Ok(()) => self.report(&out, start),
            Err(error) => {
                let text = explain(&out, self.verb, &error);
                out.print(format_args!("{text}\n"));
            }
        }
    }

    /// Bytes of the buffer that it needs.
    fn buffer_length(&self) -> usize {
        match self.job {
            Job::Data(_) | Job::Compressed(_) | Job::VmState(_) => self.count as usize,
            Job::Zeroes(_) | Job::QuickZeroes(_) | Job::Discard => 0,
        }
    }

    /// `buffer` with what is written in it.
    fn filled(&self, mut buffer: Buffer) -> Buffer {
        if let Job::Data(content) | Job::Compressed(content) | Job::VmState(content) = &self.job {
            content.fill(&mut buffer[..self.count as usize]);
        }
        buffer
    }

    /// Does what is to be done, with a buffer that is given back.
    async fn make(
        &self,
        device: &Device,
        queue: &Queue,
        buffer: Buffer,
    ) -> (Buffer, zebu::Result<()>) {
        let (offset, count) = (self.offset, self.count);
        let (buffer, result) = match self.job {
            _ if count == 0 => (buffer, Ok(())),
            Job::Data(_) | Job::VmState(_) => {
                let length = count as usize;
                device.write_buffer(queue, offset, buffer, length).await
            }
            Job::Compressed(_) => {
                write_compressed(device, queue, offset, buffer, count as usize).await
            }
            Job::Zeroes(zeroing) => {
                let result = device.write_zeroes(queue, offset, count, zeroing).await;
                (buffer, result)
            }
            Job::QuickZeroes(zeroing) => {
                let result = device.write_zeroes_quickly(queue, offset, count, zeroing);
                (buffer, result.await)
            }
            Job::Discard => (buffer, device.discard(queue, offset, count).await),
        };
        match result {
            Ok(()) if self.durable => (buffer, device.flush(queue).await),
            result => (buffer, result),
        }
    }

    fn report(&self, out: &Output, start: Instant) {
        let time = start.elapsed();
        if self.quiet {
            return;
        }
        let statistics = Statistics {
            verb: match self.job {
                Job::Discard => "discard",
                _ => "wrote",
            },
            offset: self.offset,
            bytes: self.count,
            time,
            machine: self.machine,
        };
        out.print(format_args!("{statistics}"));
    }
}

/// As [`Device::write_buffer`], compressed.
async fn write_compressed(
    device: &Device,
    queue: &Queue,
    offset: u64,
    mut buffer: Buffer,
    length: usize,
) -> (Buffer, zebu::Result<()>) {
    // SAFETY: the buffer lives in this future until the write has ended; a
    // dropped future waits for that before it drops the buffer.
    #[allow(unsafe_code)]
    let iov = unsafe { buffer.iov() }.slice(0, length);
    let result = device.write_compressed(queue, offset, &iov).await;
    (buffer, result)
}
