//! A session: the image that is open, the requests in flight on it, and the
//! commands one after another.

use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;

use zebu::block::{Device, OpenOptions, Source};
use zebu::storage::{Buffer, CacheMode, EngineKind, Handle, Queue, QueueOptions};

use super::command::{self, Command, Failure, Outcome};
use super::input::Input;
use super::output::Output;

/// The prompt, QEMU's whatever the program is called.
const PROMPT: &str = "qemu-io> ";
/// Requests in flight at most; a further one waits for all of them.
const MAX_IN_FLIGHT: usize = 1024;
/// Bytes of requests in flight at most, unless one alone has more.
const MAX_BYTES_IN_FLIGHT: usize = 256 << 20;
/// The largest buffer kept for the next request.
const MAX_SPARE: usize = 1 << 20;

/// What to open, and how.
#[derive(Clone, Debug, Default)]
pub struct Opening {
    /// The file name.
    pub name: Option<String>,
    /// Options (`-o`, or all of an `--image-opts`).
    pub options: Option<String>,
    /// The format (`-f`).
    pub format: Option<String>,
    /// For reading only (`-r`).
    pub read_only: bool,
    /// Writes go nowhere (`-s`).
    pub snapshot: bool,
    /// What is read from a backing file is kept (`-C`).
    pub copy_on_read: bool,
    /// Although others write to it (`-U`).
    pub force_share: bool,
    /// The cache mode (`-t`, `-n`).
    pub cache: CacheMode,
    /// The engine (`-i`, `-k`); None: the best there is.
    pub engine: Option<EngineKind>,
}

impl Opening {
    /// Takes one of the options that the program and `open` have in common;
    /// others give None. The error is a line to follow the program's name.
    pub fn set(&mut self, letter: char, value: Option<&str>) -> Option<Result<(), String>> {
        let value = value.unwrap_or_default();
        match letter {
            'r' => self.read_only = true,
            's' => self.snapshot = true,
            'C' => self.copy_on_read = true,
            'U' => self.force_share = true,
            'n' => self.cache = CacheMode::None,
            'k' => self.engine = Some(EngineKind::Native),
            't' => match value.parse() {
                Ok(cache) => self.cache = cache,
                Err(()) => return Some(Err(format!("Invalid cache option: {value}"))),
            },
            'i' => match value.parse() {
                Ok(engine) => self.engine = Some(engine),
                Err(e) => return Some(Err(e)),
            },
            // What to do with discards matters to writers only.
            'd' if !["ignore", "off", "unmap", "on"].contains(&value) => {
                return Some(Err(format!("Invalid discard option: {value}")));
            }
            'd' => {}
            _ => return None,
        }
        Some(Ok(()))
    }

    /// The name in messages.
    fn can_not(&self, why: impl std::fmt::Display) -> String {
        match &self.name {
            Some(name) => format!("can't open device {name}: {why}"),
            None => format!("can't open: {why}"),
        }
    }

    fn source(&self) -> Source {
        match (&self.options, &self.name) {
            (None, name) => Source::Name(name.clone().unwrap_or_default()),
            (Some(options), None) => Source::Options(options.clone()),
            (Some(options), Some(name)) => Source::Options(format!(
                "{options},file.filename={}",
                name.replace(',', ",,")
            )),
        }
    }

    fn open(&self) -> Result<OpenImage, String> {
        if self.force_share && !self.read_only {
            return Err("force-share=on can only be used with read-only images".into());
        }
        if self.copy_on_read && self.read_only {
            return Err("Can't use copy-on-read on read-only device".into());
        }
        let engine = self.engine.unwrap_or_else(EngineKind::best);
        if engine == EngineKind::Native && !self.cache.is_direct() {
            return Err(NATIVE_NEEDS_DIRECT.into());
        }
        let format = match &self.format {
            Some(name) => Some(name.parse().map_err(|e: zebu::Error| e.to_string())?),
            None => None,
        };
        let queue = Queue::new(QueueOptions {
            engine,
            ..QueueOptions::default()
        });
        let queue = queue.map_err(|e| e.to_string())?;
        let how = OpenOptions {
            format,
            write: !self.read_only && !self.snapshot,
            cache: self.cache,
            force_share: self.force_share,
            ..OpenOptions::default()
        };
        let device =
            Device::open(&queue, &self.source(), &how).map_err(|error| error.to_string())?;
        if self.copy_on_read && device.layers().len() > 1 {
            return Err("copy-on-read is not supported in this version".into());
        }
        Ok(OpenImage {
            queue,
            device: Rc::new(device),
            in_flight: Vec::new(),
            bytes_in_flight: 0,
            spare: None,
        })
    }
}

/// QEMU's words for native AIO without `O_DIRECT`.
pub const NATIVE_NEEDS_DIRECT: &str =
    "aio=native was specified, but it requires cache.direct=on, which was not specified.";

/// The image that is open.
pub struct OpenImage {
    /// What drives its requests.
    pub queue: Queue,
    /// The image.
    pub device: Rc<Device>,
    in_flight: Vec<Handle<()>>,
    bytes_in_flight: usize,
    spare: Option<Buffer>,
}

impl OpenImage {
    /// Whether a range lies inside the disk.
    pub fn has_range(&self, offset: u64, length: u64) -> bool {
        let size = self.device.size();
        offset <= size && length <= size - offset
    }

    /// A buffer of at least `length` bytes of any content.
    pub fn take_buffer(&mut self, length: usize) -> Buffer {
        match self.spare.take() {
            Some(buffer) if buffer.len() >= length => buffer,
            _ => Buffer::new(length),
        }
    }

