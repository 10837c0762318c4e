//! A session: the open image, its requests in flight, and the execution of commands.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::rc::Rc;

use super::command::{self, Failure, Handler, Outcome};
use super::image::OpenImage;
use super::input::Input;
use super::opening::Opening;
use super::output::Output;
use crate::program::Context;

/// The prompt of qemu-io, under any name of the program.
const PROMPT: &str = "qemu-io> ";

/// A command of a session.
pub type Command = command::Command<Session>;

/// A session.
pub struct Session {
    tables: &'static [&'static [Command]],
    pub context: Rc<Context>,
    /// Where everything is printed.
    pub out: Output,
    /// The open image.
    pub image: Option<OpenImage>,
    /// The session is to end.
    pub quit: bool,
    failed: bool,
}

impl Session {
    /// A session with these commands, without an image.
    pub fn new(context: &Context, tables: &'static [&'static [Command]]) -> Session {
        Session {
            tables,
            context: Rc::new(context.clone()),
            out: Output::new(),
            image: None,
            quit: false,
            failed: false,
        }
    }

    /// The same that prints nothing.
    pub fn silent(tables: &'static [&'static [Command]]) -> Session {
        Session {
            out: Output::silent(),
            ..Session::new(&Context::new(None), tables)
        }
    }

    /// All commands, in the order of the help.
    pub fn commands(&self) -> impl Iterator<Item = &'static Command> {
        let mut commands: Vec<_> = self.tables.iter().copied().flatten().collect();
        commands.sort_by_key(|c| c.name);
        commands.into_iter()
    }

    /// The command of this name or alias.
    pub fn command(&self, name: &str) -> Option<&'static Command> {
        let mut commands = self.tables.iter().copied().flatten();
        commands.find(|c| c.name == name || (!c.alias.is_empty() && c.alias == name))
    }

    /// Opens an image.
    pub fn open(&mut self, opening: &Opening) -> Outcome {
        if self.image.is_some() {
            return Err(Failure::Named("file open already, try 'help close'".into()));
        }
        let image = OpenImage::open(&self.context, opening)
            .map_err(|why| Failure::Named(opening.cannot(why)))?;
        self.image = Some(image);
        Ok(())
    }

    /// Closes the image after requests in flight have ended. Everything is durable afterwards.
    pub fn close(&mut self) -> Outcome {
        match self.image.take() {
            Some(image) => image
                .close()
                .map_err(|error| Failure::Named(format!("close failed: {error}"))),
            None => Ok(()),
        }
    }

    /// The open image.
    pub fn image(&mut self) -> Result<&mut OpenImage, Failure> {
        self.image.as_mut().ok_or_else(no_file)
    }

    /// The open image, if it is writable.
    pub fn image_to_write(&mut self) -> Result<&mut OpenImage, Failure> {
        match self.image()? {
            image if image.opening.read_only => {
                Err(Failure::Named("Block node is read-only".into()))
            }
            image => Ok(image),
        }
    }

    /// Prints a failure, and notes it for the exit status. `name` and `usage` are those of the
    /// command.
    pub fn fail(&mut self, failure: Failure, name: &str, usage: &str) {
        self.failed = true;
        match failure {
            Failure::Out(text) => self.out.print(format_args!("{text}\n")),
            Failure::Err(text) => self.out.error(text),
            Failure::Named(text) => self
                .out
                .error(format_args!("{}: {text}", self.context.name)),
            Failure::Option(text) => {
                self.out.error(format_args!("{name}: {text}"));
                self.out.print(format_args!("{usage}\n"));
            }
            Failure::Usage => self.out.print(format_args!("{usage}\n")),
            Failure::Told => {}
        }
    }

    /// Runs one line.
    pub fn run(&mut self, line: &OsStr) {
        let words = line.as_bytes().split(|b| *b == b' ');
        let words = words.filter(|word| !word.is_empty());
        let words: Vec<&OsStr> = words.map(OsStr::from_bytes).collect();
        let Some((name, args)) = words.split_first() else {
            return;
        };
        let name = &*name.to_string_lossy();
        let Some(command) = self.command(name) else {
            let text = format!("command \"{name}\" not found");
            return self.fail(Failure::Err(text), name, "");
        };
        if let Err(failure) = self.run_command(command, name, args) {
            self.fail(failure, name, &command.usage(command.name));
        }
    }

    fn run_command(&mut self, command: &Command, name: &str, args: &[&OsStr]) -> Outcome {
        if command.needs_file && self.image.is_none() {
            return Err(no_file());
        }
        command.check_count(name, args.len())?;
        let outcome = match command.run {
            Handler::Names(run) => run(self, args),
            Handler::Words(run) => {
                let words: Vec<_> = args.iter().map(|word| word.to_string_lossy()).collect();
                let words: Vec<&str> = words.iter().map(|word| &**word).collect();
                run(self, &words)
            }
        };
        self.report_suspensions();
        outcome
    }

    /// Prints which requests were suspended and resumed.
    pub fn report_suspensions(&self) {
        let file = self.image.as_ref().map(|image| image.device.top().file());
        for line in file
            .and_then(|file| file.blkdebug())
            .map_or_else(Vec::new, |debug| debug.take_log())
        {
            self.out.print(format_args!("{line}\n"));
        }
    }

    /// Runs the commands of the command line.
    pub fn run_all(&mut self, commands: &[OsString]) {
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

    /// Waits for a line. Output is flushed, and requests in flight proceed.
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
        if let Err(failure) = self.close() {
            self.fail(failure, "", "");
        }
        self.out.flush();
        !self.failed
    }
}

fn no_file() -> Failure {
    Failure::Err("no file open, try 'help open'".into())
}