    /// Keeps a buffer for the next request.
    pub fn give_buffer(&mut self, buffer: Buffer) {
        if buffer.len() <= MAX_SPARE {
            self.spare = Some(buffer);
        }
    }

    /// Takes a request of so many bytes, which goes on beside everything else
    /// whenever the session waits for something: nothing of it is printed
    /// before the next prompt, as in qemu-io.
    pub fn start(&mut self, bytes: usize, request: impl Future<Output = ()> + 'static) {
        if self.in_flight.len() >= MAX_IN_FLIGHT
            || self.bytes_in_flight.saturating_add(bytes) > MAX_BYTES_IN_FLIGHT
        {
            self.finish_all();
        }
        self.in_flight.push(self.queue.spawn(request));
        self.bytes_in_flight += bytes;
    }

    /// Whether there may be requests in flight.
    pub fn is_busy(&self) -> bool {
        !self.in_flight.is_empty()
    }

    /// Waits for all requests in flight.
    pub fn finish_all(&mut self) {
        let handles = std::mem::take(&mut self.in_flight);
        self.bytes_in_flight = 0;
        self.queue.block_on(async {
            for handle in handles {
                handle.await;
            }
        });
    }

    /// Lets requests in flight go on without waiting for them.
    fn advance(&self) {
        if !self.is_busy() {
            return;
        }
        let mut polled = false;
        self.queue.block_on(poll_fn(|context| {
            if std::mem::replace(&mut polled, true) {
                return Poll::Ready(());
            }
            context.waker().wake_by_ref();
            Poll::Pending
        }));
    }
}

/// A session.
pub struct Session {
    /// The program's name in messages.
    pub program: String,
    /// Where everything is printed.
    pub out: Output,
    /// The image that is open.
    pub image: Option<OpenImage>,
    /// Whether to end.
    pub quit: bool,
    failed: bool,
}

impl Session {
    /// A session without an image.
    pub fn new(program: &str) -> Session {
        Session {
            program: program.to_owned(),
            out: Output::new(),
            image: None,
            quit: false,
            failed: false,
        }
    }

    /// Opens an image.
    pub fn open(&mut self, opening: &Opening) -> Outcome {
        if self.image.is_some() {
            return Err(Failure::Named("file open already, try 'help close'".into()));
        }
        let image = opening
            .open()
            .map_err(|why| Failure::Named(opening.can_not(why)))?;
        self.image = Some(image);
        Ok(())
    }

    /// Closes the image, once what is in flight has ended.
    pub fn close(&mut self) {
        if let Some(mut image) = self.image.take() {
            image.finish_all();
        }
    }

    /// The image that is open.
    pub fn image(&mut self) -> Result<&mut OpenImage, Failure> {
        self.image.as_mut().ok_or_else(no_file)
    }

    /// Prints what a failure is to print, and remembers that there was one.
    /// `name` and `usage` are those of the command.
    pub fn fail(&mut self, failure: Failure, name: &str, usage: &str) {
        self.failed = true;
        match failure {
            Failure::Out(text) => self.out.print(format_args!("{text}\n")),
            Failure::Err(text) => self.out.error(text),
            Failure::Named(text) => self.out.error(format_args!("{}: {text}", self.program)),
            Failure::Option(text) => {
                self.out.error(format_args!("{name}: {text}"));
                self.out.print(format_args!("{usage}\n"));
            }
            Failure::Usage => self.out.print(format_args!("{usage}\n")),
            Failure::Told => {}
        }
    }

    /// Runs one line.
    pub fn run(&mut self, line: &str) {
        let words: Vec<&str> = line.split(' ').filter(|word| !word.is_empty()).collect();
        let Some((name, args)) = words.split_first() else {
            return;
        };
        let Some(command) = command::find(name) else {
            let text = format!("command \"{name}\" not found");
            return self.fail(Failure::Err(text), name, "");
        };
        if let Err(failure) = self.run_command(command, name, args) {
            self.fail(failure, name, &command.usage(command.name));
        }
        if self.out.is_broken() {
            self.quit = true;
            self.failed = true;
        }
    }

    fn run_command(&mut self, command: &Command, name: &str, args: &[&str]) -> Outcome {
        if command.needs_file && self.image.is_none() {
            return Err(no_file());
        }
        command.check_count(name, args.len())?;
        (command.run)(self, args)
    }

    /// Runs the commands of the command line.
    pub fn run_all(&mut self, commands: &[String]) {
        for line in commands {
            self.run(line);
            if self.quit {
                return;
            }
            self.out.flush_if_terminal();
        }
    }

    /// Runs commands from standard input until it ends.
    pub fn run_input(&mut self) -> std::io::Result<()> {
        let mut input = Input::start()?;
        while !self.quit {
            self.out.print(format_args!("{PROMPT}"));
            self.wait_for_line(&mut input);
            match input.take_line() {
                Some(line) => self.run(&line),
                None => break,
            }
        }
        Ok(())
    }

    /// Waits for a line, with everything printed and requests going on.
    fn wait_for_line(&mut self, input: &mut Input) {
        if let Some(image) = &self.image {
            image.advance();
        }
        if input.is_ready() {
            return;
        }
        self.out.set_waiting(true);
        match &self.image {
            Some(image) if image.is_busy() => {
                image.queue.block_on(input.wait_beside());
            }
            _ => input.wait(),
        }
        self.out.set_waiting(false);
    }

    /// Ends the session; whether all commands succeeded.
    pub fn finish(mut self) -> bool {
        self.close();
        self.out.flush();
        !self.failed && !self.out.is_broken()
    }
}

fn no_file() -> Failure {
    Failure::Err("no file open, try 'help open'".into())
}
